"""One member of fleets whose loops belong to a trainer of another library: a process of its own.

    python trained.py INDEX FOLDER LOOP=ADDRESS ...

For each LOOP, one of LOOPS or a section of docs/how-to/your-own-loop.md, join the hub at ADDRESS,
train on the batches of member INDEX, and leave the parameters in FOLDER. Some libraries keep state
for the whole process, so that members are not threads.
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


def rows(batches):
    """All of the batches as one, for libraries that cut it into batches of its rows."""
    return [torch.cat(each) for each in zip(*batches, strict=True)]


def opacus(model, batches, join, max_rows=5):
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = torch.utils.data.TensorDataset(*rows(batches))
    private, optimizer, batches = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, poisson_sampling=False,
        data_loader=torch.utils.data.DataLoader(dataset, len(dataset) // BATCHES),
        noise_multiplier=0.0, max_grad_norm=1e9,
    )  # fmt: skip
    pieces = BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=max_rows, optimizer=optimizer
    )
    with join(model, optimizer), pieces as batches:
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(private(x), y).backward()
            optimizer.step()


def opacus_in_pieces(model, batches, join):
    opacus(model, batches, join, max_rows=2)


def ignite(model, batches, join):
    from ignite.engine import Events, create_supervised_trainer

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    with join(model, optimizer):
        trainer.run(batches, max_epochs=1)


def ignite_accumulates(model, batches, join):
    from ignite.engine import create_supervised_trainer

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(
        model, optimizer, cross_entropy, gradient_accumulation_steps=2
    )
    with join(model, optimizer):
        trainer.run(list(batches)[:-1], max_epochs=1)


def skorch(model, batches, join):
    from skorch import NeuralNet
    from skorch.callbacks import Callback

    class Fleet(Callback):
        def on_train_begin(self, net, **kwargs):
            self.member = join(net.module_, net.optimizer_)

        def on_train_end(self, net, **kwargs):
            self.member.close()

    x, y = rows(batches)
    NeuralNet(
        model, criterion=torch.nn.CrossEntropyLoss, optimizer=torch.optim.SGD, lr=0.1,
        optimizer__momentum=0.9, batch_size=len(x) // BATCHES, max_epochs=1, train_split=None,
        callbacks=[Fleet()], verbose=0,
    ).fit(x, y)  # fmt: skip


LOOPS = {
    loop.__name__: loop
    for loop in (
        accelerate, accelerate_accumulates, lightning, lightning_accumulates, lightning_by_hand,
        opacus, opacus_in_pieces, ignite, ignite_accumulates, skorch,
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
