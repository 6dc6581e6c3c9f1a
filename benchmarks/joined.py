"""A group that is one member of a fleet: what its exchanges cost the ranks.

    python benchmarks/joined.py [--elements 50000000] [--turns 5]

On two ranks of this machine that share the parameters (`data=2 shard=2 zero=3`): seconds of an op
that does nothing (a broadcast of which one it is, once a step), of gathering all parameters to the
leader, of pushing them back, and of torch's all-gather of as many; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from harness import on_ranks

from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import look_up
from edgetrain.training.member.train import Place
from edgetrain.training.servers.joined import Op, prepare_together
from edgetrain.training.servers.mesh import open_group

WORDS = "data=2 shard=2 zero=3"


def serve(rank: int, count: int, port: int, elements: int, turns: int, out: str) -> None:
    """One rank; the leader writes the medians."""
    device = open_group(rank, count, port)
    job = load(None, ["task=edgetrain.tasks:sized", f"data.elements={elements}", "members=2",
                      f"servers.placement={WORDS}", "servers.check=off"])  # fmt: skip
    place = Place(1, "servers")
    together = prepare_together(look_up(job), place, task_of(job), WORDS, device, None)

    def median(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(turns + 1):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    found = {}
    part, parts = torch.ones(elements // 2), [torch.empty(elements // 2) for _ in range(2)]
    dist.barrier()
    found["all-gather"] = median(lambda: dist.all_gather(parts, part))
    if rank:
        together.follow()
        return
    found["op"] = median(lambda: together.lead(Op.PULL_BUFFERS))
    found["gather"] = median(lambda: together.lead(Op.PULL))
    found["push"] = median(lambda: together.lead(Op.PUSH))
    together.lead(Op.END)
    Path(out).write_text(json.dumps(found))


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    found = on_ranks(serve, 2, arguments.elements, arguments.turns)
    whole = found["all-gather"]
    print(f"{arguments.elements:,} parameters, {WORDS}, medians of {arguments.turns}")
    print(f"op          {1e3 * found['op']:8.2f} ms, 16 bytes to the other rank")
    print(f"all-gather  {1e3 * whole:8.1f} ms")
    for name in ("gather", "push"):
        print(f"{name:10}  {1e3 * found[name]:8.1f} ms, {found[name] / whole:.2f} all-gathers")


if __name__ == "__main__":
    main()
