"""Which strategy for which network, data and optimizer? All of them on the same links and data.

    python benchmarks/frontier.py --short                 # 20 minutes of an idle core
    python benchmarks/frontier.py --keep frontier.jsonl   # everything; goes on where it was stopped
    python benchmarks/frontier.py --only 'dga,fedavg' --where 'digits,momentum,500@20'
    python benchmarks/frontier.py --in-time-of dga --only 'dga,fedavg,sync-sgd' --seeds 6 --first 11

Simulated jobs, in virtual time. Digits: 8 members, batches of 16, 280 steps; char-lm: a
Transformer of one layer of width 32, 4 members, batches of 8, 200 steps. A link R@S is a round trip
of R milliseconds, without a limit of its rate, and steps of S milliseconds. A strategy has its own
length of rounds and, if it has one, an automatic delay; "fedavg, long" has rounds that take as
long as the round trip, and at least 10 steps; "dga(decay), synced" takes the last tenth of the
steps in short rounds; "dga(variates), short" has rounds of 7 steps, a delay of as many of them as
the round trip takes, 7 rounds without one at the end, and the codec bf16. Each is tried at all
RATES with the first seed, and run at the best of them with the others.

A table for each task, partition, optimizer and link, and a picture for each task and optimizer.
Columns: the learning rate; the final figure at equal steps, mean of the seeds, lowest and highest;
virtual seconds of all steps, start and last reply included; seconds until an evaluation first
reached the target, mean of the seeds ("2 of 3" where only two did; then the mean of those);
megabytes that a member sent and received. `*`: on the frontier, no other strategy ends as high and
as soon.

With `--in-time-of S` the final figure is the last one within the seconds that S took with all its
steps, and the rate is the best for that, of one more: who has more after equal time, not after
equal steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import machine, progress

from edgetrain import strategies
from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.runs.reports.plot import style
from edgetrain.runs.summary import reached
from edgetrain.strategies.spelling import split_list


@dataclass(frozen=True)
class Workload:
    """A task, and how it is trained."""

    words: tuple[str, ...]
    data: str
    """More of the table `data`."""
    metric: str
    better: str
    target: float
    unit: float
    """The printed figure is this many times the metric."""
    digits: int
    span: float
    """How far below the best the picture shows figures where they are."""


TASKS = {
    "digits": Workload(
        ("task=edgetrain.tasks:digits", "members=8", "batch=16", "steps=280"),
        "", "accuracy", "higher", 0.95, 100.0, 1, 20.0,
    ),
    "char_lm": Workload(
        ("task=edgetrain.tasks:char_lm", "members=4", "batch=8", "steps=200"),
        ", context=32, limit_bytes=200_000, width=32, heads=4, layers=1",
        "loss", "lower", 2.7, 1.0, 3, 0.5,
    ),
}  # fmt: skip
PARTITIONS = ("iid", "dirichlet(0.3)")
HELD = "shared(all)"
"""Of all data: what strategies need whose hub hands out work. Of digits with momentum only."""
OPTIMIZERS = {
    "sgd": "name='sgd'", "momentum": "name='sgd', momentum=0.9", "adamw": "name='adamw'",
}  # fmt: skip
RATES = {
    ("digits", "sgd"): (0.1, 0.2, 0.5),
    ("digits", "momentum"): (0.02, 0.05, 0.1),
    ("digits", "adamw"): (0.005, 0.01, 0.02),
    ("char_lm", "sgd"): (0.5, 1.0, 2.0),
    ("char_lm", "momentum"): (0.05, 0.1, 0.2),
    ("char_lm", "adamw"): (0.005, 0.01, 0.02),
}
LINKS = {(0, 50): 10, (200, 50): 10, (500, 50): 12, (500, 20): 29, (1000, 50): 23}
"""Round trip and step in milliseconds -> a long round: steps that hide the round trip, at least
10."""
ARGUMENTS = {
    "fedprox": "0.01", "fedbuff": "4, 0.5", "ssp": "2", "async-sgd": "5",
    "streaming-diloco": "4, 0.5",
}  # fmt: skip
"""Of strategies whose arguments have no default."""
ABLATIONS = ("dga-uncorrected",)
LONG = "fedavg, long"
SYNCED = "dga(decay), synced"
SHORT, SHORT_K = "dga(variates), short", 7
OWN_NAMES = (LONG, SYNCED, SHORT)


@dataclass(frozen=True)
class Case:
    """What strategies are compared on."""

    task: str
    partition: str
    optimizer: str
    rtt_ms: int
    step_ms: int

    @property
    def link(self) -> str:
        """As the command line spells it."""
        return f"{self.rtt_ms}@{self.step_ms}"

    def words(self, strategy: str, rate: float, seed: int) -> list[str]:
        """The job of one run."""
        workload, local_steps = TASKS[self.task], 0
        more: list[str] = []
        if strategy == LONG:
            strategy, local_steps = "fedavg", LINKS[self.rtt_ms, self.step_ms]
        elif strategy == SYNCED:
            strategy, more = "dga(decay)", ["final_sync=0.1"]
        elif strategy == SHORT:
            strategy, local_steps = "dga(variates)", SHORT_K
            delay = SHORT_K * math.ceil(self.rtt_ms / self.step_ms / SHORT_K)
            more = [f"delay={delay}", "final_sync=0.175", "codec=bf16"]
        return [
            *workload.words, f"data={{ partition='{self.partition}'{workload.data} }}",
            f"optimizer={{ {OPTIMIZERS[self.optimizer]}, lr={rate:g} }}",
            f"network=rtt-{self.rtt_ms}ms", f"pace_s={self.step_ms / 1000:g}",
            "device=raspberry-pi-4b", f"strategy={strategy}", f"local_steps={local_steps}",
            f"seed={seed}", *more,
        ]  # fmt: skip


Figures = dict[str, Any]
"""Of one run: `final`, `seconds`, `mb` and `curve`, a list of [seconds, figure]; or `error`."""
Run = Callable[[Sequence[str]], Figures]
"""Runs the job of these words."""


def grid(short: bool) -> list[Case]:
    """All cases, or those that tell most."""
    if short:
        links = ((200, 50), (500, 20))
        return [Case("digits", p, "momentum", *link) for p in PARTITIONS for link in links]
    found = itertools.product(TASKS, PARTITIONS, OPTIMIZERS, LINKS)
    held = [Case("digits", HELD, "momentum", *link) for link in LINKS]
    return [Case(task, part, optimizer, *link) for task, part, optimizer, link in found] + held


def contenders() -> list[str]:
    """Every row of the table with default arguments, those with corrections with each."""
    found = []
    for row in strategies.TABLE.values():
        if row.name in ABLATIONS:
            continue
        inside = ARGUMENTS.get(row.name)
        spelled = f"{row.name}({inside})" if inside else row.name
        others = (strategies.find(spelled).corrected(word) for word in row.corrections)
        found += [spelled, *(each.spelled for each in others)]
        found += {"fedavg": [LONG], "dga": [SYNCED, SHORT]}.get(row.name, [])
    return list(dict.fromkeys(found))


def chosen(only: str) -> list[str]:
    """The strategies that `--only` names. ConfigError for a name that is none."""
    for name in OWN_NAMES:
        only = only.replace(name, name.replace(", ", "~"))
    found = [name.replace("~", ", ") for name in split_list(only)]
    return [each if each in OWN_NAMES else strategies.find(each).spelled for each in found]


def simulate(words: Sequence[str]) -> Figures:
    """Run a job in virtual time, the gradients of all members at once, which halves its seconds,
    unless the hub deals out slices."""
    from edgetrain.training.simulated import simulation

    try:
        with tempfile.TemporaryDirectory() as name:
            folder = create(Path(name), "run")
            planned = plan(load(None, words))
            batched = not planned.strategy.deals
            summary = simulation.run(planned, folder, batched=batched)
            metric = summary["metric"]
            curve = [[r["t"], r[metric]] for r in read_metrics(folder, "eval") if metric in r]
    except EdgetrainError as error:
        return {"error": str(error)}
    if summary["status"] != "finished" or metric not in (summary["final"] or {}):
        return {"error": f"{summary['status']}: {'; '.join(summary.get('errors') or [])}"}
    sent = summary["sent_bytes"] + summary["received_bytes"]
    return {
        "final": summary["final"][metric], "seconds": summary["seconds"],
        "mb": sent / summary["members"] / 1e6, "curve": curve,
    }  # fmt: skip


class Kept:
    """A `Run` that remembers what was run, in a file of a line a run."""

    def __init__(self, run: Run, path: Path | None) -> None:
        self._run, self._path = run, path
        self._known: dict[str, Figures] = {}
        if path is not None and path.exists():
            for line in path.read_text("utf-8").splitlines():
                kept = json.loads(line)
                self._known[" ".join(kept["words"])] = kept["figures"]

    def __call__(self, words: Sequence[str]) -> Figures:
        """What this job came to, now or earlier."""
        key = " ".join(words)
        if key not in self._known:
            self._known[key] = self._run(words)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    line = {"words": list(words), "figures": self._known[key]}
                    file.write(json.dumps(line) + "\n")
        return self._known[key]


@dataclass(frozen=True)
class Row:
    """A strategy in one case, at its best rate."""

    strategy: str
    rate: float = 0.0
    finals: tuple[float, ...] = ()
    """Final figure of each seed."""
    seconds: float = 0.0
    to_target: tuple[float | None, ...] = ()
    """Seconds of each seed, None: not reached."""
    mb: float = 0.0
    error: str = ""
    """Why there are no figures."""

    @property
    def final(self) -> float:
        """Mean of the seeds."""
        return statistics.fmean(self.finals)


def within(run: Run, seconds: float) -> Run:
    """Runs the same jobs, and looks at them for so many virtual seconds."""

    def cut(words: Sequence[str]) -> Figures:
        found = run(words)
        if "error" in found or found["seconds"] <= seconds:
            return found
        curve = [point for point in found["curve"] if point[0] <= seconds]
        return found | {"final": curve[-1][1], "seconds": seconds, "curve": curve}

    return cut


def row_of(case: Case, strategy: str, seeds: range, run: Run, more: tuple[float, ...] = ()) -> Row:
    """Try all rates, and `more`, with the first seed, and run the best with the others."""
    workload, rates = TASKS[case.task], RATES[case.task, case.optimizer] + more
    sign = 1 if workload.better == "higher" else -1
    first = {rate: run(case.words(strategy, rate, seeds[0])) for rate in rates}
    ended = {rate: f for rate, f in first.items() if "error" not in f}
    if not ended:
        return Row(strategy, error=first[rates[0]]["error"])
    rate = max(ended, key=lambda each: sign * ended[each]["final"])
    found = [ended[rate], *(run(case.words(strategy, rate, seed)) for seed in seeds[1:])]
    if bad := next((f["error"] for f in found if "error" in f), ""):
        return Row(strategy, rate, error=bad)
    return Row(
        strategy, rate, tuple(f["final"] for f in found),
        statistics.fmean(f["seconds"] for f in found),
        tuple(_first(f["curve"], workload) for f in found),
        statistics.fmean(f["mb"] for f in found),
    )  # fmt: skip


def _first(curve: Sequence[Sequence[float]], workload: Workload) -> float | None:
    met = (t for t, value in curve if reached(value, workload.target, workload.better))
    return next(met, None)


def frontier(rows: Sequence[Row], better: str) -> set[str]:
    """The strategies than which none ends both as well and as soon (and one of them better)."""
    sign = 1 if better == "higher" else -1
    at = {row.strategy: (sign * row.final, -row.seconds) for row in rows if not row.error}
    return {
        name
        for name, (final, soon) in at.items()
        if not any(f >= final and s >= soon and (f, s) != (final, soon) for f, s in at.values())
    }


def text_of(case: Case, rows: Sequence[Row]) -> str:
    """The table of a case."""
    workload = TASKS[case.task]
    best = frontier(rows, workload.better)
    wide = max(len(row.strategy) for row in rows)
    goal = f"{workload.unit * workload.target:g}"
    lines = [
        f"{case.task}, {case.partition}, {case.optimizer}, {case.link}",
        f"  {'':{wide}}   rate  {workload.metric:^22}    seconds  to {goal:<12} MB a member",
    ]
    for row in rows:
        if row.error:
            lines.append(f"  {row.strategy:{wide}}  {row.error}")
            continue
        final, least, most = (
            f"{workload.unit * value:.{workload.digits}f}"
            for value in (row.final, min(row.finals), max(row.finals))
        )
        met = [t for t in row.to_target if t is not None]
        when = f"{statistics.fmean(met):.1f}" if met else "never"
        some = f" ({len(met)} of {len(row.finals)})" if 0 < len(met) < len(row.finals) else ""
        mark = "*" if row.strategy in best else " "
        lines.append(
            f"{mark} {row.strategy:{wide}}  {row.rate:5g}  {final} ({least} to {most})".ljust(
                wide + 35
            )
            + f"{row.seconds:9.1f}  {when + some:15}{row.mb:12.2f}"
        )
    return "\n".join(lines)


def draw(table: Mapping[Case, Sequence[Row]], path: Path) -> Path:
    """The picture of a task and an optimizer: a panel for each partition and link, the final figure
    against the time of all steps; the frontier is a line."""
    cases = list(table)
    workload = TASKS[cases[0].task]
    parts = list(dict.fromkeys(case.partition for case in cases))
    links = list(dict.fromkeys(case.link for case in cases))
    names = list(dict.fromkeys(row.strategy for rows in table.values() for row in rows))
    with style.styled():
        figure = style.new_figure((max(7.0, 5.6 * len(links)), 4.4 * len(parts) + 1.4))
        spec = figure.add_gridspec(len(parts), len(links))
        handles: dict[str, Any] = {}
        for case, rows in table.items():
            panel = figure.add_subplot(spec[parts.index(case.partition), links.index(case.link)])
            _draw_panel(panel, case, rows, names, handles)
        steps = next(word for word in workload.words if word.startswith("steps="))[6:]
        about = (
            f"{cases[0].task}, {cases[0].optimizer}: {workload.metric} after {steps} steps, and "
            "their virtual seconds; on the line: none beats them in both",
        )
        labels = list(handles)
        heading = "which strategy for which link and data"
        room = style.write_heading(figure, heading, about, style.legend_points(labels))
        style.write_legend(figure, list(handles.values()), labels, room)
    return style.save(lambda: figure, path)


MARKERS = "osD^vP*XhpH<>d8"
MOST_TICKS = 6
TICKS_S = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)


def _draw_panel(
    panel: Any, case: Case, rows: Sequence[Row], names: Sequence[str], handles: dict[str, Any]
) -> None:
    """One case. Figures too far below the best stand at the lower edge, as numbers."""
    workload, there = TASKS[case.task], [row for row in rows if not row.error]
    sign = 1 if workload.better == "higher" else -1
    finals = {row.strategy: workload.unit * row.final for row in there}
    edge = max(sign * final for final in finals.values()) - workload.span
    for row in there:
        place, final = names.index(row.strategy), finals[row.strategy]
        colour = style.COLOURS[place % len(style.COLOURS)]
        inside = sign * final >= edge
        shown = final if inside else sign * edge
        (mark,) = panel.plot(
            [row.seconds], [shown], MARKERS[place % len(MARKERS)], ls="", color=colour,
            mfc=colour if inside else "white", ms=9, clip_on=False, zorder=4,
        )  # fmt: skip
        handles.setdefault(row.strategy, mark)
        if inside:
            ends = [sign * max(sign * workload.unit * f, edge) for f in row.finals]
            panel.plot([row.seconds] * 2, [min(ends), max(ends)], color=colour, lw=1.2, alpha=0.5)
        else:
            panel.annotate(
                f"{final:.{workload.digits}f}", (row.seconds, shown), xytext=(7, -4),
                textcoords="offset points", fontsize=10, color=colour,
            )  # fmt: skip
    best = frontier(rows, workload.better)
    line = sorted((row.seconds, finals[row.strategy]) for row in there if row.strategy in best)
    panel.plot(*zip(*line, strict=True), color=style.TARGET, lw=1.4, zorder=2)
    panel.set_xscale("log")
    panel.margins(0.1)
    first, last = panel.get_xlim()
    ticks = [t for t in TICKS_S if first < t < last]
    if len(ticks) > MOST_TICKS:  # then 1, 2, 5, 10, … are enough
        ticks = [t for t in ticks if f"{t:e}"[0] in "125" and f"{t:e}"[2] == "0"]
    panel.set_xticks(ticks, [f"{t} s" for t in ticks])
    panel.minorticks_off()
    panel.set_ylabel(f"{workload.metric}, %" if workload.unit == 100 else workload.metric)
    panel.set_title(f"{case.partition}, {case.rtt_ms} ms, steps of {case.step_ms} ms")


def pictures(found: Mapping[Case, Sequence[Row]], path: Path) -> list[Path]:
    """Draw a picture for each task and optimizer; of several, their names say which."""
    kinds = list(dict.fromkeys((case.task, case.optimizer) for case in found))
    drawn = []
    for task, optimizer in kinds:
        part = {c: rows for c, rows in found.items() if (c.task, c.optimizer) == (task, optimizer)}
        name = path if len(kinds) == 1 else path.with_stem(f"{path.stem}-{task}-{optimizer}")
        if any(not row.error for rows in part.values() for row in rows):
            drawn.append(draw(part, name))
    return drawn


def walk(
    cases: Sequence[Case], names: Sequence[str], seeds: range, run: Run, timed_by: str = ""
) -> Iterator[tuple[Case, list[Row]]]:
    """The rows of each case, one case after the other; with `timed_by`, in the time of that
    strategy. EdgetrainError where that one fails."""
    for case in cases:
        rows, each_run, more = [], run, tuple[float, ...]()
        if timed_by:
            timed = row_of(case, timed_by, seeds, run)
            if timed.error:
                raise EdgetrainError(f"{timed_by}: {timed.error}")
            each_run = within(run, timed.seconds)
            more = (2.5 * max(RATES[case.task, case.optimizer]),)  # fewer steps bear a higher one
        for name in names:
            if name not in OWN_NAMES and strategies.find(name).deals and case.partition != HELD:
                continue
            progress(f"{' '.join(asdict(case)[k] for k in ('task', 'partition', 'optimizer'))} "
                     f"{case.link} {name} …")  # fmt: skip
            rows.append(row_of(case, name, seeds, each_run, more))
        progress("")
        yield case, rows


def named(case: Case, where: str) -> bool:
    """Whether a case is of everything that `--where` names."""
    words = {*map(str, asdict(case).values()), case.link}
    return all(word in words for word in split_list(where) if word)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="digits, momentum, 200@50 and 500@20")
    parser.add_argument("--only", default="", metavar="S,S", help="strategies, as jobs spell them")
    parser.add_argument("--where", default="", metavar="W,W", help="cases of all these words")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--in-time-of", default="", metavar="S", help="equal time: that of S")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what was run; goes on from it")
    parser.add_argument("--picture", type=Path, default=Path("frontier.png"), metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    chose = parser.parse_args(arguments)
    try:
        names = chosen(chose.only) if chose.only else contenders()
        timed_by = "".join(chosen(chose.in_time_of)) if chose.in_time_of else ""
    except ConfigError as error:
        parser.error(str(error))
    cases = [case for case in grid(chose.short) if named(case, chose.where)]
    if not cases or chose.seeds < 1:
        parser.error(f"--where '{chose.where}', --seeds {chose.seeds}: nothing to run")
    found: dict[Case, list[Row]] = {}
    seeds = range(chose.first, chose.first + chose.seeds)
    for case, rows in walk(cases, names, seeds, Kept(simulate, chose.keep), timed_by):
        found[case] = rows
        if not chose.json:
            print(text_of(case, rows), end="\n\n", flush=True)
    drawn = [str(path) for path in pictures(found, chose.picture)]
    if chose.json:
        answer = [asdict(case) | {"rows": list(map(asdict, rows))} for case, rows in found.items()]
        print(json.dumps({"machine": machine(), "cases": answer, "pictures": drawn}, indent=2))
    else:
        print("picture:", *drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
