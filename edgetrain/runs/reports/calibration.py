"""Compare a simulated run with an emulated run of the same job.

Pure functions of summaries and of the bases that members finished with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import as_text, column
from edgetrain.runs.reports.comparison import seconds_per_step, untrusted

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
    trusted = emulation.get("trusted")
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
