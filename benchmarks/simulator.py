"""How long the simulator takes as the fleet grows: digits, real gradients, the whole protocol.

    python benchmarks/simulator.py                        10, 100, 1,000 and 10,000 members
    python benchmarks/simulator.py --members 1000
    python benchmarks/simulator.py --strategies all         1,000 members x 20 rounds of each
    python benchmarks/simulator.py --topologies             the same of 4 hubs and of 10 gateways

Every member takes `--rounds` rounds of `--local-steps` steps (fedavg, plain SGD) behind a link of
its own; evaluations and metrics included. The time of a member's round stays the same where time
grows linearly. Seconds are this machine's; what the fleet would have taken is virtual.

With --strategies each is run between two runs of fedavg, `--turns` times, and the median of the
ratios of CPU seconds is compared with its bar: 1.5, and 2.5 for strategies that act at every step.
All take a round every `--local-steps` steps; streaming-diloco's are of one fragment each. With
--topologies fedavg over each is run between two runs over a star; the bar is 1.5. Members behind
gateways are in sites of equal size. Exit status 1 if one is slower.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgetrain import strategies
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create
from edgetrain.strategies.spelling import split_list
from edgetrain.training.simulated import simulation
from edgetrain.training.simulated.batched import Rows

DEFAULT = [10, 100, 1000, 10_000]
"""Members of the fleets."""

ARGUMENTS = {"mu": 0.1, "M": 0.0, "a": 0.5, "s": 0.0, "fetch": 5.0, "P": 5.0, "alpha": 0.5}
"""Of strategies that have some; M is all members. With a smaller M or a larger s there are more
replies to send."""


HUBS, GATEWAYS = 4, 10
"""Of --topologies."""


def measure(
    args: argparse.Namespace, members: int, strategy: str = "fedavg", words: Sequence[str] = ()
) -> dict[str, Any]:
    """Simulate one fleet; what it took. `words`: what its job says besides."""
    rounds, job = rounds_of(args, members), job_of(args, members, strategy, words)
    began, began_cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        planned = plan(job)
        summary = simulation.run(planned, create(Path(folder), "simulator"))
    seconds = time.perf_counter() - began
    return {
        "members": members,
        "rounds": rounds,
        "seconds": seconds,
        "cpu_seconds": time.process_time() - began_cpu,
        "virtual_seconds": summary["seconds"],
        "us_per_member_round": 1e6 * seconds / members / rounds,
        "events": summary["emulation"]["events"],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "final": summary["final"]["accuracy"],
        "how": summary["emulation"]["reason"],
    }


def job_of(args: argparse.Namespace, members: int, strategy: str, words: Sequence[str]) -> Job:
    """A fleet's job; `words`: what it says besides."""
    row = strategies.find(strategy)
    return load(
        None,
        [
            f"members={members}",
            "device=raspberry-pi-4b",
            f"network={args.network}",
            f"steps={rounds_of(args, members) * (args.local_steps if row.has_local_steps else 1)}",
            f"batch={args.batch}",
            "optimizer={ name = 'sgd', lr = 0.05 }",
            f"strategy={strategy}",
            *([f"local_steps={args.local_steps * row.ranges}"] if row.has_local_steps else []),
            f"delay={args.local_steps if row.delays else 0}",
            "data.partition=shared(64)",
            f"message_s={args.message_s}",
            *words,
        ],
    )


def rounds_of(args: argparse.Namespace, members: int) -> int:
    """Rounds of a fleet of this size."""
    return int(min(args.rounds, max(1, args.most // members)))


def bare(args: argparse.Namespace, members: int) -> dict[str, float]:
    """The same gradients and steps, batched in as many threads, without hub, links and protocol."""
    found = plan(job_of(args, members, "fedavg", ()))
    began, began_cpu = time.perf_counter(), time.process_time()
    rows = Rows(task_of(found.job, found.beside), found)
    work = [rows.member(index)[2] for index in range(members)]
    for _ in range(rounds_of(args, members)):
        for loss in [each.backward(args.local_steps - 1) for each in work]:
            loss()
        for _ in range(args.local_steps - 1):
            for each in work:
                each.backward()
    rows.close()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - began_cpu,
    }


def bar_of(row: strategies.Strategy) -> float:
    """How many times fedavg's time a row may take."""
    return 2.5 if row.has_variates or (row.adjusts_gradient and row.has_local_steps) else 1.5


def spelled(text: str) -> list[str]:
    """The strategies that --strategies names."""
    if text != "all":
        return split_list(text)
    return [
        replace(row, arguments=tuple(ARGUMENTS[p.name] for p in row.parameters)).spelled
        for row in strategies.TABLE.values()
    ]


def topologies(members: int) -> dict[str, list[str]]:
    """What the job of each topology says."""
    hubs = ", ".join(f"'tcp://hub-{number}:5555'" for number in range(HUBS))
    edges = [members * site // GATEWAYS for site in range(GATEWAYS + 1)]
    sites = [f"wan-200ms: {a}-{b - 1}" for a, b in itertools.pairwise(edges)]
    return {
        f"{HUBS} hubs": [f"ranges={HUBS}", f"hubs=[{hubs}]"],
        f"{GATEWAYS} gateways": ["gateways=true", "sites=" + ", ".join(sites)],
    }


Variant = tuple[str, str, Sequence[str], float]
"""(name, strategy, what the job says besides, how many times the time of fedavg it may take)."""


def compare(args: argparse.Namespace, variants: Sequence[Variant]) -> int:
    """Each variant between two runs of fedavg over a star; prints a line each. 1 if one is slower
    than its bar."""
    members, slow = args.members[0], 0
    print(f"{members:,} members x {args.rounds} rounds")
    print("                           CPU seconds  fedavg  ratio  bar")
    before = measure(args, members)["cpu_seconds"]
    for name, strategy, words, bar in variants:
        ratios = []
        for _ in range(args.turns):
            own = measure(args, members, strategy, words)["cpu_seconds"]
            after = measure(args, members)["cpu_seconds"]
            theirs, before = (before + after) / 2, after
            ratios.append(own / theirs)
        ratio = statistics.median(ratios)
        slow += ratio > bar
        over = "  slower" if ratio > bar else ""
        print(f"{name:26} {own:11.1f} {theirs:7.1f} {ratio:6.2f} {bar:4}{over}", flush=True)
    return int(slow > 0)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, of the command line or of these words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=lambda s: [int(x) for x in s.split(",")], default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--most", type=int, default=100_000, help="members times rounds, at most")
    parser.add_argument("--local-steps", type=int, default=5, help="local steps in a round")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--network", default="wan-200ms")
    parser.add_argument("--message-s", type=float, default=0.0002)
    parser.add_argument("--strategies", default="", help="all, or some, as `edgetrain compare`")
    parser.add_argument("--topologies", action="store_true", help="hubs and gateways")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def main() -> int:
    """Measure and print."""
    args = parsed()
    if args.strategies or args.topologies:
        args.members = args.members[:1] if args.members != DEFAULT else [1000]
        args.rounds = min(args.rounds, 20)
        ARGUMENTS["M"] = float(args.members[0])
        names = spelled(args.strategies) if args.strategies else []
        rows: list[Variant] = [(name, name, (), bar_of(strategies.find(name))) for name in names]
        if args.topologies:
            known = topologies(args.members[0])
            rows += [(name, "fedavg", words, 1.5) for name, words in known.items()]
        return compare(args, rows)
    found = []
    if not args.json:
        print("members  rounds  seconds  virtual  us a member's round   events  peak GB  accuracy")
    for members in args.members:
        row = measure(args, members)
        found.append(row)
        if not args.json:
            print(
                f"{row['members']:7,} {row['rounds']:7} {row['seconds']:8.1f} "
                f"{row['virtual_seconds']:8.1f} {row['us_per_member_round']:20.0f} "
                f"{row['events']:8,} {row['peak_gb']:8.1f} {100 * row['final']:8.1f} %",
                flush=True,
            )
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
