"""The jobs of benchmarks/cohorts.py: users whose data are made when drawn, and who trains them how.

Not a benchmark. Each function trains one job and returns its final parameters as one vector. All
see the same pictures of CIFAR's format, the same first model and, but for Flower, which draws its
own, the same cohorts. pfl and Flower are imported where they are used.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from numpy.typing import NDArray
from torch import Tensor, nn

SEED, SAMPLES, BATCH = 0, 50, 10
STEPS = SAMPLES // BATCH
"""Of a round: one local epoch."""


@dataclass(frozen=True)
class Shape:
    """A job: how many users, how many of them a round, which model, and its rate."""

    users: int
    cohort: int
    model: str
    rate: float


SHAPES = {
    "cnn": Shape(1000, 50, "cnn", 0.1),
    "logistic": Shape(100_000, 100, "logistic", 0.01),
    "million": Shape(1_000_000, 100, "logistic", 0.01),
}


def model_of(name: str) -> nn.Module:
    """pfl-research's two-layer CNN for CIFAR-10, without its dropout; or logistic regression."""
    torch.manual_seed(SEED)
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


@functools.cache
def classes() -> NDArray[np.uint8]:
    """What pictures of each class have in common."""
    return np.random.default_rng(SEED).integers(0, 128, (10, 3, 32, 32), np.uint8)


@functools.lru_cache(256)
def data_of(user: int) -> tuple[Tensor, Tensor]:
    """A user's pictures, and their labels."""
    rng = np.random.default_rng([SEED, user])
    labels = rng.integers(0, 10, SAMPLES)
    noise = np.frombuffer(rng.bytes(SAMPLES * 3072), np.uint8).reshape(SAMPLES, 3, 32, 32)
    pixels = (noise >> 1) + classes()[labels]
    return torch.from_numpy(pixels).float().sub_(128).div_(64), torch.from_numpy(labels)


class Users:
    """The task, as edgetrain has it: no user's data are kept."""

    name, metric, better, target = "users", "accuracy", "higher", None

    def __init__(self, model: str = "cnn", seed: int = SEED) -> None:
        self._model = model

    def model(self) -> nn.Module:
        return model_of(self._model)

    def samples(self, member: int, members: int) -> int:
        return SAMPLES

    def draws(self, member: int, members: int, batch: int, seed: int) -> Iterator[tuple[int, int]]:
        """Where each batch begins in its member's samples."""
        return ((member, start) for start in itertools.cycle(range(0, SAMPLES, batch)))

    def gather(self, draws: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        found = [
            tuple(each[start : start + BATCH] for each in data_of(user)) for user, start in draws
        ]
        return torch.stack([one for one, _ in found]), torch.stack([two for _, two in found])

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[Any]:
        for draw in self.draws(member, members, batch, seed):
            inputs, labels = self.gather([draw])
            yield inputs[0], labels[0]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            inputs, labels = data_of(2**31)  # no member's
            scores = model(inputs)
            hits = float((scores.argmax(1) == labels).float().mean())
            return {"loss": float(F.cross_entropy(scores, labels)), "accuracy": hits}


def vector_of(model: nn.Module) -> Tensor:
    """A model's parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def cohort(shape: Shape, round: int) -> tuple[int, ...]:
    """Who is drawn for a round."""
    from edgetrain.strategies.cohort import Cohort

    return Cohort(SEED, shape.users, shape.cohort).drawn(round)


def edgetrain_simulation(shape: Shape, rounds: int) -> Tensor:
    """By edgetrain."""
    from safetensors.torch import load_model

    import edgetrain

    with tempfile.TemporaryDirectory() as folder:
        run = edgetrain.simulate(
            task=Users(shape.model), runs=folder, progress=False, seed=SEED,
            members=shape.users, cohort=shape.cohort, network="none", pace_s=0.01, batch=BATCH,
            strategy="fedavg", local_steps=STEPS, steps=STEPS * rounds,
            evaluate_every=STEPS * rounds, optimizer={"name": "sgd", "lr": shape.rate},
        )  # fmt: skip
        model = model_of(shape.model)
        load_model(model, run.folder / "model.safetensors")
        return vector_of(model)


def trained(model: nn.Module, user: int, rate: float) -> Tensor:
    """What a user's local epoch makes of a model, which it changes."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    inputs, labels = data_of(user)
    for start in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        here = slice(start, start + BATCH)
        F.cross_entropy(model(inputs[here]), labels[here]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return vector_of(model)


def naive(shape: Shape, rounds: int) -> Tensor:
    """A loop over users: what all have to come to, and the bare gradients one after the other."""
    torch.set_num_threads(1)
    model = model_of(shape.model)
    for round in range(rounds):
        base, total = vector_of(model), torch.zeros(())
        for user in cohort(shape, round):
            nn.utils.vector_to_parameters(base.clone(), model.parameters())
            total = total + (trained(model, user, shape.rate) - base)
        nn.utils.vector_to_parameters(base + total / shape.cohort, model.parameters())
    return vector_of(model)


def threads(shape: Shape, rounds: int) -> Tensor:
    """The bare gradients, one user after the other on each of two cores."""
    torch.set_num_threads(1)
    base = vector_of(model_of(shape.model))
    models = [model_of(shape.model) for _ in range(2)]

    def some(model: nn.Module, users: Sequence[int]) -> Tensor:
        total = torch.zeros_like(base)
        for user in users:
            nn.utils.vector_to_parameters(base.clone(), model.parameters())
            total += trained(model, user, shape.rate) - base
        return total

    with ThreadPoolExecutor(2) as pool:
        for round in range(rounds):
            drawn = cohort(shape, round)
            parts = pool.map(some, models, [drawn[::2], drawn[1::2]])
            base = base + sum(parts, torch.zeros(())) / shape.cohort
    return base


def batched(shape: Shape, rounds: int, rows: int = 25) -> Tensor:
    """The bare gradients of `rows` users at once, by torch.func.vmap, on each of two cores."""
    torch.set_num_threads(1)
    model = model_of(shape.model)
    names = [name for name, _ in model.named_parameters()]

    def some(users: Sequence[int]) -> list[Tensor]:
        module = model_of(shape.model)  # of this thread: a call puts the parameters into it

        def loss(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            scores = torch.func.functional_call(module, parameters, (inputs,))
            return F.cross_entropy(scores, labels)

        gradient = torch.func.vmap(torch.func.grad(loss))
        found = [data_of(user) for user in users]
        inputs, labels = (torch.stack(each) for each in zip(*found, strict=True))
        own = {n: p.detach().expand(len(users), *p.shape).clone() for n, p in base.items()}
        for start in range(0, SAMPLES, BATCH):
            here = slice(start, start + BATCH)
            found_gradient = gradient(own, inputs[:, here], labels[:, here])
            for name in names:
                own[name].sub_(found_gradient[name], alpha=shape.rate)
        return [own[name].sum(0) for name in names]

    base = {name: each.detach().clone() for name, each in model.named_parameters()}
    with ThreadPoolExecutor(2) as pool:
        for round in range(rounds):
            drawn = cohort(shape, round)
            blocks = [drawn[at : at + rows] for at in range(0, len(drawn), rows)]
            sums = [sum(each[1:], each[0]) for each in zip(*pool.map(some, blocks), strict=True)]
            base = {n: each / shape.cohort for n, each in zip(names, sums, strict=True)}
    return torch.cat([base[name].reshape(-1) for name in names])


def pfl_simulation(shape: Shape, rounds: int) -> Tensor:
    """By pfl-research, in one process of one thread: more take longer with batches this small."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    module: Any = model_of(shape.model)
    module.loss = lambda x, y: F.cross_entropy(module(x), y)
    module.metrics = lambda x, y: {
        "loss": Weighted(F.cross_entropy(module(x), y, reduction="sum").item(), len(y))
    }
    users = iter([user for round in range(rounds) for user in cohort(shape, round)])
    data = FederatedDataset(
        lambda user: PyTorchTensorDataset(data_of(user), user_id=user), lambda: next(users)
    )
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, shape.cohort, 0),
        SimulatedBackend(data, data, [WeightByUser()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=shape.rate,
                           local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=SAMPLES),
    )  # fmt: skip
    return vector_of(module)


def flower_client(shape: Shape) -> Any:
    """What each of Flower's clients does with a message."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        model = model_of(shape.model)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        trained(model, context.node_config["partition-id"], shape.rate)
        metrics = MetricRecord({"num-examples": SAMPLES})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(content=RecordDict(content), reply_to=message)

    return app


def flower_simulation(shape: Shape, rounds: int) -> Tensor:
    """By Flower's simulation engine with Ray: an actor for each core."""
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    app, model = ServerApp(), model_of(shape.model)

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(
            fraction_train=shape.cohort / shape.users, fraction_evaluate=0.0,
            min_train_nodes=shape.cohort, min_available_nodes=shape.users,
        )  # fmt: skip
        arrays = ArrayRecord(model.state_dict())
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(app, flower_client(shape), shape.users, backend_config=resources)
    return vector_of(model)
