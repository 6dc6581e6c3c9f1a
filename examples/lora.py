"""Fine-tunes a language model with LoRA: only the adapters travel (needs transformers and peft).

    edgetrain hub members=4 strategy=fedavg local_steps=10 --any-job
    python examples/lora.py 0          # and 1, 2, 3: one for each member

The model is small and made from a config, the same on all members by its seed; of a model of your
own, `AutoModelForCausalLM.from_pretrained(NAME)` is that line. LoRA freezes it, and frozen weights
are compared, not sent. The first member writes what `PeftModel.from_pretrained` reads.
"""

import argparse
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import edgetrain

STEPS, LENGTH = 60, 64
number = int(sys.argv[1])
hub = sys.argv[2] if len(sys.argv) > 2 else "tcp://localhost:5555"

torch.manual_seed(0)
size = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
config = GPT2Config(**size, bos_token_id=None, eos_token_id=None)
layers = ["c_attn", "c_proj", "c_fc"]
lora = LoraConfig(r=8, lora_alpha=16, target_modules=layers, fan_in_fan_out=True)
model = get_peft_model(GPT2LMHeadModel(config), lora)

# A text that is everywhere; each member has a quarter.
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
text = text[: len(text) // (4 * LENGTH) * 4 * LENGTH].view(4, -1, LENGTH)
mine, unseen = text[number, :-8], text[:, -8:].flatten(0, 1)

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
member = edgetrain.join(hub, model, optimizer, name=f"m{number}", timeout_s=120)

torch.manual_seed(number)
for _ in range(STEPS):
    rows = mine[torch.randint(len(mine), (8,))]
    optimizer.zero_grad()
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()

member.close()
sent, whole = member.traffic().sent_bytes, sum(p.numel() for p in model.parameters())
adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
model.eval()
with torch.no_grad():
    loss = float(model(input_ids=unseen, labels=unseen).loss)
print(f"{adapters:,} of {whole:,} parameters travel; sent {sent / 1e3:,.0f} kB; loss {loss:.4f}")
if number == 0:
    model.save_pretrained("adapters")
