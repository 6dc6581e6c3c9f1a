#!/usr/bin/env bash
# peft 0.21.2, transformers 5.23.0, torch 2.13.0: a model built on the meta device, given memory
# and all of its state_dict, runs; one with prompt tuning does not. The tokens of its prompt are an
# entry of a dict, neither parameter nor buffer: to_empty and load_state_dict pass them by,
# load_state_dict(strict=True) says that all keys match, and the first call raises.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import warnings

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

warnings.simplefilter("ignore")
ids = torch.randint(0, 50, (2, 8))


def made(config):
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    return get_peft_model(model, config).eval() if config is not None else model.eval()


def filled(config):
    """A model whose numbers are another's: apart by how much, or what its first call raises."""
    torch.manual_seed(0)
    whole = made(config)
    with torch.device("meta"):
        empty = made(config)
    empty.to_empty(device="cpu")
    keys = empty.load_state_dict(whole.state_dict(), strict=True)
    assert not keys.missing_keys and not keys.unexpected_keys
    try:
        return float((empty(ids).logits - whole(ids).logits).abs().max())
    except NotImplementedError as error:
        return str(error)


lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2, fan_in_fan_out=True)
prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
for name, config, expected in (
    ("GPT-2", None, 0.0), ("with LoRA", lora, 0.0),
    ("with prompt tuning", prompt, "Cannot copy out of meta tensor; no data!"),
):
    found = filled(config)
    print(f"{name}: all keys match; {found if isinstance(found, str) else f'apart by {found}'}")
    assert found == expected, found
tokens = made(prompt).prompt_tokens
assert isinstance(tokens, dict) and isinstance(tokens["default"], torch.Tensor)
PYTHON
