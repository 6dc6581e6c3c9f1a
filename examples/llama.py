"""A Llama of the transformers library, made from its configuration, on a group of processes.

    pip install transformers
    edgetrain plan examples/llama.toml
    edgetrain run examples/llama.toml
    edgetrain run examples/llama.toml servers.placement="sequence=2 tensor=2"

transformers gives the layers; what is said here is how to run them in order where some are absent
(set to None: another rank of a pipeline has them), and from which position on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from edgetrain.tasks import char_lm
from edgetrain.tasks.text import BYTES, CharLM


class Llama(nn.Module):
    """A Llama over bytes: [samples, positions] int64 in, [samples, positions, 256] scores out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        whole = LlamaForCausalLM(config)
        self.config, self.first_place = config, 0
        self.embed, self.layers = whole.model.embed_tokens, whole.model.layers
        self.rotary, self.norm, self.scores = (
            whole.model.rotary_emb,
            whole.model.norm,
            whole.lm_head,
        )

    @property
    def pieces(self) -> list[tuple[str, ...]]:
        """Where it can be cut."""
        layers = [(f"layers.{place}",) for place in range(len(self.layers))]
        return [("embed",), *layers, ("norm", "scores")]

    @property
    def tensor_plan(self) -> dict[str, str]:
        """How its layers are divided: transformers says so."""
        words = self.config.base_model_tp_plan.items()
        return {name: word for name, word in words if word in ("colwise", "rowwise")}

    def forward(self, text: Tensor) -> Tensor:
        hidden = text if text.is_floating_point() else self.embed(text)
        places = self.first_place + torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotated = self.rotary(hidden, places)
        for layer in self.layers:
            if layer is not None:
                found = layer(hidden, position_embeddings=rotated, position_ids=places)
                hidden = found[0] if isinstance(found, tuple) else found
        return hidden if self.norm is None else self.scores(self.norm(hidden))


def llama(
    width: int = 64, layers: int = 4, heads: int = 4, kv_heads: int = 2, **options: Any
) -> CharLM:
    """Predict the next byte, as char_lm does, with a Llama of this size."""
    task = char_lm(**options)
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, attn_implementation="sdpa",
        max_position_embeddings=task.size.context, tie_word_embeddings=False,
    )  # fmt: skip
    task.name = "llama"
    task.model = lambda: Llama(config)  # type: ignore[method-assign]
    return task
