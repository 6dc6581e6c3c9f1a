"""One member of fleets whose loops belong to Accelerate or to Lightning: a process of its own.

    python trained.py INDEX FOLDER LOOP=ADDRESS ...

For each LOOP, one of LOOPS or a section of docs/your-own-loop.md, join the hub at ADDRESS, train on
the batches of member INDEX, and leave the parameters in FOLDER. Both libraries keep state for the
whole process, so that members are not threads.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import children
import numpy as np
import torch
from own_loop_page import run_block
from torch.nn.functional import cross_entropy

import edgetrain

BATCHES = 13


def data(index: int) -> torch.utils.data.DataLoader:
    """The member's batches, in order."""
    batches = [children.batch(index, number) for number in range(BATCHES)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


def accelerate(model, batches, join):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    member = join(model, optimizer)
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    member.close()


def accelerate_accumulates(model, batches, join):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with join(model, optimizer):
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def lightning(model, batches, join, **trainer):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def on_train_start(self):
            self.member = join(self, self.optimizers())

        def on_train_end(self):
            self.member.close()

    lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **trainer,
    ).fit(Module(), batches)  # fmt: skip


def lightning_accumulates(model, batches, join):
    lightning(model, batches, join, accumulate_grad_batches=2, gradient_clip_val=0.5)


def lightning_by_hand(model, batches, join):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.automatic_optimization = model, False

        def training_step(self, batch, _):
            x, y = batch
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(cross_entropy(self.model(x), y))
            first.step()
            second.step()

        def configure_optimizers(self):
            return [
                torch.optim.AdamW(self.model[0].parameters(), lr=0.01),
                torch.optim.SGD(self.model[2].parameters(), lr=0.1, momentum=0.9),
            ]

        def on_train_start(self):
            self.member = join(self, self.optimizers())

        def on_train_end(self):
            self.member.close()

    lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), batches)  # fmt: skip


LOOPS = {
    loop.__name__: loop
    for loop in (
        accelerate, accelerate_accumulates, lightning, lightning_accumulates, lightning_by_hand,
    )
}  # fmt: skip


def main(index: int, folder: Path, *fleets: str) -> None:
    torch.set_num_threads(1)
    for number, fleet in enumerate(fleets):
        name, _, address = fleet.partition("=")
        model = children.model()

        def join(model, optimizer, address=address):
            return edgetrain.join(address, model, optimizer, name=f"m{index}", weight=1 + index)

        if name in LOOPS:
            LOOPS[name](model, data(index), join)
        else:
            run_block(name, address, model, data(index))
        np.save(folder / f"{number}-{index}.npy", children.flat(model))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
