"""Seconds of one averaging, by topology: emulated, simulated, and as `edgetrain topology` says.

    python benchmarks/topologies.py                      each topology at 20, 200 and 1000 ms
    python benchmarks/topologies.py --topologies star --rtts 200
    python benchmarks/topologies.py --simulated          without the emulated runs
    python benchmarks/topologies.py --drawn 20           what "auto" takes, simulated
    python benchmarks/topologies.py --hubs               one hub, two and four, their port the limit

Eight members average a vector of 40 kB or 1.3 MB, 24 times, with a step of 50 ms in between; the
second half counts, when windows are open. Any two
machines are the round trip apart: each, the hub too, is behind a link with a quarter of it each
way, of 50 Mb/s, a hub's of 1 Gb/s, and TCP keeps its windows. Exit status 1 if the emulated seconds
differ from the table's by more than a tenth, or the simulated ones by more than a twentieth.

With --drawn jobs are drawn (members, model, links, delay; one hub, since with several there is no
choice), and each is simulated with every topology that `auto` may take. Exit status 1 if it took
one that is more than a tenth slower a step than the fastest, in more than one of twenty.

With --hubs eight members average 44 MB over ports of hubs of 100 Mb/s, emulated. Exit status 1 if
two hubs are not 1.8 times and four not 3.4 times as fast as one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.files.writing import write_text
from edgetrain.jobs import rules, topology
from edgetrain.jobs.capacity.question import Options, question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation

MEMBERS, ROUNDS, PACE_S = 8, 24, 0.05
MESSAGE_S = 0.0002
"""Of a hub, for each message: about what it takes on this machine."""
SIZES = {"40 kB": 10_000, "1.3 MB": 325_000}
RTTS = (20, 200, 1000)
EMULATED_BAR, SIMULATED_BAR = 0.10, 0.05
QUEUE_KB = 80
"""Of a link's queue, for each Mbit/s: what no averaging here fills, as the table assumes."""
LARGE, LARGE_ROUNDS = 11_000_000, 3
HUB_BARS = {2: 1.8, 4: 3.4}
CHOICE_BAR, CHOICE_MISSES = 0.10, 0.05
"""How much slower than the fastest the choice of "auto" may be, and in what share of jobs."""
LINK = """
[both]
delay_ms = {delay_ms}
rate_mbit = {rate_mbit}
queue_kb = {queue_kb}
slow_start_after_idle = false
[source]
delay_ms = "chosen: a quarter of a round trip between two machines"
rate_mbit = "chosen"
queue_kb = "chosen: nothing overflows"
slow_start_after_idle = "chosen: windows stay open, so that one averaging is like another"
"""


def link(folder: Path, name: str, delay_ms: float, rate_mbit: float) -> str:
    """Write a network profile; its path, which jobs take in place of a name."""
    path = folder / f"{name}.toml"
    figures = {"delay_ms": delay_ms, "rate_mbit": rate_mbit, "queue_kb": QUEUE_KB * rate_mbit}
    write_text(path, f'title = "{name}"\n' + LINK.format(**figures))
    return str(path)


def words_of(name: str) -> list[str]:
    """What a job says to have a topology, as the table calls it."""
    count = name.removesuffix(" hubs")
    if not count.isdecimal():
        return [f"topology={name}"]
    addresses = ", ".join(f"'tcp://hub-{number}:5555'" for number in range(int(count)))
    return [f"hubs=[{addresses}]"]


def job(elements: int, name: str, *words: str) -> Resolved:
    """A planned job that averages at every step."""
    common = [
        f"members={MEMBERS}", "strategy=fedavg", "local_steps=1", "final_sync=0",
        f"pace_s={PACE_S}",
        f"message_s={MESSAGE_S}", "ranges=16", "task=edgetrain.tasks:sized", "evaluate_every=1000",
        f"data.elements={elements}",
    ]  # fmt: skip
    return plan(load(None, [*common, *words_of(name), *words]))


def seconds_of(folder: Path, rounds: int) -> float:
    """Of one averaging in the second half of a run: median over members of the mean."""
    at: dict[str, dict[int, float]] = {}
    for record in read_metrics(folder, "step"):
        at.setdefault(record["member"], {})[record["step"]] = record["t"]
    first, last = rounds // 2, rounds - 1
    return statistics.median((t[last] - t[first]) / (last - first) - PACE_S for t in at.values())


def run(planned: Resolved, rounds: int = ROUNDS) -> tuple[float, bool]:
    """Seconds of one averaging, emulated, and whether the links kept their time."""
    with tempfile.TemporaryDirectory() as name:
        folder = create(Path(name), "topologies")
        summary = emulated.run(planned, folder)
        return seconds_of(folder, rounds), bool(summary["emulation"]["timing_ok"])


def simulate(planned: Resolved, rounds: int = ROUNDS) -> float:
    """Seconds of one averaging, simulated."""
    with tempfile.TemporaryDirectory() as name:
        folder = create(Path(name), "topologies")
        simulation.run(planned, folder, batched=False)
        return seconds_of(folder, rounds)


def names_in(planned: Resolved) -> list[str]:
    """The topologies that there are: a job may have them."""
    names = ["star", "2 hubs", "4 hubs", "direct", "ring", "butterfly", "tree"]
    kinds = {name: name.rpartition(" ")[2] for name in names}
    return [name for name in names if not rules.why_not_topology(kinds[name], planned)]


def told(planned: Resolved, name: str) -> float:
    """What the table says of a topology whose windows are open."""
    options = Options(step_s=PACE_S, hub_rate_mbit=0.0, merge_bytes_per_s=0.0)
    rows = topology.table(question_of(planned, options, None), planned)
    return next(row.open_s for row in rows if row.name == name)


def compare(rtts: Sequence[int], wanted: Sequence[str], emulates: bool) -> int:
    """The table of all cells; 1 if one is over its bar."""
    print("vector   round trip  topology     table  emulated   diff  simulated   diff")
    over = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for size, elements in SIZES.items():
            for rtt in rtts:
                links = [
                    f"network={link(folder, f'member-{rtt}', rtt / 4, 50)}",
                    f"hub_network={link(folder, f'hub-{rtt}', rtt / 4, 1000)}",
                    f"steps={ROUNDS}",
                ]
                for name in wanted or names_in(job(elements, "star", *links)):
                    planned = job(elements, name, *links)
                    real, trusted = run(planned) if emulates else (None, True)
                    expected, virtual = told(planned, name), simulate(planned)
                    columns, bad = zip(
                        *[
                            _column(seconds, expected, bar)
                            for seconds, bar in ((real, EMULATED_BAR), (virtual, SIMULATED_BAR))
                        ],
                        strict=True,
                    )
                    over += any(bad)
                    print(
                        f"{size:8} {rtt:7} ms  {name:10} {expected:7.3f} {' '.join(columns)}"
                        f"{'' if trusted else '  (the emulation was late)'}{'  over' * any(bad)}",
                        flush=True,
                    )
    return int(over > 0)


def _column(seconds: float | None, expected: float, bar: float) -> tuple[str, bool]:
    """Seconds and their difference from the table's, and whether that is over its bar."""
    if seconds is None:
        return f"{'-':>9} {'':8}", False
    share = seconds / expected - 1
    return f"{seconds:9.3f} {100 * share:+6.1f} %", abs(share) > bar


def drawn(count: int) -> int:
    """Drawn jobs, and what `auto` takes; 1 if it is too slow in too many."""
    print("job                                                      auto    its step  fastest")
    misses, judged = 0, 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for seed in range(count):
            rng = random.Random(seed)
            rtt, rate = rng.choice([2, 20, 100, 300, 1000]), rng.choice([10, 50, 300])
            port = rng.choice([20, 100, 1000])
            elements = rng.choice([10_000, 100_000, 325_000])
            words = [
                f"network={link(folder, f'm{seed}', rtt / 4, rate)}",
                f"hub_network={link(folder, f'h{seed}', rtt / 4, port)}",
                f"members={rng.choice([3, 4, 8])}", f"steps={ROUNDS}", "topology_trust=true",
            ]  # fmt: skip
            seconds: dict[str, float] = {}
            for name in ("star", "direct"):
                try:
                    found = simulate(job(elements, name, *words))
                except ConfigError:
                    continue
                seconds[name] = found + PACE_S
            star = job(elements, "star", *words)
            options = Options(step_s=PACE_S, hub_rate_mbit=0.0, merge_bytes_per_s=0.0)
            rows = topology.table(question_of(star, options, None), star, auto=True)
            taken = topology.choose(rows, trusts=True).topology
            fastest = min(seconds.values())
            is_judged = len(seconds) > 1
            missed = is_judged and seconds[taken] > (1 + CHOICE_BAR) * fastest
            misses, judged = misses + missed, judged + is_judged
            what = f"{elements:7,} elements, {rtt} ms, {rate} Mb/s, the hub {port} Mb/s"
            print(
                f"{what:56} {taken:7} {seconds.get(taken, float('nan')):6.3f} s {fastest:6.3f} s"
                f"{'  missed' * missed}{'' if is_judged else '  no choice'}",
                flush=True,
            )
    print(f"{judged - misses} of {judged} within {CHOICE_BAR:.0%}, of {count} that were drawn")
    return int(not judged or misses > CHOICE_MISSES * judged)


def hubs() -> int:
    """One hub beside several; 1 if these are too slow."""
    print("hubs  seconds  times sooner  bar")
    words = ["network=ethernet", "hub_network=fast-ethernet", f"steps={LARGE_ROUNDS}"]
    one, slow = 0.0, 0
    for count in (1, *HUB_BARS):
        planned = job(LARGE, "star" if count == 1 else f"{count} hubs", *words)
        seconds, trusted = run(planned, LARGE_ROUNDS)
        one = one or seconds
        bar = HUB_BARS.get(count, 0.0)
        slow += one / seconds < bar
        late = "" if trusted else "  (the emulation was late)"
        print(f"{count:4} {seconds:8.2f} {one / seconds:13.2f} {bar:4}{late}", flush=True)
    return int(slow > 0)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rtts", type=lambda s: [int(x) for x in s.split(",")], default=RTTS)
    parser.add_argument("--topologies", type=lambda s: s.split(","), default=[])
    parser.add_argument("--hubs", action="store_true")
    parser.add_argument("--simulated", action="store_true", help="no emulated runs")
    parser.add_argument("--drawn", type=int, default=0, metavar="JOBS")
    args = parser.parse_args()
    if args.drawn:
        return drawn(args.drawn)
    if args.hubs or not args.simulated:
        emulated.warm_up()
    return hubs() if args.hubs else compare(args.rtts, args.topologies, not args.simulated)


if __name__ == "__main__":
    sys.exit(main())
