#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0: what gradient accumulation means in Trainer depends on the
# signature of the model's forward.
#
# One step of SGD over two micro-batches with 8 and 2 labels that count. A model that returns the
# mean loss of its micro-batch moves by
#
#   forward(self, x, labels)                             the mean of both means
#   forward(self, x, labels, num_items_in_batch=None)    the same: the parameter is not passed
#   forward(self, x, labels, **kwargs)                   the sum of both means: twice as far
#
# **kwargs alone tells Trainer that the model divides by all labels of the step itself, so Trainer
# does not divide by the number of micro-batches, and a model that ignores its keywords trains with
# a learning rate that is `gradient_accumulation_steps` times as high. No warning is printed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(4, 6)
        self.given = None

    def mean_loss(self, x, labels):
        return F.cross_entropy(self.body(x).flatten(0, 1), labels.flatten(), ignore_index=-100)

    def forward(self, x, labels):
        return {"loss": self.mean_loss(x, labels)}


class Named(Plain):
    def forward(self, x, labels, num_items_in_batch=None):
        self.given = num_items_in_batch
        return {"loss": self.mean_loss(x, labels)}


class Keywords(Plain):
    def forward(self, x, labels, **kwargs):
        self.given = kwargs.get("num_items_in_batch")
        return {"loss": self.mean_loss(x, labels)}


draw = torch.Generator().manual_seed(1)
rows = [
    {
        "x": torch.randn(8, 4, generator=draw),
        "labels": torch.randint(0, 6, (8,), generator=draw),
    }
    for _ in range(2)
]
rows[1]["labels"][2:] = -100


def step(model):
    before = model.body.weight.detach().clone()
    settings = TrainingArguments(
        "out", max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )
    Trainer(model, settings, train_dataset=rows).train()
    return before - model.body.weight.detach(), model.given


def gradient(combine):
    model = Plain()
    combine([model.mean_loss(row["x"][None], row["labels"][None]) for row in rows]).backward()
    return model.body.weight.grad


mean, total = gradient(lambda each: sum(each) / 2), gradient(sum)
for model, expected, given in ((Plain(), mean, None), (Named(), mean, None), (Keywords(), total, 10)):
    moved, passed = step(model)
    torch.testing.assert_close(moved, expected)
    assert (None if passed is None else int(passed)) == given, passed
    times = float(moved.norm() / mean.norm())
    print(f"{type(model).__name__}: num_items_in_batch={given}, moved {times:.2f} x the mean of both means")
PYTHON
