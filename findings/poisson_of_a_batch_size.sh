#!/usr/bin/env bash
# opacus 1.6.0, torch 2.13.0: make_private takes the sampling rate from the number of batches, and
# not from the batch size. 100 examples in batches of 64 are two batches, so each example is in each
# step with chance 1/2, a step divides by 50, and epsilon is that of 1/2; with drop_last=True they are
# one batch: every step takes all 100 and divides by 100, and no privacy is won by sampling. The fewer
# examples a device has, the further this is from 64/100.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 opacus==1.6.0
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import logging
import statistics
import warnings

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)


def private(samples, batch, drop_last):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    data = TensorDataset(torch.randn(samples, 4), torch.zeros(samples, dtype=torch.long))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch, drop_last=drop_last),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    sizes = []
    while len(sizes) < 40:
        for x, y in loader:
            sizes.append(len(x))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    rates = {rate for _, rate, _ in engine.accountant.history}
    assert len(rates) == 1
    epsilon = engine.get_epsilon(delta=1e-5)
    return rates.pop(), optimizer.expected_batch_size, sizes[:40], epsilon


for samples, batch, drop_last, rate, divides in (
    (100, 50, False, 0.5, 50), (100, 64, False, 0.5, 50), (100, 99, False, 0.5, 50),
    (100, 64, True, 1.0, 100), (10, 8, False, 0.5, 5),
):
    found, expected, sizes, epsilon = private(samples, batch, drop_last)
    print(
        f"{samples} examples, batch_size={batch}, drop_last={drop_last}: chance {found:g}, mean batch "
        f"{statistics.mean(sizes):.0f}, divided by {expected}, epsilon of 40 steps {epsilon:.1f}"
    )
    assert (found, expected) == (rate, divides)
    assert abs(statistics.mean(sizes) - rate * samples) < 0.1 * samples
    assert not drop_last or set(sizes) == {samples}
PYTHON
