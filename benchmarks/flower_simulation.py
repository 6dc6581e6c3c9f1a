"""Flower's part in benchmarks/simulations.py: an app, in a module of its own, as Flower wants it.

Not a benchmark; imports Flower only where it is used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

SEED, BATCH, RATE, SHARD = 0, 16, 0.1, 64
"""The job's, of both systems. SHARD: samples of a member, drawn from all."""


@functools.cache
def data() -> Any:
    """The data: read once in each of Ray's workers, not for each client."""
    from edgetrain.tasks import digits

    return digits(partition=f"shared({SHARD})", seed=SEED)


@functools.cache
def _batches(member: int, members: int) -> Callable[[int, int], Iterator[Any]]:
    """The batches of a client in this worker from a step on. Made from the first one on they would
    cost Flower, whose clients keep nothing, more with each round. No line of a user's code."""
    task = data()
    place, draws = 0, task.draws(member, members, BATCH, SEED)

    def some(start: int, count: int) -> Iterator[Any]:
        nonlocal place
        found = itertools.islice(draws, start - place, start - place + count)
        place = start + count
        return map(task.batch_of, found)

    return some


def client(members: int, local_steps: int) -> Any:
    """What each of Flower's clients does with a message."""
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        task = data()
        model = task.model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        done = (message.content["config"]["server-round"] - 1) * local_steps
        for batch in _batches(context.node_config["partition-id"], members)(done, local_steps):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": local_steps * BATCH}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def simulate(members: int, rounds: int, local_steps: int) -> float:
    """The final accuracy, by Flower's simulation engine with Ray: an actor for each core."""
    import torch
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    torch.manual_seed(SEED)
    app, model = ServerApp(), data().model()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=members, min_available_nodes=members
        )
        arrays = ArrayRecord(model.state_dict())
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(app, client(members, local_steps), members, backend_config=resources)
    return float(data().evaluate(model)["accuracy"])
