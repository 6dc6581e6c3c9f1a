#!/usr/bin/env bash
# torch 2.13.0, transformers 5.23.0: torch's own pipeline cuts a model that has a submodule whose
# forward is under torch.no_grad(), and the first micro-batch raises: of what runs there
# torch.export makes a function that hangs on the submodule, and the cut model calls the submodule
# once more, without arguments, to get it. Rotary embeddings of transformers are written so: with
# their cache off, Llama and GPT-NeoX are cut and do not run, and GPT-2, which has none, does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import warnings

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from transformers import (
    GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM,
)

warnings.simplefilter("ignore")


class Angles(nn.Module):
    def forward(self, places):
        return places.cos()


class Angled(nn.Module):
    """Two layers, and between them the cosines of places."""

    def __init__(self, angles):
        super().__init__()
        self.first, self.angles, self.last = nn.Linear(4, 4), angles, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x) * self.angles(torch.arange(4.0)))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).logits


class AnglesWithoutGradients(Angles):
    forward = torch.no_grad()(Angles.forward)


def run(model, given, at):
    """How far the pieces, one after the other, are from the model; or what they raise."""
    cut = pipeline(model, (given,), split_spec={at: SplitPoint.BEGINNING})
    assert cut.num_stages == 2
    try:
        with torch.no_grad():
            (found,) = cut(given)
            return float((found - model(given)).abs().max())
    except RuntimeError as error:
        return str(error).splitlines()[0]


few = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
x, ids = torch.randn(2, 4), torch.randint(0, 50, (2, 8))
gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=4, n_head=2, **few)).eval()
llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes, **few)).eval()
neox = GPTNeoXForCausalLM(GPTNeoXConfig(num_attention_heads=2, **sizes, **few)).eval()
for name, model, given, at, runs in (
    ("cosines", Angled(Angles()), x, "last", True),
    ("cosines under no_grad", Angled(AnglesWithoutGradients()), x, "last", False),
    ("gpt2", Logits(gpt2), ids, "model.transformer.h.2", True),
    ("llama", Logits(llama), ids, "model.model.layers.2", False),
    ("gpt-neox", Logits(neox), ids, "model.gpt_neox.layers.2", False),
):
    found = run(model, given, at)
    print(f"{name}: two stages, {found if not runs else f'apart by {found:.1g}'}")
    if runs:
        assert isinstance(found, float) and found < 1e-5, found
    else:
        assert str(found).startswith("Expected positional argument for parameter"), found
PYTHON
