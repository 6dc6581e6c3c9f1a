"""Jobs run emulated and simulated beside each other: their figures, a table, a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.folder import create_inside, read_metrics
from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import as_text, column
from edgetrain.runs.reports.comparison import seconds_per_step, untrusted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOOD = 0.05
"""A simulation is good if its time is at most this relative error off."""

BUSY = 0.02
"""A machine is busy if its own work takes longer than the job says by this part of a step."""


@dataclass(frozen=True)
class CalibratedPair:
    """One job, run both ways; each pair of values is (emulated, simulated).

    Seconds, bytes, fractions. `trusted` is the emulation's own verdict.
    """

    name: str
    metric: str
    step_s: tuple[float, float]
    wait_s: tuple[float, float]
    sent_bytes: tuple[float, float]
    received_bytes: tuple[float, float]
    final: tuple[float | None, float | None]
    target_seconds: tuple[float | None, float | None]
    real_seconds: tuple[float, float]
    """Seconds that each run took on this machine."""
    same_base: bool | None
    """Whether all members of both ended with the same parameters, bit for bit; None: not known."""
    trusted: bool | None
    drawn_s: tuple[float, ...] = ()
    """Seconds per step of each simulated run, if several had different losses or delays; `step_s`
    has their mean."""
    own_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of a step that were neither the network nor waiting: computing and overhead."""
    incomplete: str = ""
    """The runs that failed in part, and why; empty: none."""
    doubt: str = ""
    """Why the emulation is not to be trusted; empty: it is, or does not say."""

    @property
    def time_error(self) -> float:
        """Relative error of the simulated seconds per step."""
        return relative(self.step_s)

    @property
    def busy(self) -> float:
        """Excess of this machine's time for a step's own work over that of the job, in parts of
        the emulated step: what the simulator does not predict."""
        return (self.own_s[0] - self.own_s[1]) / self.step_s[0] if self.step_s[0] else 0.0

    @property
    def chance(self) -> float | None:
        """Relative error of one emulated run by chance; None: not simulated.

        Two standard deviations of the difference between one run and the mean of those simulated.
        """
        if len(self.drawn_s) < 2:
            return None
        spread = statistics.stdev(self.drawn_s) * math.sqrt(1 + 1 / len(self.drawn_s))
        return 2 * spread / self.step_s[0]

    @property
    def good(self) -> bool:
        """Within GOOD of the emulated run, or what is left is no more than chance."""
        return abs(self.time_error) <= max(GOOD, self.chance or 0.0)


def relative(both: tuple[float, float]) -> float:
    """Simulated over emulated, minus 1; 0 where both are nothing."""
    emulated, simulated = both
    if not emulated:
        return 0.0 if not simulated else float("inf")
    return simulated / emulated - 1


def pair(
    name: str,
    emulated: Mapping[str, Any],
    simulated: Mapping[str, Any],
    bases: tuple[set[str], set[str]],
    real_seconds: tuple[float, float],
    drawn: Sequence[Mapping[str, Any]] = (),
) -> CalibratedPair:
    """Two summaries of the same job beside each other; `bases` as `bases_of` found them. `drawn`
    are the summaries of further simulated runs, whose links lost other packets."""
    metric = str(emulated["metric"])
    every = tuple(_step_s(each) for each in (simulated, *drawn))

    def both(key: str) -> tuple[Any, Any]:
        return emulated[key], simulated[key]

    known = all(bases)
    emulation = emulated.get("emulation") or {}
    trusted = emulation.get("timing_ok")
    return CalibratedPair(
        name=name,
        metric=metric,
        step_s=(_step_s(emulated), statistics.fmean(every)),
        wait_s=both("wait_s"),
        sent_bytes=both("sent_bytes"),
        received_bytes=both("received_bytes"),
        final=(emulated["final"].get(metric), simulated["final"].get(metric)),
        target_seconds=both("target_seconds"),
        real_seconds=real_seconds,
        same_base=(bases[0] == bases[1] and len(bases[0]) == 1) if known else None,
        trusted=trusted,
        drawn_s=every if drawn else (),
        own_s=(_own_s(emulated), _own_s(simulated)),
        incomplete=_incomplete(emulated, simulated),
        doubt=untrusted(emulation) if trusted is False else "",
    )


def _own_s(summary: Mapping[str, Any]) -> float:
    return sum(summary.get(key) or 0.0 for key in ("compute_s", "overhead_s"))


def _incomplete(emulated: Mapping[str, Any], simulated: Mapping[str, Any]) -> str:
    for how, each in (("emulated", emulated), ("simulated", simulated)):
        status, errors = each.get("status", "finished"), each.get("errors") or []
        if status != "finished":
            return ": ".join([f"{how}, it is {status}", *errors[:1]])
    return ""


def _step_s(summary: Mapping[str, Any]) -> float:
    return seconds_per_step(summary) or 0.0


def bases_of(events: Iterable[Record]) -> set[str]:
    """The checksums of the bases that members finished with, from "finished" events."""
    reasons = (str(event.get("reason")) for event in events if event.get("event") == "finished")
    return {reason.rpartition("base ")[2] for reason in reasons if "base " in reason}


def as_json(pairs: Sequence[CalibratedPair], picture: Path | None = None) -> dict[str, Any]:
    return {
        "pairs": [
            asdict(each) | {"time_error": each.time_error, "chance": each.chance, "busy": each.busy}
            for each in pairs
        ],
        "worst_time_error": max((abs(each.time_error) for each in pairs), default=None),
        "picture": None if picture is None else str(picture),
    }


def text(pairs: Sequence[CalibratedPair], picture: Path | None = None) -> str:
    """The report as plain text: a line for each job, and a verdict."""
    columns = [
        column("job", (each.name for each in pairs)),
        column("emulated", (units.duration(each.step_s[0]) for each in pairs), below="per step"),
        column("simulated", (units.duration(each.step_s[1]) for each in pairs), below="per step"),
        column("error", (_percent(each.time_error) for each in pairs), below="time"),
        column("by", (_chance(each) for each in pairs), below="chance"),
        column("error", (_wait_error(each) for each in pairs), below="waiting"),
        column("error", (_percent(relative(each.sent_bytes)) for each in pairs), below="sent"),
        column(
            "error", (_percent(relative(each.received_bytes)) for each in pairs), below="received"
        ),
        column("emulated", (units.figure(p.metric, p.final[0]) for p in pairs), below="final"),
        column("simulated", (units.figure(p.metric, p.final[1]) for p in pairs), below="final"),
        column("same", (_YES[each.same_base] for each in pairs), below="bits"),
        column("machine", (_percent(each.busy) for each in pairs), below="busy"),
        column("trusted", (_YES[each.trusted] for each in pairs), below="emulation"),
        column("faster", (units.times(_faster(each)) for each in pairs), below="to know"),
    ]
    worst = max(pairs, key=lambda each: abs(each.time_error))
    near = sum(abs(each.time_error) <= GOOD for each in pairs)
    good = sum(each.good for each in pairs)
    lines = [
        *as_text(columns),
        "",
        f"{near} of {len(pairs)} within {GOOD:.0%} of the emulated time; worst: {worst.name}, "
        f"{_percent(worst.time_error)}",
    ]
    if any(each.chance is not None for each in pairs):
        lines.append(
            f"{good} of {len(pairs)} within that, or within what chance explains: two standard "
            "deviations of runs with other losses and delays"
        )
    if doubtful := [each for each in pairs if each.trusted is False]:
        lines.append(
            f"{len(doubtful)} of {len(pairs)} marked NO: the emulation's time is not the network's"
        )
        lines += [f"{each.name}: {each.doubt}" for each in doubtful]
    idle = [each for each in pairs if each.busy <= BUSY and each.trusted is not False]
    if len(idle) < len(pairs):
        lines.append(
            f"{sum(each.good for each in idle)} of {len(idle)} good where this machine took at "
            f"most {BUSY:.0%} of a step longer for its own work (column busy) and the emulation is "
            "to be trusted: something else slowed down the others"
        )
    lines += [units.printable(f"{p.name}: {p.incomplete}") for p in pairs if p.incomplete]
    if picture is not None:
        lines.append(f"picture: {picture}")
    return "\n".join(lines) + "\n"


_YES = {True: "yes", False: "NO", None: units.ABSENT}


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _chance(each: CalibratedPair) -> str:
    return units.ABSENT if each.chance is None else f"±{100 * each.chance:.1f} %"


def _wait_error(each: CalibratedPair) -> str:
    """The error of waiting in parts of a step: relative to waiting of nearly 0 it means nothing."""
    return _percent((each.wait_s[1] - each.wait_s[0]) / each.step_s[0]) if each.step_s[0] else "-"


def _faster(each: CalibratedPair) -> float:
    return each.real_seconds[0] / each.real_seconds[1] if each.real_seconds[1] else 0.0


def calibration_message(errors: Sequence[float], good: float) -> str:
    """Number of simulated times within `good` (a share) of the emulated ones."""
    within = sum(abs(error) <= good for error in errors)
    if len(errors) == 1:
        return f"Simulated time is {errors[0] * 100:+.1f} % off the emulated one"
    middle = statistics.median(map(abs, errors)) if errors else 0.0
    return (
        f"{within} of {len(errors)} simulated times within {good * 100:g} % of the emulated ones, "
        f"median error {middle * 100:.1f} %"
    )


def draw_calibration(pairs: Sequence[CalibratedPair]) -> Figure:
    """A bar for each job: how much longer its steps are simulated than emulated."""
    from edgetrain.runs.reports.plot.style import (
        COLOURS,
        TARGET,
        new_figure,
        styled,
        write_heading,
    )
    from edgetrain.runs.reports.plot.style import as_text as escaped

    with styled():
        figure = new_figure((9.6, 2.0 + 0.5 * len(pairs)))
        title = calibration_message([pair.time_error for pair in pairs], GOOD)
        write_heading(figure, title, ["seconds per step, simulated against emulated"])
        axes = figure.add_subplot()
        errors = [100 * pair.time_error for pair in pairs]
        names = [escaped(pair.name) for pair in pairs]
        axes.axvspan(-100 * GOOD, 100 * GOOD, color="#EAF3EC", zorder=0)
        axes.axvline(0, color=TARGET, lw=1.2, zorder=1)
        axes.barh(range(len(pairs)), errors, color=COLOURS[1], height=0.55, zorder=2)
        axes.set_yticks(range(len(pairs)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        most = max(2 * 100 * GOOD, *(1.25 * abs(error) for error in errors))
        axes.set_xlim(-most, most)
        axes.set_xlabel("error of the simulation (per cent); within the band it is called good")
        for place, error in enumerate(errors):
            side, shift = ("left", 4) if error >= 0 else ("right", -4)
            axes.annotate(
                f"{error:+.1f} %", (error, place), xytext=(shift, 0), textcoords="offset points",
                ha=side, va="center", fontsize=11,
            )  # fmt: skip
        return figure


# -- running ------------------------------------------------------------------------------------

Make = Callable[[str], Path]
"""Makes the folder of one run."""


def run_both(
    name: str,
    plan: Resolved,
    folder: Path,
    draws: int,
    report: Callable[[str], None],
    clock: Callable[[], float],
) -> CalibratedPair:
    """Run a planned job both ways, each run in a folder of its own inside `folder`.

    A job whose links lose packets, or have jitter, is simulated `draws` times, each time with other
    losses and delays. `report` is called with "emulated" and "simulated" before each of the first
    two runs. Raises what `emulated.run` and `simulation.run` raise.
    """
    from edgetrain.training import emulated
    from edgetrain.training.simulated import simulation

    make = partial(create_inside, folder)
    report("emulated")
    real = _timed(f"{name} emulated", make, lambda inside: emulated.run(plan, inside), clock)
    report("simulated")
    found = _timed(f"{name} simulated", make, lambda inside: simulation.run(plan, inside), clock)
    drawn = [
        simulation.run(plan, make(f"{name} simulated {luck}"), luck=luck)
        for luck in range(1, draws if depends_on_luck(plan) else 1)
    ]
    bases, seconds = (real.bases, found.bases), (real.real_s, found.real_s)
    return pair(name, real.summary, found.summary, bases, seconds, drawn)


@dataclass(frozen=True)
class Done:
    """A run of a job: its summary, the bases of its members, and its seconds on this machine."""

    summary: dict[str, Any]
    bases: set[str]
    real_s: float


def _timed(
    name: str, make: Make, start: Callable[[Path], dict[str, Any]], clock: Callable[[], float]
) -> Done:
    inside = make(name)
    began = clock()
    summary = start(inside)
    real_s = clock() - began
    return Done(summary, bases_of(read_metrics(inside, "event")), real_s)


def depends_on_luck(plan: Resolved) -> bool:
    """Whether any link of the job loses packets or has a delay that is drawn."""
    uplinks = [site.uplink for site in plan.sites]
    profiles = [*plan.network_profiles.values(), *uplinks]
    return any(
        profile.has_loss or profile.up.jitter_ms or profile.down.jitter_ms for profile in profiles
    )
