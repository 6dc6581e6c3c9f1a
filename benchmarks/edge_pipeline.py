"""A pipeline over edge devices beside torch's 1F1B over gloo, on the same emulated links.

    python benchmarks/edge_pipeline.py [--network wan-100ms] [--microbatches 16,32] [--steps 4]

Four stages of a model of a million parameters, eight samples a micro-batch, each stage in a host of
its own. Ours goes through the hub in a fifth host, which is as far as one member from another:
every activation takes the way up of one link and the way down of another in both. Printed are the
seconds of a step (the median, without the first), and how far the parameters are from those of one
process that took the same steps: the largest difference of any.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from edgetrain.exchange.messages import PROTOCOL, Join
from edgetrain.exchange.pipeline.desk import StageDesk
from edgetrain.exchange.pipeline.relay import Relay
from edgetrain.exchange.pipeline.serve import StageLink, relay_messages
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import Resolved
from edgetrain.tasks.protocol import evaluating
from edgetrain.training.pipelined.hub import terms_of

HERE = Path(__file__).resolve().parent
WIDTH, LAYERS, SAMPLES, STAGES = 353, 8, 8, 4
HUB_PORT, GLOO_PORT = 7000, 29500
RATE = 0.05


@dataclass
class Wide:
    """Eight layers in a row that learn noise; see Task."""

    name: str = "wide"
    metric: str = "loss"
    better: str = "lower"
    target: float | None = None

    def model(self) -> nn.Sequential:
        pairs = [(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        return nn.Sequential(*[layer for pair in pairs for layer in pair])

    def samples(self, member: int, members: int) -> int:
        return 1 << 20

    def batches(
        self, member: int, members: int, batch: int, seed: int
    ) -> Iterator[tuple[Tensor, ...]]:
        drawn = torch.Generator().manual_seed(1000 * seed + member)
        while True:
            yield tuple(torch.randn(batch, WIDTH, generator=drawn) for _ in range(2))

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            return {"loss": float(self.loss(model, next(self.batches(99, 1, 64, 0))))}


def wide() -> Wide:
    """The task's factory."""
    return Wide()


def planned(network: str, microbatches: int, steps: int) -> Resolved:
    """The job, planned; the same in every host."""
    from dataclasses import replace

    from edgetrain.training.pipelined.planning import plan_stages

    job = load(None, [
        "task=edge_pipeline:wide", f"members={STAGES}", f"network={network}", f"steps={steps}",
        f"fleet.placement=pipeline={STAGES} microbatches={microbatches}", "strategy=sync-sgd",
        f"batch={microbatches * SAMPLES // STAGES}", f"hub.snapshot_every={steps}",
        "optimizer.name=sgd", f"optimizer.lr={RATE}", "optimizer.momentum=0",
    ])  # fmt: skip
    found = plan(job, HERE)
    return replace(found, stages=plan_stages(found))


def batches(found: Resolved) -> Iterator[tuple[Tensor, ...]]:
    """What a step of all members has."""
    from edgetrain.training.servers.steps import batches_of

    return batches_of(Wide(), found.job, 1, 0)


def reference(found: Resolved) -> dict[str, Tensor]:
    """The parameters of one process after the same steps."""
    torch.manual_seed(found.job.seed)
    model, given = Wide().model(), batches(found)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(found.job.train.steps):
        optimizer.zero_grad()
        Wide().loss(model, next(given)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def as_hub(found: Resolved) -> None:
    """Pass on."""
    socket = HubSocket(f"tcp://0.0.0.0:{HUB_PORT}")
    relay_messages(Relay(terms_of(found.job)), socket, time.monotonic, lambda effect: None)
    socket.close()


def as_stage(found: Resolved, stage: int) -> None:
    """One stage of ours: prints how far it is from one process; the first one, what a step took."""
    from edgetrain.training.pipelined.stage import TorchStage, Watcher, tree_of

    class Times(Watcher):
        def step(self, step: int, loss: float) -> None:
            ended.append(time.monotonic())

    stages = found.stages
    ended: list[float] = []
    assert stages is not None
    computes = TorchStage(found.job, Wide(), stages, stage, Times())
    placement, job = stages.placement, found.job
    desk = StageDesk(
        stage, STAGES, placement.microbatches, job.train.steps, stages.save_every,
        stages.windows[stage], computes,
    )  # fmt: skip
    socket = MemberSocket(f"tcp://{os.environ['EDGETRAIN_HUB']}:{HUB_PORT}")
    weight = float(placement.microbatches)
    join = Join(PROTOCOL, job.digest(), "", stages.elements, f"m{stage}", weight, 0)
    StageLink(desk, join, socket, time.monotonic, 60.0).run()
    socket.close()
    expected = reference(found)
    held = tree_of(computes.state())["tensors"]
    tell(ours="difference", value=max(float((held[n] - expected[n]).abs().max()) for n in held))
    if stage == 0:
        tell(ours="step", value=median(ended))


def as_rank(found: Resolved, rank: int) -> None:
    """One rank of torch's pipeline over gloo; the first one prints the seconds of a step."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stages = found.stages
    assert stages is not None
    os.environ.update(
        GLOO_SOCKET_IFNAME="eth0", RANK=str(rank), WORLD_SIZE=str(STAGES),
        MASTER_ADDR=os.environ["EDGETRAIN_ADDRESSES"].split()[1], MASTER_PORT=str(GLOO_PORT),
    )  # fmt: skip
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    torch.manual_seed(found.job.seed)
    whole, edges = Wide().model(), [0, *stages.placement.cuts, 2 * LAYERS]
    module = whole[edges[rank] : edges[rank + 1]]
    optimizer, given = torch.optim.SGD(module.parameters(), lr=RATE), batches(found)
    built = PipelineStage(module, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(
        built, stages.placement.microbatches, loss_fn=lambda o, y: (o - y).square().mean()
    )
    ended = []
    for _ in range(found.job.train.steps):
        optimizer.zero_grad()
        entered, wanted = next(given)
        if rank == 0:
            schedule.step(entered)
        elif rank == STAGES - 1:
            schedule.step(target=wanted, losses=[])
        else:
            schedule.step()
        optimizer.step()
        ended.append(time.monotonic())
    expected = reference(found)
    off = max(
        float((tensor.detach() - expected[name]).abs().max())
        for name, tensor in module.named_parameters()
    )
    tell(torch="difference", value=off)
    if rank == 0:
        tell(torch="step", value=median(ended))
    dist.barrier()
    time.sleep(1.0)
    os._exit(0)  # gloo's connections close in any order


def median(ended: list[float]) -> float:
    """Seconds of a step, without the first."""
    return statistics.median(b - a for a, b in itertools.pairwise(ended))


def tell(**said: object) -> None:
    """A line for the process that started the lab."""
    print(json.dumps(said), flush=True)


def in_host(network: str, microbatches: int, steps: int, which: str) -> None:
    """What runs in each host of the lab."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    host, found = int(os.environ["EDGETRAIN_HOST"]), planned(network, microbatches, steps)
    if which == "torch":
        if host:
            as_rank(found, host - 1)
    elif host:
        as_stage(found, host - 1)
    else:
        as_hub(found)


def measured(network: str, microbatches: int, steps: int, which: str) -> dict[str, float]:
    """What one lab prints."""
    own = [
        sys.executable, str(Path(__file__).resolve()), "--network", network,
        "--microbatches", str(microbatches), "--steps", str(steps), "--host", which,
    ]  # fmt: skip
    hub = ["--hub", shlex.join(own)] if which == "ours" else []
    lab = [sys.executable, "-m", "edgetrain", "networks", "lab", "--hosts", str(STAGES), *hub]
    command = [*lab, "--network", network, "--", *own]
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        told = errors.read()
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        begin = line.find("{")
        if begin >= 0:
            said = json.loads(line[begin:])
            told_of, value = str(said.get(which)), float(said["value"])
            found[told_of] = max(value, found.get(told_of, value))
    if "step" not in found:
        raise SystemExit(f"{which} ended without a figure:\n{done.stdout}\n{told}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--network", default="wan-100ms")
    parser.add_argument("--microbatches", default="16,32")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--host", choices=("ours", "torch"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    counts = [int(each) for each in arguments.microbatches.split(",")]
    if arguments.host:
        in_host(arguments.network, counts[0], arguments.steps, arguments.host)
        return
    print(f"{STAGES} stages, {arguments.network}, {SAMPLES} samples a micro-batch")
    for count in counts:
        ours = measured(arguments.network, count, arguments.steps, "ours")
        theirs = measured(arguments.network, count, arguments.steps, "torch")
        print(
            f"{count:3} micro-batches: a step {ours['step']:.3g} s through the hub, "
            f"{theirs['step']:.3g} s with torch's 1F1B over gloo: "
            f"{theirs['step'] / ours['step']:.1f} times the steps a second; from one process "
            f"{ours['difference']:.1e} and {theirs['difference']:.1e}"
        )


if __name__ == "__main__":
    main()
