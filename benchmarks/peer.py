"""One host's part in benchmarks/peers.py: the same digits job, trained by edgetrain or by another.

    EDGETRAIN_HOST=1 … python benchmarks/peer.py ddp --folder F     (peers.py does that)

Every system gets the same model, batches, optimizer and pace, and says in `F/MEMBER.jsonl` when it
began, how good the first member's model was when, and what went through its interface so far. What
is installed beside edgetrain decides which systems can run; each is imported where it is used.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from edgetrain.tasks import load_task

PORT = 5555
PATIENCE = timedelta(seconds=120)


class Course:
    """The job as this member sees it, and its diary."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        addresses = os.environ["EDGETRAIN_ADDRESSES"].split()
        self.hub, self.addresses = addresses[0], addresses[1:]
        self.index, self.members = int(os.environ["EDGETRAIN_HOST"]) - 1, len(self.addresses)
        self.steps, self.every, self.pace_s = arguments.steps, arguments.every, arguments.pace
        self.folder: Path = arguments.folder
        self.task = load_task("edgetrain.tasks:digits", {}, defaults={"seed": arguments.seed})
        torch.manual_seed(arguments.seed)
        self.model = self.task.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        self.batch = arguments.batch
        self._batches = self.task.batches(self.index, self.members, self.batch, arguments.seed)
        self._diary = (arguments.folder / f"{self.index}.jsonl").open("w")
        self._look = max(1, arguments.steps // 64)
        self._done = 0

    @property
    def address(self) -> str:
        """Of this host."""
        return self.addresses[self.index]

    def say(self, **fields: Any) -> None:
        """A line in the diary, with the time, which all hosts share."""
        print(json.dumps({"t": time.monotonic(), **fields}), file=self._diary, flush=True)

    def begin(self) -> None:
        """Training: from here on time and bytes count."""
        self._before = psutil.net_io_counters()
        self.say(begins=self.index)

    def backward(self, model: torch.nn.Module | None = None) -> None:
        """The gradient of the next batch, after the time that a slow device takes for it."""
        model = model or self.model
        time.sleep(self.pace_s)
        model.zero_grad()
        self.task.loss(model, next(self._batches)).backward()  # type: ignore[no-untyped-call]

    def stepped(self, count: int = 1) -> None:
        """So many more steps are done. Now and then: what went through the interface, and, for the
        first member, how good its model is."""
        before, self._done = self._done, self._done + count
        if self._done // self._look == before // self._look:
            return
        now, good = psutil.net_io_counters(), {}
        if self.index == 0:
            good = {"accuracy": self.task.evaluate(self.model)["accuracy"]}
        self.say(
            step=self._done,
            sent=now.bytes_sent - self._before.bytes_sent,
            received=now.bytes_recv - self._before.bytes_recv,
            **good,
        )


def edgetrain_member(course: Course) -> None:
    """Three lines of ours; the hub has the strategy."""
    import edgetrain

    hub = f"tcp://{course.hub}:{PORT}"
    member = edgetrain.join(hub, course.model, course.optimizer, insecure=True)
    with member:
        course.begin()
        for _ in range(course.steps):
            course.backward()
            member.step()
            course.stepped()


def _process_group(course: Course) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = _interface(course.address)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{course.addresses[0]}:{PORT}", rank=course.index,
        world_size=course.members, timeout=PATIENCE,
    )  # fmt: skip


def _interface(address: str) -> str:
    found = psutil.net_if_addrs()
    return next(name for name, all_ in found.items() if any(a.address == address for a in all_))


def ddp(course: Course) -> None:
    """DistributedDataParallel over gloo."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _process_group(course)
    replicated = DistributedDataParallel(course.model, gradient_as_bucket_view=False)
    dist.barrier()
    course.begin()
    for _ in range(course.steps):
        course.backward(replicated)
        course.optimizer.step()
        course.stepped()
    dist.destroy_process_group()


def post_local(course: Course) -> None:
    """torch's periodic averaging of parameters over gloo."""
    import torch.distributed as dist
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    _process_group(course)
    averager = PeriodicModelAverager(period=course.every, warmup_steps=0)
    dist.barrier()
    course.begin()
    for _ in range(course.steps):
        course.backward()
        course.optimizer.step()
        averager.average_parameters(course.model.parameters())
        course.stepped()
    dist.destroy_process_group()


def flower_member(course: Course) -> None:
    """Flower's FedAvg: `every` local steps in a fit; the optimizer stays with the client."""
    import flwr

    names = list(course.model.state_dict())

    class Client(flwr.client.NumPyClient):  # type: ignore[misc]
        """Trains where the server left off."""

        started = False

        def fit(self, parameters: Any, config: Any) -> Any:
            """One round."""
            state = {k: torch.as_tensor(v) for k, v in zip(names, parameters, strict=True)}
            course.model.load_state_dict(state)
            if not self.started:
                course.begin()
                self.started = True
            else:
                course.stepped(course.every)
            for _ in range(course.every):
                course.backward()
                course.optimizer.step()
            found = [v.detach().numpy() for v in course.model.state_dict().values()]
            return found, course.every * course.batch, {}

    flwr.client.start_client(
        server_address=f"{course.hub}:{PORT}", client=Client().to_client(), max_retries=20
    )


def flower_hub(arguments: argparse.Namespace) -> None:
    """Flower's server."""
    import flwr

    members = int(os.environ["EDGETRAIN_HOSTS"]) - 1
    torch.manual_seed(arguments.seed)
    task = load_task("edgetrain.tasks:digits", {}, defaults={"seed": arguments.seed})
    first = [v.numpy() for v in task.model().state_dict().values()]
    strategy = flwr.server.strategy.FedAvg(
        fraction_evaluate=0.0, min_fit_clients=members, min_available_clients=members,
        initial_parameters=flwr.common.ndarrays_to_parameters(first),
    )  # fmt: skip
    rounds = flwr.server.ServerConfig(num_rounds=arguments.steps // arguments.every + 1)
    flwr.server.start_server(server_address=f"0.0.0.0:{PORT}", config=rounds, strategy=strategy)


MEMBERS: dict[str, Callable[[Course], None]] = {
    "edgetrain": edgetrain_member,
    "ddp": ddp,
    "post-local": post_local,
    "flower": flower_member,
}


def main() -> None:
    """Be one host."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("system", choices=list(MEMBERS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hub", action="store_true", help="be Flower's server")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.hub:
        flower_hub(arguments)
        return
    course = Course(arguments)
    MEMBERS[arguments.system](course)


if __name__ == "__main__":
    main()
