"""What a hub's run folder says of the devices in its job: `devices status` without asking them.

A device that has reported lately is known by what it reported; all others are looked at over ssh
(`desk`). A run folder may come from anywhere: it is read within limits, and decides nothing else.
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.provisioning.desk import DeviceState, marks_of
from edgetrain.runs import folder as folders
from edgetrain.runs.data import MemberData, RunData
from edgetrain.runs.reports import units

FRESH_S = 30.0
"""Seconds for which a report counts; hub.status_s is 5 by default."""
_AWAY = ("gone", "left", "failed")
_FACTS = (
    "step", "pace_s", "celsius", "throttled", "under_voltage", "disk_free_bytes", "swap_bytes",
    "mhz", "wifi_dbm", "clock_s", "versions",
)  # fmt: skip


def states_in_job(runs: Path, version: str, now: float) -> dict[str, DeviceState]:
    """The devices that train in the newest run below `runs`, by the names of their enrolment; {}
    if that run is over, or its hub writes nothing. now: seconds since 1970; version: of this
    edgetrain."""
    try:
        run = folders.newest_whole(runs)
        if folders.read_summary(run) is not None:
            return {}
        silent_s = now - folders.metrics_path(run).stat().st_mtime
        data = RunData().add_all(folders.read_metrics(run, "status", "event"))
    except (ConfigError, OSError):
        return {}
    return {
        member.enrolled: _state(run, member, version)
        for member in data.members.values()
        if member.enrolled and member.standing not in _AWAY and member.heard_t is not None
        if data.t - member.heard_t + silent_s <= FRESH_S
    }


def _state(run: Path, member: MemberData, version: str) -> DeviceState:
    facts = {key: getattr(member, key) for key in _FACTS}
    theirs = member.versions.split(" ")[0]
    marks = marks_of(facts, member.clock_s or 0.0, other=theirs not in ("", version))
    if member.standing == "finished":
        done = f"{run.name}: {member.step} steps"
        return DeviceState(member.enrolled, "done", done, marks, facts)
    why = f"{run.name}: step {member.step}, {units.duration(member.pace_s)}/step"
    return DeviceState(member.enrolled, "training", why, marks, facts)
