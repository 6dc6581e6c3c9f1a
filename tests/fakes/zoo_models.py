"""The zoo: small models of transformers, timm, peft and torch_geometric, made from configurations,
each with the loss that its users write; and what a fleet of two and an export make of each.

What a group of ranks makes of them is `odd_models.judge`'s. Nothing is downloaded; the libraries
are imported where a model of theirs is made (`make test-zoo`).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import children
import numpy as np
import odd_models as odd
import torch
import torch.nn.functional as F  # noqa: N812
import torchvision_beside
from naive_fleet import PATIENT, NaiveMember, Table
from torch import Tensor, nn

import edgetrain
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import metrics_path, write_job, write_summary
from edgetrain.tasks import weights
from edgetrain.tasks.draws import model_of
from edgetrain.tasks.protocol import evaluating
from edgetrain.training import export as exporting

VOCABULARY, LENGTH, CLASSES, SIDE = 32, 8, 4, 16
NODES, EDGES, WIDTH = 6, 10, 8
WAYS = {
    "own loop": "own loop", "data=2": "data=2", "zero=3": "data=2 shard=2 zero=3",
    "pipeline=2": "pipeline=2 microbatches=2", "tensor=2": "tensor=2", "export": "export",
}  # fmt: skip
"""The ways to train or use a model, as the table calls them; those of groups are placements."""
ROUNDED = 1e-6
"""How far numbers of an own loop, in float32, may be from plain torch's."""

Batch = tuple[Tensor, ...]
Draw = Callable[[np.random.Generator, int], Batch]


# -- data and losses ------------------------------------------------------------------------------


def _words(drawn: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(drawn.integers(3, VOCABULARY, shape))


def _numbers(drawn: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(drawn.standard_normal(shape))


def _classes(drawn: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(drawn.integers(0, CLASSES, shape))


def text(drawn, count):
    """Tokens, and a token for each."""
    return _words(drawn, count, LENGTH), _words(drawn, count, LENGTH)


def sentences(drawn, count):
    """Tokens, and a class for each sentence."""
    return _words(drawn, count, LENGTH), _classes(drawn, count)


def pictures(drawn, count, side=SIDE):
    return _numbers(drawn, count, 3, side, side), _classes(drawn, count)


def large_pictures(drawn, count):
    return pictures(drawn, count, 32)


def boxes(drawn, count):
    """Pictures, and a class and a box for each of two things on it."""
    return *large_pictures(drawn, count)[:1], _classes(drawn, count, 2), (
        torch.from_numpy(drawn.uniform(0.2, 0.4, (count, 2, 4)))
    )  # fmt: skip


def captions(drawn, count):
    return _words(drawn, count, LENGTH), _numbers(drawn, count, 3, SIDE, SIDE)


def spectra(drawn, count):
    return _numbers(drawn, count, 8, 16), _words(drawn, count, 6)


def waves(drawn, count):
    return _numbers(drawn, count, 200), _words(drawn, count, 3)


def graphs(drawn, count):
    """Features of nodes, edges within each graph, and a class for each node."""
    edges = torch.from_numpy(drawn.integers(0, NODES, (count, 2, EDGES)))
    return _numbers(drawn, count, NODES, WIDTH), edges, _classes(drawn, count, NODES)


def molecules(drawn, count):
    """Atoms, where they are, and an energy."""
    atoms = torch.from_numpy(drawn.integers(1, 9, (count, NODES)))
    return atoms, _numbers(drawn, count, NODES, 3), _numbers(drawn, count)


def scores(model, batch):
    """What tasks write: cross-entropy of what the model answers."""
    found = model(batch[0])
    found = found if isinstance(found, Tensor) else found.logits
    return F.cross_entropy(found.flatten(0, -2), batch[1].flatten())


def own(model, batch):
    """What transformers' users write: the model computes its loss."""
    return model(batch[0], labels=batch[1]).loss


def heard(model, batch):
    return model(input_features=batch[0], labels=batch[1]).loss


def contrast(model, batch):
    return model(input_ids=batch[0], pixel_values=batch[1], return_loss=True).loss


def found_boxes(model, batch):
    pairs = zip(batch[1], batch[2], strict=True)
    labels = [{"class_labels": classes, "boxes": where} for classes, where in pairs]
    return model(pixel_values=batch[0], labels=labels).loss


def on_nodes(model, batch):
    nodes, edges, classes = batch
    begins = NODES * torch.arange(len(nodes), device=edges.device)[:, None, None]
    found = model(nodes.flatten(0, 1), (edges + begins).transpose(0, 1).flatten(1))
    return F.cross_entropy(found, classes.flatten())


def energy(model, batch):
    atoms, places, wanted = batch
    which = torch.arange(len(atoms), device=atoms.device).repeat_interleave(NODES)
    found = model(atoms.flatten(), places.flatten(0, 1), which)
    return F.mse_loss(found.squeeze(-1), wanted)


def next_words(batch):
    """How many tokens a causal model's own loss is a mean over."""
    return (batch[1][:, 1:] != -100).sum()


def words(batch):
    return (batch[1] != -100).sum()


# -- models ---------------------------------------------------------------------------------------


class Scores(nn.Module):
    """The scores alone of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given):
        return self.model(given).logits


@dataclass(frozen=True)
class Specimen:
    """A model of the zoo, what it is given, and its loss."""

    make: Callable[[], nn.Module]
    draw: Draw = text
    loss: Callable[[nn.Module, Batch], Tensor] = scores
    counted: Callable[[Batch], Tensor] | None = None
    is_double: bool = True
    """Whether it computes in float64, too."""


def _hf(name: str, head: str = "ForCausalLM", **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        return getattr(transformers, f"{name}{head}")(config)

    return make


def _scored(name: str, head: str = "ForCausalLM", **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: Scores(_hf(name, head, **sizes)())


def _timm(name: str, **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **more)

    return make


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    sizes = {"img_size": SIDE, "patch_size": 4, "num_blocks": 2, "embed_dim": 16}
    return MlpMixer(num_classes=CLASSES, **sizes)


def _peft(base: Callable[[], nn.Module], kind: str, **how: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import peft

        return peft.get_peft_model(base(), getattr(peft, f"{kind}Config")(**how))

    return make


def _pyg(name: str, **how: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torch_geometric.nn as pyg

        return getattr(pyg, name)(WIDTH, 16, 2, CLASSES, **how)

    return make


def _schnet() -> nn.Module:
    from torch_geometric.nn import SchNet

    def near(places: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        apart = (places[:, None] - places).norm(dim=-1)
        pairs = (apart < 2) & (apart > 0) & (which[:, None] == which)
        found = pairs.nonzero().T
        return found, apart[found[0], found[1]]

    return SchNet(16, 16, 2, 8, interaction_graph=near, readout="mean")


def _detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 5}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_ffn_dim": 32, f"{side}_attention_heads": 2}
    return DetrForObjectDetection(
        DetrConfig(backbone_config=backbone, num_labels=CLASSES, dropout=0.0, **sizes)
    )


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    both = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    both |= {"num_attention_heads": 2, "projection_dim": 8}
    own = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    own |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CLIPModel(
        CLIPConfig(
            text_config=both | own,
            vision_config=both | {"image_size": SIDE, "patch_size": 4},
            projection_dim=8,
        )
    )


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16, **_TOKENS,
}  # fmt: skip
_LLAMA = _SIZES | {"intermediate_size": 32, "num_key_value_heads": 2}
_NO_DROPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = _SIZES | _NO_DROPS | {"intermediate_size": 32}
_EXPERTS = {"num_experts_per_tok": 2}
_GPT2 = {
    "vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_TOKENS,
}  # fmt: skip
_OPT = _SIZES | {"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 16}
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2,
    "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, **_TOKENS,
}  # fmt: skip
_SIDES = {
    f"{side}_{what}": value
    for side in ("encoder", "decoder")
    for what, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}
_PICTURES = {"image_size": SIDE, "patch_size": 4, "num_labels": CLASSES}
_TASK = {"task_type": "CAUSAL_LM"}

ZOO: dict[str, Specimen] = {
    "GPT-2": Specimen(_scored("GPT2", "LMHeadModel", **_GPT2)),
    "GPT-2, its own loss": Specimen(_hf("GPT2", "LMHeadModel", **_GPT2), text, own),
    "Llama": Specimen(_hf("Llama", **_LLAMA)),
    "Llama, tied, its own loss": Specimen(
        _hf("Llama", tie_word_embeddings=True, **_LLAMA), text, own, next_words
    ),
    "OPT": Specimen(_scored("OPT", **_OPT)),
    "BLOOM": Specimen(_scored("Bloom", vocab_size=VOCABULARY, hidden_size=16, n_head=4, **_TOKENS)),
    "Gemma 2": Specimen(_scored("Gemma2", head_dim=4, **_LLAMA)),
    "Qwen 3": Specimen(_scored("Qwen3", head_dim=4, **_LLAMA)),
    "Phi 3": Specimen(_scored("Phi3", **_LLAMA)),
    "Falcon": Specimen(_hf("Falcon", **_SIZES), text, own, next_words),
    "GPT-NeoX": Specimen(_scored("GPTNeoX", intermediate_size=32, **_SIZES)),
    "Mixtral": Specimen(
        _scored("Mixtral", num_local_experts=4, **_EXPERTS, **_LLAMA), is_double=False
    ),
    "Qwen 2 MoE, its own loss": Specimen(
        _hf("Qwen2Moe", num_experts=4, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, **_EXPERTS, **_LLAMA),
        text, own, next_words, is_double=False,
    ),
    "Mamba": Specimen(
        _scored("Mamba", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
    ),
    "RWKV": Specimen(
        _scored("Rwkv", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2,
                attention_hidden_size=16, intermediate_size=32, context_length=16)
    ),
    "BERT": Specimen(_scored("Bert", "ForMaskedLM", **_BERT)),
    "BERT, its own loss": Specimen(_hf("Bert", "ForMaskedLM", **_BERT), text, own, words),
    "ALBERT": Specimen(
        _scored("Albert", "ForMaskedLM", embedding_size=8, **_BERT)
    ),
    "ModernBERT": Specimen(
        _scored("ModernBert", "ForMaskedLM", intermediate_size=32, cls_token_id=1, sep_token_id=2,
                **_SIZES)
    ),
    "DeBERTa v2, sentences": Specimen(
        _scored("DebertaV2", "ForSequenceClassification", num_labels=CLASSES,
                relative_attention=True, pos_att_type=["p2c", "c2p"], **_BERT),
        sentences,
    ),
    "T5": Specimen(_hf("T5", "ForConditionalGeneration", **_T5), text, own, words),
    "BART": Specimen(
        _hf("Bart", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, dropout=0.0,
            max_position_embeddings=16, decoder_start_token_id=2, **_SIDES, **_TOKENS),
        text, own, words,
    ),
    "Whisper": Specimen(
        _hf("Whisper", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16,
            num_mel_bins=8, max_source_positions=8, max_target_positions=8,
            decoder_start_token_id=1, **_SIDES, **_TOKENS),
        spectra, heard, words,
    ),
    "wav2vec 2.0": Specimen(
        _hf("Wav2Vec2", "ForCTC", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 2),
            conv_kernel=(10, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            apply_spec_augment=False, layerdrop=0.0, hidden_dropout=0.0, activation_dropout=0.0,
            attention_dropout=0.0, final_dropout=0.0, ctc_loss_reduction="mean"),
        waves, own,
    ),
    "CLIP": Specimen(_clip, captions, contrast),
    "ViT": Specimen(
        _scored("ViT", "ForImageClassification", hidden_size=16, num_hidden_layers=2,
                num_attention_heads=4, intermediate_size=32, **_PICTURES),
        pictures,
    ),
    "Swin": Specimen(
        _scored("Swin", "ForImageClassification", embed_dim=8, depths=[1, 2], num_heads=[2, 2],
                window_size=2, drop_path_rate=0.0, **_PICTURES),
        pictures,
    ),
    "DETR": Specimen(_detr, boxes, found_boxes, is_double=False),
    "ResNet (timm)": Specimen(_timm("test_resnet"), large_pictures),
    "ConvNeXt (timm)": Specimen(_timm("test_convnext"), large_pictures),
    "EfficientNet (timm)": Specimen(_timm("test_efficientnet"), large_pictures),
    "EfficientNet, group norms (timm)": Specimen(_timm("test_efficientnet_gn"), large_pictures),
    "MobileNet v3 (timm)": Specimen(_timm("mobilenetv3_small_050"), large_pictures),
    "ViT (timm)": Specimen(_timm("test_vit", img_size=32), large_pictures),
    "MLP-Mixer (timm)": Specimen(_mixer, pictures),
    "GPT-2 with LoRA (peft)": Specimen(
        _peft(_hf("GPT2", "LMHeadModel", **_GPT2), "Lora", r=2,
              target_modules=["c_attn"], **_TASK),
        text, own, next_words,
    ),
    "OPT with a prompt (peft)": Specimen(
        _peft(_hf("OPT", **_OPT), "PromptTuning", num_virtual_tokens=3, **_TASK),
        text, own, words,
    ),
    "Llama with IA3 (peft)": Specimen(
        _peft(_hf("Llama", **_LLAMA), "IA3", target_modules=["k_proj", "v_proj", "down_proj"],
              feedforward_modules=["down_proj"], **_TASK),
    ),
    "GCN (torch_geometric)": Specimen(_pyg("GCN"), graphs, on_nodes),
    "GAT (torch_geometric)": Specimen(_pyg("GAT", heads=2), graphs, on_nodes),
    "GIN (torch_geometric)": Specimen(_pyg("GIN"), graphs, on_nodes),
    "GraphSAGE (torch_geometric)": Specimen(_pyg("GraphSAGE"), graphs, on_nodes),
    "SchNet (torch_geometric)": Specimen(_schnet, molecules, energy),
}  # fmt: skip


class Zoo:
    """The task of a model of the zoo, with data that are drawn."""

    name, metric, better, target = "zoo", "loss", "lower", None

    def __init__(self, subject: str, double: bool = True, seed: int = 0) -> None:
        """Of numbers in float64, or in float32."""
        self._found = ZOO[subject]
        self._type = torch.float64 if double and self._found.is_double else torch.float32
        if self._found.counted is not None:
            self.counted = self._found.counted

    def model(self):
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._type)
        try:
            torchvision_beside.let_in()
            return self._found.make()
        finally:
            torch.set_default_dtype(before)

    def samples(self, member, members):
        return 64

    def batches(self, member, members, batch, seed):
        drawn = np.random.default_rng([seed, member])
        while True:
            found = self._found.draw(drawn, batch)
            yield tuple(t.to(self._type) if t.is_floating_point() else t for t in found)

    def loss(self, model, batch):
        return self._found.loss(model, batch)

    def evaluate(self, model):
        with evaluating(model):
            return {"loss": float(self.loss(model, next(self.batches(99, 100, 8, 0))))}


# -- the ways -------------------------------------------------------------------------------------


def judge(worlds, subject: str, way: str) -> odd.Verdict:
    """What one of WAYS makes of a model; `worlds(n)` are n ranks that wait. Reasons are without
    names of its modules."""
    try:
        if way == "own loop":
            found = _in_a_fleet(subject)
        elif way == "export":
            found = _exported(subject)
        else:
            found = odd.judge(worlds, f"{odd.ZOO}{subject}", way, True)
    except EdgetrainError as error:
        found = odd.Verdict("refused", str(error))
    except Exception as error:
        found = odd.Verdict("failed", f"{type(error).__name__}: {error}".splitlines()[0])
    return replace(found, why=re.sub(r"'[^' ]*'", "'…'", found.why))


def _in_a_fleet(subject: str) -> odd.Verdict:
    """Two members with an own loop under sync-sgd, beside plain sums of torch's gradients."""
    task = Zoo(subject, double=False)
    hub = children.HubThread(HubSocket("tcp://127.0.0.1:0"), "sync-sgd", 2, policy=PATIENT)
    table = Table(2)

    def joined(index: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return edgetrain.join(hub.transport.address, model, optimizer, name=f"m{index}")

    def plain(index: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return NaiveMember(table, index, "sync-sgd").join(model, optimizer)

    def trained(join: Callable[..., Any]) -> list[Any]:
        models = [model_of(task, 0) for _ in range(2)]

        def train(index: int) -> np.ndarray:
            model, data = models[index], task.batches(index, 2, 4, 0)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1)
            with join(index, model, optimizer):
                for _ in range(odd.STEPS):
                    optimizer.zero_grad()
                    task.loss(model, next(data)).backward()
                    optimizer.step()
            return children.flat(model)

        return children.in_threads(*[lambda i=i: train(i) for i in range(2)])

    with hub.serving():
        ours = trained(joined)
    theirs = trained(plain)
    if ours[0].tobytes() != ours[1].tobytes():
        return odd.Verdict("wrong", "members differ")
    apart = float(np.abs(ours[0] - theirs[0]).max())
    return odd.Verdict("exact") if apart <= ROUNDED else odd.Verdict("wrong", f"{apart:.2g}")


def _exported(subject: str) -> odd.Verdict:
    """A run's folder, exported to ONNX, which onnxruntime evaluates as the task does."""
    words = ("task=zoo_models:Zoo", f"data.subject={subject}", "data.double=false")
    task = Zoo(subject, double=False)
    model = model_of(task, 0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        write_job(run, load(None, [*words, "seed=0"]).to_dict())
        metrics_path(run).touch()
        figures = task.evaluate(model)
        write_summary(run, {"status": "finished", "metric": task.metric, "final": figures})
        weights.save(model, run / weights.FILE)
        rows = exporting.export(run, ["torch", "onnx"])["files"]
    below = [row["file"] for row in rows if not row["holds"]]
    return odd.Verdict("wrong", " and ".join(below)) if below else odd.Verdict("exact")
