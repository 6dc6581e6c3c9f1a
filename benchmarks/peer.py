"""One host's part in benchmarks/peers.py: the same job, trained by edgetrain or by another.

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
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import Marked, cpu_seconds

if TYPE_CHECKING:
    import torch

PORT = 5555
PATIENCE = timedelta(seconds=120)
MARK = "EDGETRAIN_PEERS"
RATES = {"digits": 0.2, "char_lm": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "digits": {},
    "char_lm": {"context": 32, "limit_bytes": 200_000, "width": 32, "heads": 4, "layers": 1},
}
"""[data] of each task: char_lm as in benchmarks/frontier.py."""


class Course:
    """The job as this member sees it, and its diary."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        addresses = os.environ["EDGETRAIN_ADDRESSES"].split()
        self.hub, self.addresses = addresses[0], addresses[1:]
        self.index, self.members = int(os.environ["EDGETRAIN_HOST"]) - 1, len(self.addresses)
        self.steps, self.local_steps, self.pace_s = (
            arguments.steps,
            arguments.local_steps,
            arguments.pace,
        )
        self.folder: Path = arguments.folder
        self.task, self.model = first_model(arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATES[arguments.task])
        self.batch = arguments.batch
        self._batches = self.task.batches(self.index, self.members, self.batch, arguments.seed)
        self._diary = (arguments.folder / f"{self.index}.jsonl").open("w")
        self._look = max(1, arguments.steps // 64)
        self._done = 0
        mine = {name: os.environ[name] for name in (MARK, "EDGETRAIN_HOST")}
        self._processes = Marked(**mine)

    @property
    def address(self) -> str:
        """Of this host."""
        return self.addresses[self.index]

    def say(self, **fields: Any) -> None:
        """A line in the diary, with the time, which all hosts share."""
        print(json.dumps({"t": time.monotonic(), **fields}), file=self._diary, flush=True)

    def begin(self) -> None:
        """Training: from here on time and bytes count."""
        self._before = self._used()
        self.say(begins=self.index)

    def backward(self, model: torch.nn.Module | None = None) -> None:
        """The gradient of the next batch, after the time that a slow device takes for it."""
        model = model or self.model
        time.sleep(self.pace_s)
        model.zero_grad()
        self.task.loss(model, next(self._batches)).backward()

    def stepped(self, count: int = 1) -> None:
        """So many more steps are done. Now and then: what went through the interface, and, for the
        first member, how good its model is."""
        before, self._done = self._done, self._done + count
        if self._done // self._look == before // self._look:
            return
        used, good = self._used(), {}
        if self.index == 0:
            good = {"figure": self.task.evaluate(self.model)[self.task.metric]}
        spent = {key: used[key] - self._before[key] for key in used}
        self.say(step=self._done, **spent, **good)

    def _used(self) -> dict[str, float]:
        """Bytes through the host's interfaces and CPU seconds of its processes, so far."""
        import psutil

        net = psutil.net_io_counters()
        cpu_s = cpu_seconds(self._processes())
        return {"sent": net.bytes_sent, "received": net.bytes_recv, "cpu_s": cpu_s}


def first_model(arguments: argparse.Namespace) -> tuple[Any, torch.nn.Module]:
    """The task, and its model as all members have it at first."""
    import torch

    from edgetrain.tasks import load_task

    options = OPTIONS[arguments.task]
    seed = {"seed": arguments.seed}
    task = load_task(f"edgetrain.tasks:{arguments.task}", options, defaults=seed)
    torch.manual_seed(arguments.seed)
    return task, task.model()


def mark(variables: Mapping[str, str]) -> None:
    """Say to the processes that this one starts from now on whose they are."""
    os.environ.update(variables)


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
    import psutil

    found = psutil.net_if_addrs()
    return next(name for name, all_ in found.items() if any(a.address == address for a in all_))


def _step_together(course: Course, hook: Callable[[Any], None] | None = None) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _process_group(course)
    replicated = DistributedDataParallel(course.model)
    if hook:
        hook(replicated)
    dist.barrier()
    course.begin()
    for _ in range(course.steps):
        course.backward(replicated)
        course.optimizer.step()
        course.stepped()
    dist.destroy_process_group()


def ddp(course: Course) -> None:
    """DistributedDataParallel over gloo."""
    _step_together(course)


def _fp16(replicated: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    replicated.register_comm_hook(None, default_hooks.fp16_compress_hook)


def ddp_fp16(course: Course) -> None:
    """Its gradients in 16 bits."""
    _step_together(course, _fp16)


def _powersgd(replicated: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=10)
    replicated.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def powersgd(course: Course) -> None:
    """Its gradients by PowerSGD with error feedback, of rank 1, after ten plain steps."""
    _step_together(course, _powersgd)


def post_local(course: Course) -> None:
    """torch's periodic averaging of parameters over gloo."""
    import torch.distributed as dist
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    _process_group(course)
    averager = PeriodicModelAverager(period=course.local_steps, warmup_steps=0)
    dist.barrier()
    course.begin()
    for _ in range(course.steps):
        course.backward()
        course.optimizer.step()
        averager.average_parameters(course.model.parameters())
        course.stepped()
    dist.destroy_process_group()


def torchft(course: Course) -> None:
    """torchft's LocalSGD: a replica group a member, the lighthouse in the first member's host."""
    import subprocess
    import sys

    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import LocalSGD

    os.environ["GLOO_SOCKET_IFNAME"] = _interface(course.address)
    lighthouse = None
    if course.index == 0:
        program = Path(sys.executable).parent / "torchft_lighthouse"
        words = ["--min_replicas", str(course.members), "--quorum_tick_ms", "100"]
        words += ["--join_timeout_ms", "10000", "--bind", f"0.0.0.0:{PORT}"]
        lighthouse = subprocess.Popen([program, *words])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        course.address, PORT + 1, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE), min_replica_size=course.members,
        load_state_dict=lambda state: course.model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": course.model.state_dict()}, use_async_quorum=False,
        init_sync=False, timeout=PATIENCE, quorum_timeout=PATIENCE, connect_timeout=PATIENCE,
        rank=0, world_size=1, store_addr=course.address, store_port=store.port,
        hostname=course.address,
        lighthouse_addr=f"http://{course.addresses[0]}:{PORT}", replica_id=f"member{course.index}_",
    )  # fmt: skip
    with LocalSGD(manager, course.model, course.optimizer, sync_every=course.local_steps):
        for step in range(course.steps + course.local_steps):
            if step == course.local_steps:  # the first exchange is when all have met
                course.begin()
            course.backward()
            course.optimizer.step()
            if step >= course.local_steps:
                course.stepped()
    manager.shutdown()
    if lighthouse:
        lighthouse.kill()


def hivemind(course: Course) -> None:
    """Hivemind's DecentralizedAverager of parameters, one group of all, after K local steps."""
    import hivemind as hm
    import torch
    from hivemind.averaging import DecentralizedAverager

    place = course.folder / "hivemind.json"
    port = PORT if course.index == 0 else 0
    words: dict[str, Any] = {"host_maddrs": [f"/ip4/{course.address}/tcp/{port}"], "start": True}
    if course.index:
        while not place.exists():
            time.sleep(0.1)
        words["initial_peers"] = json.loads(place.read_text())
    dht = hm.DHT(use_ipfs=False, use_auto_relay=False, use_relay=False, **words)
    if course.index == 0:
        whole = place.with_suffix(".part")
        whole.write_text(json.dumps([str(each) for each in dht.get_visible_maddrs()]))
        whole.rename(place)
    averager = DecentralizedAverager(
        [parameter.detach().clone() for parameter in course.model.parameters()], dht,
        prefix="model", start=True, target_group_size=course.members, min_group_size=course.members,
        min_matchmaking_time=1.5, request_timeout=1.0, initial_group_bits="",
    )  # fmt: skip

    def average() -> None:
        with averager.get_tensors() as tensors, torch.no_grad():
            for mine, parameter in zip(tensors, course.model.parameters(), strict=True):
                mine.copy_(parameter)
        averager.step(timeout=PATIENCE.total_seconds())
        with averager.get_tensors() as tensors, torch.no_grad():
            for mine, parameter in zip(tensors, course.model.parameters(), strict=True):
                parameter.copy_(mine)

    average()
    course.begin()
    for step in range(course.steps):
        course.backward()
        course.optimizer.step()
        if (step + 1) % course.local_steps == 0:
            average()
        course.stepped()
    averager.shutdown()
    dht.shutdown()


def flower_member(course: Course) -> None:
    """Flower's FedAvg: K local steps in a fit; the optimizer stays with the client, which a
    supernode would start anew for each fit: start_client is deprecated, and faster."""
    import flwr
    import torch

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
                course.stepped(course.local_steps)
            for _ in range(course.local_steps):
                course.backward()
                course.optimizer.step()
            found = [v.detach().numpy() for v in course.model.state_dict().values()]
            return found, course.local_steps * course.batch, {}

    flwr.client.start_client(
        server_address=f"{course.hub}:{PORT}", client=Client().to_client(), max_retries=20
    )


def flower_hub(arguments: argparse.Namespace) -> None:
    """Flower's server."""
    import flwr

    members = int(os.environ["EDGETRAIN_HOSTS"]) - 1
    first = [v.numpy() for v in first_model(arguments)[1].state_dict().values()]
    strategy = flwr.server.strategy.FedAvg(
        fraction_evaluate=0.0, min_fit_clients=members, min_available_clients=members,
        initial_parameters=flwr.common.ndarrays_to_parameters(first),
    )  # fmt: skip
    rounds = flwr.server.ServerConfig(num_rounds=arguments.steps // arguments.local_steps + 1)
    flwr.server.start_server(server_address=f"0.0.0.0:{PORT}", config=rounds, strategy=strategy)


MEMBERS: dict[str, Callable[[Course], None]] = {
    "edgetrain": edgetrain_member,
    "ddp": ddp,
    "ddp-fp16": ddp_fp16,
    "powersgd": powersgd,
    "post-local": post_local,
    "torchft": torchft,
    "hivemind": hivemind,
    "flower": flower_member,
}
HUBS = {"flower": flower_hub}
CODE: dict[str, tuple[Callable[..., Any], ...]] = {
    "edgetrain": (edgetrain_member,),
    "ddp": (ddp, _step_together, _process_group),
    "ddp-fp16": (ddp_fp16, _fp16, _step_together, _process_group),
    "powersgd": (powersgd, _powersgd, _step_together, _process_group),
    "post-local": (post_local, _process_group),
    "torchft": (torchft,),
    "hivemind": (hivemind,),
    "flower": (flower_member, flower_hub),
}
"""What a user of each writes."""


def main() -> None:
    """Be one host."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("system", choices=list(MEMBERS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hub", action="store_true", help="be the system's server")
    parser.add_argument("--task", choices=list(RATES), default="digits")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--local-steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if arguments.hub:
        HUBS[arguments.system](arguments)
        return
    course = Course(arguments)
    MEMBERS[arguments.system](course)


if __name__ == "__main__":
    main()
