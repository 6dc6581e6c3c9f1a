"""A run as its lines tell it: the sums of each member and of the fleet.

Fed line by line, by whoever reads a run folder: what a run came to, what it is doing, its page and
its pictures follow from here. `runs/kept.py` keeps the lines, too. Seconds since training began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from edgetrain.runs.metrics.lines import HUB, Record, told_evaluation
from edgetrain.runs.reports import units
from edgetrain.runs.shapes import PARTS

if TYPE_CHECKING:
    from edgetrain.runs.over_members import OwnData


@dataclass
class MemberData:
    """The sums of one member's lines. Times in seconds, memory in bytes."""

    name: str
    """Without control characters."""
    lines: int = 0
    """Steps in the lines so far (a line may stand for several)."""
    step: int = 0
    round: int = 0
    t: float = 0.0
    loss: float | None = None
    seconds: tuple[float, ...] = (0.0,) * len(PARTS)
    """Seconds of PARTS, in all steps."""
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    cpu_s: float = 0.0
    joules: float | None = None
    above_sent_bytes: float | None = None
    """Bytes of a gateway to the hub above, and below from it; None: it is no gateway."""
    above_received_bytes: float | None = None
    counts: dict[str, float] = field(default_factory=dict)
    """Each sum of _COUNTED as its process last reported it: a new process begins again at 0."""
    peak_bytes: int = 0
    late: int = 0
    cut: float = 0.0
    """Contributions that a merge rule left out; a part of one counts as that part."""
    standing: str = ""
    reason: str = ""
    correction: str = ""
    """Correction that it chose from its first rounds; "": it had no choice, or not made it yet."""
    enrolled: str = ""
    """Name under which its machine was enrolled, if the hub reports one."""
    versions: str = ""
    """Versions of edgetrain, Python and torch there."""
    heard_t: float | None = None
    """When it last reported to the hub; the figures below are of that report. None: it did not."""
    pace_s: float | None = None
    """Seconds per step over the last few seconds, by the clock."""
    round_trip_s: float | None = None
    celsius: float | None = None
    throttled: bool | None = None
    disk_free_bytes: float | None = None
    """This and what follows: once a minute."""
    swap_bytes: float | None = None
    mhz: float | None = None
    under_voltage: bool | None = None
    wifi_dbm: float | None = None
    clock_s: float | None = None
    """Its clock less the hub's."""
    has_own_lines: bool = False
    """Whether it writes into this folder itself; its reports to the hub then repeat these lines."""

    @property
    def called(self) -> str:
        return units.beside(self.name, self.enrolled)

    @property
    def seconds_per_step(self) -> float | None:
        """By the clock, with evaluations and last replies; None before the first step."""
        return self.t / self.step if self.step else None

    @property
    def parts(self) -> tuple[float, ...]:
        """Mean seconds of the parts of a step: computing, waiting, overhead, evaluations,
        the wait for the last replies. They add up to `seconds_per_step`."""
        return tuple(each / (self.lines or 1) for each in self.seconds)

    @property
    def compute_s(self) -> float:
        """Mean of a step, as `wait_s` and `overhead_s`."""
        return self.parts[0]

    @property
    def wait_s(self) -> float:
        return self.parts[1]

    @property
    def overhead_s(self) -> float:
        return self.parts[2]

    @property
    def busy_s(self) -> float:
        """Seconds that the member itself needs for a step; others cause its waiting."""
        return self.compute_s + self.overhead_s

    @property
    def wait_share(self) -> float | None:
        """The part of its time that it waits, 0 to 1; None before its first step."""
        whole = self.busy_s + self.wait_s
        return self.wait_s / whole if whole else None

    def add_step(self, record: Record) -> None:
        if not self.has_own_lines:
            self.has_own_lines = True
            if self.lines:
                # Drop the reports to the hub: lines of its own repeat them
                fresh = MemberData(self.name)
                self.counts = {}
                for key in _SUMS:
                    setattr(self, key, getattr(fresh, key))
        self._add_sums(record)

    def add_status(self, record: Record) -> None:
        """Add what it reported to the hub: a "status" line."""
        self.enrolled = units.printable(str(record.get("name") or self.enrolled))
        self.heard_t = record["t"]
        for key in _LAST:
            if record.get(key) is not None:
                setattr(self, key, record[key])
        self.throttled = record.get("throttled")
        if not self.has_own_lines:
            self._add_sums(self._bounded(record))

    def _bounded(self, report: Record) -> Record:
        """A report with no time longer than the hub's own clock has run: the line's `t`."""
        at = min(max(0.0, _value(report, "at")), report["t"])
        parts = {part: max(0.0, _value(report, part)) for part in PARTS}
        passed, total = max(0.0, at - self.t), sum(parts.values())
        share = passed / total if total > passed + ROUNDING_S else 1.0
        return {**report, "t": at, **{part: share * value for part, value in parts.items()}}

    def _add_sums(self, record: Record) -> None:
        self.lines += int(record.get("steps", 1))
        self.step = max(self.step, int(_value(record, "step")))
        self.t = max(self.t, record["t"])
        self.loss = record.get("loss")
        passed = (_value(record, part) for part in PARTS)
        self.seconds = tuple(map(sum, zip(self.seconds, passed, strict=True)))
        self.add_usage(record)

    def add_usage(self, record: Record) -> None:
        """Add the keys that "step" and "round" lines share."""
        self.round = max(self.round, int(_value(record, "round")))
        for key in _COUNTED:
            if record.get(key) is not None:
                value, last = _value(record, key), self.counts.get(key, 0.0)
                more = value - last if value >= last else value
                setattr(self, key, (getattr(self, key) or 0.0) + more)
                self.counts[key] = value
        self.peak_bytes = max(self.peak_bytes, int(_value(record, "peak_bytes")))


@dataclass
class RunData:
    """The sums of all lines of a run, added one by one.

    Its size grows with members and evaluations, not with steps.
    """

    kind_of_member: ClassVar[type[MemberData]] = MemberData
    members: dict[str, MemberData] = field(default_factory=dict)
    hub: MemberData = field(default_factory=lambda: MemberData(HUB))
    own_evaluations: list[Record] = field(default_factory=list)
    """Evaluations by members that write into this folder."""
    told_evaluations: list[Record] = field(default_factory=list)
    """Evaluations that members reported to the hub."""
    own_data: OwnData | None = None
    """Evaluations on members' own data; None: none yet."""
    told_metric: tuple[str, str] | None = None
    """Figure that members report to the hub, and which is better: "higher" or "lower"."""
    rounds: int = 0
    merged_steps: int = 0
    local_steps: int = 0
    """Steps in a round, in force until the final sync; 0: not known."""
    delay: int = 0
    """Local steps, in force until the final sync."""
    now: tuple[int, int] = (0, 0)
    """Steps in a round, and the delay, in force now."""
    final_sync: bool = False
    """Whether rounds are those of the final sync."""
    ages: tuple[int, int] | None = None
    """Age of the newest round's contributions, in replies, their median, and the most of any round;
    None: members are in step."""
    codec: str = ""
    """Codec of the newest reply, where it changes from round to round."""
    dealt: tuple[int, ...] | None = None
    """Where the hub hands out work: slices of all rounds, copies and wasted ones among them; None:
    it does not."""
    step_length: float = 0.0
    """Then: the newest round's."""
    missed: int = 0
    errors: list[str] = field(default_factory=list)
    marked: list[Record] = field(default_factory=list)
    """Events in MARKED, and rounds with another delay than the round before."""
    reducers: str = ""
    """Reducers of each range, as last reported; "": one hub for all."""
    paused: bool = False
    """Whether people have paused the job."""
    overrun: str = ""
    """The first member that says so: how many of its steps took longer than its device would."""
    t: float = 0.0

    def add(self, record: Record) -> None:
        """Add one record; unknown kinds are ignored."""
        self.t = max(self.t, record["t"])
        kind, member = record["kind"], record["member"]
        if kind == "step":
            self._of(member).add_step(record)
        elif kind == "eval":
            self.own_evaluations.append(record)
        elif kind == "figure":
            self._add_figure(record)
        elif kind == "own_eval":
            self._add_own(record)
        elif kind == "exchange" and not self.rounds:  # a member's own folder
            self._take_pace(record)
        elif kind == "round":
            self.rounds += 1
            self._add_round(record)
        elif kind == "event":
            self._add_event(record)
        elif kind == "status":
            self._of(str(record.get("about") or member)).add_status(record)

    def add_all(self, records: Iterable[Record]) -> Self:
        for record in records:
            self.add(record)
        return self

    @property
    def evaluations(self) -> list[Record]:
        """The "eval" lines; in a hub's own folder, those that members reported."""
        return self.own_evaluations or self.told_evaluations

    @property
    def is_told(self) -> bool:
        """Whether members write no lines here, and only their reports to the hub are known."""
        return not any(member.has_own_lines for member in self.members.values())

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that all members have sent and received; by the hub's count if `is_told`."""
        if self.is_told and self.rounds:
            return int(self.hub.received_bytes), int(self.hub.sent_bytes)
        members = self.members.values()
        sent = int(sum(member.sent_bytes for member in members))
        return sent, int(sum(member.received_bytes for member in members))

    @property
    def most_steps(self) -> int | None:
        """The most steps that a member can have taken, by the rounds at the hub; None: not known,
        or stated by members that write their own lines."""
        if not self.is_told or not self.local_steps:
            return None
        return self.merged_steps + self.delay + 2 * self.local_steps

    def turns(self, job: Mapping[str, Any]) -> tuple[int, float] | None:
        """Of a job whose rounds have a sample of the members: its steps that are over, and the
        seconds of that. None: all members have a part in all rounds."""
        if not job.get("strategy", {}).get("cohort"):
            return None
        members, steps = self.members.values(), int(job.get("train", {}).get("steps") or 0)
        over = max([self.merged_steps, *(m.step for m in members if m.has_own_lines)])
        over = steps if any(m.standing == "finished" for m in members) else min(over, steps)
        return over, max((m.t for m in members if m.step), default=0.0)

    def lost(self) -> list[str]:
        """Members that failed, or that the hub gave up and that did not come back."""
        return [name for name, member in self.members.items() if member.standing in _LOST]

    def failed(self) -> list[str]:
        return [name for name, member in self.members.items() if member.standing == "failed"]

    def removed(self) -> list[str]:
        """Members that people removed from the job, and that have not joined again."""
        return [n for n, member in self.members.items() if member.standing == "removed"]

    def unfinished(self) -> list[str]:
        """Members that have neither finished nor left; after a run these are the lost ones."""
        return [name for name, member in self.members.items() if member.standing not in _OVER]

    def _of(self, member: str) -> MemberData:
        if member == HUB:
            return self.hub
        found = self.members.get(member)
        if found is None:
            found = self.members[member] = self.kind_of_member(units.printable(member))
        return found

    def _add_round(self, record: Record) -> None:
        self.missed += len(record.get("missing") or []) + _cut(record, "missing")
        before, delay = self.now
        if self.rounds == 1 or _value(record, "delay") != delay:
            self.marked.append(record)
        self._take_pace(record)
        self.merged_steps += before or self.now[0]
        self.codec = str(record.get("codec") or self.codec)
        self.hub.add_usage(record)
        for name, share, _ in record.get("cuts") or []:
            self._of(name).cut += share
        for name in record.get("members") or []:
            member = self.members.get(name)
            if member is not None and member.standing == "late":
                member.standing, member.reason = "joined", ""

    def _add_figure(self, record: Record) -> None:
        if (evaluation := told_evaluation(record)) is not None:
            self.told_evaluations.append(evaluation)
            better = "lower" if record.get("better") == "lower" else "higher"
            self.told_metric = record["metric"], better

    def _add_own(self, record: Record) -> None:
        if self.own_data is None:
            from edgetrain.runs.over_members import OwnData  # which few jobs have

            self.own_data = OwnData()
        self.own_data.add(record)

    def _take_pace(self, record: Record) -> None:
        self.now = int(_value(record, "local_steps")) or self.now[0], int(_value(record, "delay"))
        self.final_sync = record.get("final_sync") is True
        if slices := record.get("slices"):
            counts = slices, record.get("copies", 0), record.get("wasted", 0)
            self.dealt = tuple(map(sum, zip(self.dealt or (0, 0, 0), counts, strict=True)))
            self.step_length = _value(record, "step_length")
        if ages := record.get("ages"):
            self.ages = ages[0], max(ages[1], self.ages[1] if self.ages else 0)
        if not self.final_sync:
            self.local_steps, self.delay = self.now

    def _add_event(self, record: Record) -> None:
        event, reason = str(record.get("event")), str(record.get("reason") or "")
        about = str(record.get("about") or record["member"])
        if event in MARKED:
            self.marked.append(record)
        if event == "error":
            self.errors.append(f"{about}: {reason}")
            # A member writes errors of its own, and goes on. What another says of it is its end.
            if about not in (record["member"], HUB):
                event = "failed"
        if event == "refused" and reason.startswith("diverged:"):  # only one that was in can be
            event = "failed"
        if event == "overrun":
            self.overrun = self.overrun or f"{about}: {reason}"
        if event == "reducers":
            self.reducers = units.printable(reason)
        if event == "told":
            self.paused = reason.startswith("paused")
        if event == "correction":
            self._of(about).correction = reason.partition(":")[0]
        if event == "late":
            self._of(about).late += 1
        # Other events do not change whether a member is there: an overrun, a full disk, another
        # member refused under its name, or what the hub reports after the member finished.
        if event in _STANDINGS and self._of(about).standing != "finished":
            self._of(about).standing, self._of(about).reason = event, reason


def mean_parts(members: Iterable[MemberData]) -> tuple[float, ...]:
    """Seconds of PARTS in a mean step of these members; zeros where they have none."""
    listed = list(members)
    lines = sum(member.lines for member in listed) or 1
    sums = zip(*(member.seconds for member in listed), strict=True)
    return tuple(sum(each) / lines for each in sums) or (0.0,) * len(PARTS)


MARKED = ("fault", "absence", "gone", "back", "error")
"""Events that pictures mark in the course of a run."""
ROUNDING_S = 0.01
"""Tolerance for the sum of a few times that are reported in milliseconds."""

_COUNTED = (
    "sent_bytes", "received_bytes", "cpu_s", "joules", "above_sent_bytes", "above_received_bytes",
)  # fmt: skip
_SUMS = ("lines", "step", "t", "seconds", *_COUNTED)
_LAST = (
    "versions", "pace_s", "round_trip_s", "celsius", "disk_free_bytes", "swap_bytes", "mhz",
    "under_voltage", "wifi_dbm", "clock_s",
)  # fmt: skip
_STANDINGS = (
    "joined", "started", "late", "gone", "back", "left", "removed", "finished", "failed",
)  # fmt: skip
_OVER = ("finished", "left", "removed")
_LOST = ("gone", "failed")


def _value(record: Record, key: str) -> float:
    value = record.get(key)
    return value if isinstance(value, int | float) else 0


def _cut(record: Record, key: str) -> int:
    cut = record.get("cut")
    return int(_value(cut, key)) if isinstance(cut, dict) else 0
