"""A run in plain lines of ASCII: its state, and the events that people should see."""

from __future__ import annotations

import re
from collections import Counter as Count
from collections.abc import Iterable, Sequence

from edgetrain.runs.data import MemberData
from edgetrain.runs.metrics.lines import HUB, Record
from edgetrain.runs.reports import units
from edgetrain.runs.reports.happenings import event_in_words
from edgetrain.runs.reports.live.watch import RunState

ODD_CLOCK_S = 1.0
"""A clock that is off by less is not worth a word."""
_ROUTINE = ("joined", "started", "finished", "left")
"""Events of every member of a healthy run: counted together, not shown one by one."""
_DETAILS = (*_ROUTINE, "correction", "absence")
"""What a healthy run does as its job has it: news only for those who ask for details."""
_TOGETHER = ("correction", "absence", "gone", "back")
"""Events that many members of a large fleet have at about the same time."""
MOST_NAMED = 3
"""Members that a line names one by one."""
_SAID = {
    "started": "started training", "gone": "was lost", "back": "came back", "map": "said",
    "refused": "was refused", "removed": "was removed", "pace": "changed the pace",
    "codec": "changed the codec", "overrun": "was too slow", "absence": "went away",
    "error": "had an error", "stands": "said", "told": "was told", "search": "said",
}  # fmt: skip
"""What an event's line says between who and why, where its name is no verb."""


def plain_line(state: RunState) -> str:
    if not state.step:
        return f"{state.name}: {state.phase}"
    steps = f"/{state.steps}" if state.steps else ""
    parts = [
        f"step {state.step:.0f}{steps}",
        *_figures_in_words(state),
        f"{units.duration(state.seconds_per_step)}/step ({_split_in_words(state)})",
        f"sent {units.size(state.sent_bytes)} received {units.size(state.received_bytes)}",
    ]
    if (hub := state.data.hub).above_sent_bytes is not None:
        sent, received = map(units.size, (hub.above_sent_bytes, hub.above_received_bytes))
        parts.append(f"above sent {sent} received {received}")
    if state.late:
        parts.append(f"{state.late} times late")
    if state.left_s is not None:
        parts.append(f"{units.duration(state.left_s)} left")
    if state.timing_ok is False:
        parts.append("untrusted: the emulated network was late")
    return f"{state.name}: " + ", ".join(parts)


_MOST_MEMBERS = 10


def member_lines(state: RunState) -> list[str]:
    """A line for each member that reports to a hub, the slowest first, ten at most."""
    reporting = [member for member in state.members if member.pace_s is not None]
    reporting.sort(key=lambda member: -(member.pace_s or 0.0))
    lines = [f"  {_member_in_words(member)}" for member in reporting[:_MOST_MEMBERS]]
    rest = len(reporting) - len(lines)
    return [*lines, f"  and {rest} more"] if rest else lines


def _figures_in_words(state: RunState) -> list[str]:
    """The loss and the task's figure, of which a hub knows neither, and that of members' data."""
    own = own_data_in_words(state)
    if state.loss is None and state.figure is None:
        return own
    return [
        f"loss {units.figure('loss', state.loss)}",
        f"held-out {state.metric} {units.figure(state.metric, state.figure)}",
        *own,
    ]


def own_data_in_words(state: RunState) -> list[str]:
    """What members find on data that they hold out of their own, if they do."""
    own = state.data.own_data
    if own is None or (found := own.newest(state.metric)) is None:
        return []
    mean, worst = (units.figure(state.metric, v) for v in (found.mean, found.worst_tenth))
    return [f"on members' own data {mean} (worst tenth {worst})"]


def _member_in_words(member: MemberData) -> str:
    parts = [
        f"step {member.step}",
        f"{units.duration(member.pace_s)}/step",
        f"waiting {units.share(member.wait_share)}",
        f"round trip {units.duration(member.round_trip_s)}",
        f"sent {units.size(member.sent_bytes)} received {units.size(member.received_bytes)}",
        f"memory {units.size(member.peak_bytes or None)}",
    ]
    if member.celsius is not None:
        parts.append(f"{member.celsius:.0f} C" + (" throttled" if member.throttled else ""))
    parts += machine_in_words(member)
    if member.standing in ("late", "gone", "failed"):
        parts.append(member.standing)
    return f"{member.called}: " + ", ".join(parts)


def machine_in_words(member: MemberData) -> list[str]:
    """What a member said of its machine that is known, and not as it is everywhere."""
    said = {
        "under-voltage": member.under_voltage,
        f"disk {units.size(member.disk_free_bytes)} free": member.disk_free_bytes is not None,
        f"swap {units.size(member.swap_bytes)}": member.swap_bytes,
        f"{member.mhz or 0:.0f} MHz": member.mhz,
        f"Wi-Fi {member.wifi_dbm or 0:.0f} dBm": member.wifi_dbm,
        f"clock {member.clock_s or 0:+.1f} s": abs(member.clock_s or 0) >= ODD_CLOCK_S,
    }
    return [words for words, there in said.items() if there]


def _split_in_words(state: RunState) -> str:
    parts = ("compute", state.compute_s), ("wait", state.wait_s), ("overhead", state.overhead_s)
    return ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in parts)


def news(name: str, records: Iterable[Record], *, routine: bool = True) -> list[str]:
    """A line for each event of the run `name` that people should see.

    Events of every member of a healthy run are counted together. Without `routine` they are left
    out, as are corrections and absences that the job itself asks for.
    Of several members that come and go, or choose a correction, for reasons that differ in numbers
    alone there is one line, with the range of each number. A late member is not reported: a slow
    one is late in every round. States and plain lines have the count.
    """
    counts = Count[str]()
    alike = dict[tuple[str, ...], list[tuple[str, str, list[str]]]]()
    for number, record in enumerate(records):
        if record["kind"] != "event" or record.get("event") == "late":
            continue
        about, event, reason = event_in_words(record)
        if event in _DETAILS and not routine:
            continue
        if event in _ROUTINE and about != HUB:
            counts[event] += 1
            continue
        when = units.duration(max(0.0, record["t"]))
        pieces = re.split(r"(?<![\w.])(\d+(?:\.\d+)?)", reason)
        key = event, *([] if event in _TOGETHER and about != HUB else [f"{number}"]), *pieces[::2]
        alike.setdefault(key, []).append((about, when, pieces[1::2]))
    lines = [f"{name}: {_told(key, those)}" for key, those in alike.items()]
    counted = [f"{name}: {n} member{'s' * (n > 1)} {event}" for event, n in counts.items()]
    return counted + lines


def _told(key: Sequence[str], those: Sequence[tuple[str, str, list[str]]]) -> str:
    """What happened to these members, whose reasons are alike but for numbers: `key` begins with
    the event, and ends with the texts between them."""
    names, times, numbers = zip(*those, strict=True)
    event, texts = key[0], key[-len(numbers[0]) - 1 :]
    shown = [*map(_span, zip(*numbers, strict=True)), ""]
    reason = "".join(text + number for text, number in zip(texts, shown, strict=True))
    said = _SAID.get(event, event)
    if len(names) == 1:
        who = names[0]
    else:
        who = f"{len(names)} members"
        if len(names) <= MOST_NAMED:
            who = ", ".join(names[:-1]) + f" and {names[-1]}"
        said = said.replace("was ", "were ")
    when = f"at {times[0]}" if times[0] == times[-1] else f"from {times[0]} to {times[-1]}"
    if event == "correction":
        rule, _, reason = reason.partition(": ")
        said = f'chose the correction "{rule}"'
    return f"{who} {said} {when}" + f": {reason}" * bool(reason)


def _span(numbers: Sequence[str]) -> str:
    """One number, or the smallest and the largest of several."""
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if low == high else f"{low} to {high}"
