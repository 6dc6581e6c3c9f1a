#!/usr/bin/env bash
# torch 2.13.0, transformers 5.23.0: torch's own pipeline cuts BERT into stages, but no decoder as
# its configuration builds it. GPT-2 and Llama return their key-value cache from forward, also in
# training and where nobody asked for it; torch.export, which traces the model, does not know the
# cache's class and raises. With use_cache=False in the configuration the same models are cut.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import warnings

import torch
from torch.distributed.pipelining import SplitPoint, pipeline
from transformers import (
    BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
)

warnings.simplefilter("ignore")
ids = torch.randint(0, 50, (2, 8))
few = dict(vocab_size=50, bos_token_id=0, eos_token_id=1)


def gpt2(**more):
    config = GPT2Config(n_embd=16, n_layer=4, n_head=2, **few, **more)
    return GPT2LMHeadModel(config).train(), "transformer.h.2"


def llama(**more):
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        **few, **more,
    )
    return LlamaForCausalLM(config).train(), "model.layers.2"


def bert(**more):
    config = BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        vocab_size=50, **more,
    )
    return BertForMaskedLM(config).train(), "bert.encoder.layer.2"


def cut(model, at):
    """How many stages torch makes of a model, or the class of what its tracer does not know."""
    try:
        split = {at: SplitPoint.BEGINNING}
        return pipeline(model, mb_args=(), mb_kwargs={"input_ids": ids}, split_spec=split).num_stages
    except RuntimeError as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        (name,) = [word for word in str(cause).split("'") if word.endswith("Cache")][:1]
        return name.rsplit(".", 1)[-1]


for build in (gpt2, llama):
    for more, expected in (({}, "DynamicCache"), ({"use_cache": False}, 2)):
        found = cut(*build(**more))
        print(f"{build.__name__} {more or 'as built'}: {found}")
        assert found == expected, found
found = cut(*bert())
print(f"bert as built: {found}")
assert found == 2, found
PYTHON
