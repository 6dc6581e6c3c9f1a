#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0: Llama turned into float64 computes a part of itself in
# float32. Its norms convert what they are given to float32 and back, and the model's own loss
# converts the scores to float32: it is a float32, one with float32's rounding. GPT-2, which has
# torch's LayerNorm, computes its scores in float64, and its own loss in float32, too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

few = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
torch.manual_seed(0)
gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, **few)).double().eval()
llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes, **few)).double().eval()
ids = torch.randint(0, 50, (2, 8))
for name, model, norm, coarse in (
    ("GPT-2", gpt2, gpt2.transformer.ln_f, False), ("Llama", llama, llama.model.norm, True),
):
    assert all(each.dtype == torch.float64 for each in model.parameters())
    found = model(ids, labels=ids)
    given = torch.randn(4, 16, dtype=torch.float64)
    same = torch.equal(norm(given), norm(given.float().double()))
    print(f"{name}: scores {found.logits.dtype}, loss {found.loss.dtype}; "
          f"its last norm, of input rounded to float32: {'the same' if same else 'other'} bits")
    assert (found.logits.dtype, found.loss.dtype) == (torch.float64, torch.float32)
    assert same == coarse
    exact = nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    apart = abs(found.loss.item() - exact.item())
    print(f"  its loss is {apart:.1g} from the float64 loss of its scores")
    assert 1e-12 < apart < 1e-6
PYTHON
