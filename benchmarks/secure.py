"""What masks cost: the same job with and without secure aggregation, in turns on this machine.

    python benchmarks/secure.py                                   4 members, digits, 3 turns
    python benchmarks/secure.py --members 10 --strategy fedavg --network wan-50ms
    python benchmarks/secure.py --part work --members 10 --elements 10000000

The first table is of whole runs: real processes, a hub, its links; medians over the turns, and
their ratio. The second is the work that masks add to one round, by the sides alone, and what it is
with as many members dropped out as can be. Seconds are this machine's, and other work's on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from edgetrain.exchange.masks.aggregator import Aggregator, Outgoing
from edgetrain.exchange.masks.fixed_point import FixedPoint
from edgetrain.exchange.masks.masker import Masker, parts
from edgetrain.exchange.masks.terms import MaskTerms, default_threshold
from edgetrain.exchange.messages import Masking
from edgetrain.jobs.job import Job
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training import emulated

ROUNDS = 16
"""In a block, as a hub asks for them."""


def job_for(args: argparse.Namespace, secure: bool) -> Job:
    """The digits job; nothing but the masks differs."""
    return load(
        None,
        [
            f"members={args.members}",
            f"network={args.network}",
            f"steps={args.steps}",
            f"strategy={args.strategy}",
            f"pace_s={args.pace}",
            f"secure={'true' if secure else 'false'}",
            "evaluate_every=1000000",
            *args.job,
        ],
    )


def measured(args: argparse.Namespace, folder: Path, secure: bool) -> dict[str, float]:
    """One run: seconds, processor seconds and bytes, of a round."""
    inside = create(folder, "masked" if secure else "plain")
    summary = emulated.run(plan(job_for(args, secure)), inside)
    rounds = list(read_metrics(inside, "round"))
    count = len(rounds)
    members_cpu: dict[str, float] = {}
    for step in read_metrics(inside, "step"):
        members_cpu[step["member"]] = step["cpu_s"]
    return {
        "round, s": summary["seconds"] / count,
        "waiting, s a step": summary["wait_s"],
        "member's processor, s a round": statistics.mean(members_cpu.values()) / count,
        "hub's processor, s a round": (rounds[-1]["cpu_s"] - rounds[0]["cpu_s"]) / (count - 1),
        "sent, bytes a round and member": summary["sent_bytes"] / count / args.members,
        "received, bytes a round and member": summary["received_bytes"] / count / args.members,
    }


def whole_runs(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of both kinds over the turns."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="edgetrain-secure-") as folder:
        for turn in range(args.turns):
            for secure in (False, True) if turn % 2 == 0 else (True, False):
                found[secure].append(measured(args, Path(folder), secure))
    return {
        what: {
            "plain": (plain := statistics.median(run[what] for run in found[False])),
            "masked": (masked := statistics.median(run[what] for run in found[True])),
            "ratio": masked / plain if plain else float("nan"),
        }
        for what in found[False][0]
    }


class _Bench:
    """Both sides, no network between them; what either takes is counted."""

    def __init__(self, members: int, elements: int) -> None:
        terms = MaskTerms(members, default_threshold(members), 8.0)
        self.elements = elements
        self.hub = Aggregator(terms)
        self.hub.start_masks(elements, 0)
        self.maskers = {f"m{i}": Masker(terms, elements) for i in range(members)}
        self.plain = FixedPoint(8.0, members)
        self.member_s = self.bytes = 0.0

    def deliver(self, outgoing: Outgoing, gone: frozenset[str] = frozenset()) -> None:
        for name, message in outgoing:
            if name in gone:
                continue
            self.bytes += _size(message)
            began = time.process_time()
            answer = self.maskers[name].answer_hub(message)
            self.member_s += time.process_time() - began
            if answer is not None:
                self.bytes += _size(answer)
                self.hub.accept_message(name, answer)

    def set_up(self) -> None:
        self.deliver(self.hub.begin_block(dict.fromkeys(self.maskers, 1.0), 0, ROUNDS, 0.0))
        for _ in range(2):
            self.deliver(self.hub.advance_blocks(list(self.maskers), 60.0, 0.0))


def _size(message: Masking) -> int:
    return memoryview(getattr(message, "payload", b"")).nbytes


def work(members: int, elements: int, dropped: int) -> dict[str, float]:
    """Processor seconds and bytes that masks add to one round."""
    bench = _Bench(members, elements)
    began = time.process_time()
    bench.set_up()
    both = time.process_time() - began
    vector = np.zeros(elements, np.float32)
    setup = bench.member_s / members / ROUNDS
    setup_hub, setup_bytes = (both - bench.member_s) / ROUNDS, bench.bytes / members / ROUNDS
    bench.member_s = bench.bytes = 0.0
    gone = frozenset(list(bench.maskers)[:dropped])
    masked = np.empty(elements, np.uint32)
    masking = 0.0
    for name, masker in bench.maskers.items():
        if name not in gone:
            began = time.process_time()
            masker.mask(0, vector, 1.0, masked)
            masking += time.process_time() - began
            bench.hub.add_contribution(name, 0, parts(masked, 1 << 20))
    began = time.process_time()
    bench.deliver(bench.hub.close_round(0, 0.0), gone)
    end = bench.hub.unmask_round(0, 60.0, 0.0)
    unmasking = time.process_time() - began - bench.member_s
    assert end is not None
    assert end.vector is not None
    return {
        "member: keys and shares, s": setup,
        "member: masking, s": masking / (members - dropped),
        "member: revealing, s": bench.member_s / (members - dropped),
        "hub: keys and shares, s": setup_hub,
        "hub: unmasking, s": unmasking,
        "member: keys and shares, bytes": setup_bytes,
        "member: revealing, bytes": bench.bytes / (members - dropped),
        "contribution, bytes": 4.0 * elements,
    }


def main() -> None:
    """Run what was asked for, print tables, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("runs", "work", "all"), default="all")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--strategy", default="dga")
    parser.add_argument("--network", default="none")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds a step takes")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--elements", type=int, default=1_000_000, help="of the second table")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("job", nargs="*", help="key=value, as for `edgetrain run`")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.part != "work":
        found["runs"] = whole_runs(args)
    if args.part != "runs":
        dropped = args.members - default_threshold(args.members)
        found["work"] = {
            "nobody": work(args.members, args.elements, 0),
            f"{dropped} dropped": work(args.members, args.elements, dropped),
        }
    if args.json:
        print(json.dumps(found))
        return
    if "runs" in found:
        print(
            f"{args.members} members, {args.strategy}, network {args.network}, {args.turns} turns"
        )
        print(f"{'':36}{'plain':>12}{'masked':>12}{'ratio':>8}")
        for what, row in found["runs"].items():
            print(f"{what:36}{row['plain']:12.4g}{row['masked']:12.4g}{row['ratio']:8.2f}")
    if "work" in found:
        print(f"\nadded to one round, {args.members} members, {args.elements:,} elements")
        print(f"{'':36}" + "".join(f"{name:>12}" for name in found["work"]))
        for what in found["work"]["nobody"]:
            print(f"{what:36}" + "".join(f"{row[what]:12.4g}" for row in found["work"].values()))


if __name__ == "__main__":
    main()
