#!/usr/bin/env bash
# peft 0.21.2, torch 2.13.0: add_weighted_adapter with combination_type="linear" mixes neither the
# adapters' matrices nor their products by the weights that it is given: each of a LoRA's two matrices
# is the sum of the adapters' times the root of a weight. Of equal adapters a half of each is not
# the adapter but twice its change, of three a third of each is three times, and all of both is four
# times. "cat" and "svd", which mix the products, give back the adapter.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import warnings

import torch
from peft import LoraConfig, get_peft_model

warnings.simplefilter("ignore")


def mixed(weights, how):
    """How many times the change of one of several equal adapters their mixture is."""
    names = [f"member{number}" for number in range(len(weights))]
    config = LoraConfig(target_modules=["0"], r=2, lora_alpha=4)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config, names[0])
    layer = model.base_model.model[0]
    torch.manual_seed(0)
    a, b = torch.randn(2, 6), torch.randn(5, 2)
    for name in names:
        if name != names[0]:
            model.add_adapter(name, config)
        layer.lora_A[name].weight.data.copy_(a)
        layer.lora_B[name].weight.data.copy_(b)
    model.add_weighted_adapter(names, weights, "mean", combination_type=how)
    one, found = layer.get_delta_weight(names[0]), layer.get_delta_weight("mean")
    times = float((found * one).sum() / (one * one).sum())
    torch.testing.assert_close(found, times * one, rtol=1e-4, atol=1e-4)
    return times


for weights, linear in (([0.5, 0.5], 2), ([1 / 3] * 3, 3), ([1.0, 1.0], 4), ([0.25, 0.75], 1.866)):
    found = {how: mixed(weights, how) for how in ("linear", "cat", "svd")}
    shown = ", ".join(f"{how} {times:.2f}" for how, times in found.items())
    print(f"equal adapters by {[round(w, 2) for w in weights]}: times the change of one: {shown}")
    assert abs(found["linear"] - linear) < 1e-3, found
    assert all(abs(found[how] - sum(weights)) < 1e-3 for how in ("cat", "svd")), found
PYTHON
