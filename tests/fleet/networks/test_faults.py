"""Faults as data: parsed with names and ranges, switched by a schedule."""

from __future__ import annotations

from typing import Any

import pytest

from edgetrain.errors import ConfigError
from edgetrain.fleet.networks import Fault, parse_faults
from edgetrain.fleet.networks.faults import FaultSchedule
from edgetrain.fleet.networks.nodes import LEAD, hub_node


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"kind": "dwon", "at_s": 1, "for_s": 1}, "did you mean 'down'"),
        ({"kind": "down", "at_s": -1, "for_s": 1}, r"faults\[0\].at_s = -1 .*0 to 1e\+06 s"),
        ({"kind": "down", "at_s": 1}, r"faults\[0\].for_s is missing"),
        ({"kind": "down", "at_s": 1, "for_s": 1, "member": [1]}, "did you mean 'members'"),
        (
            {"kind": "down", "at_s": 1, "for_s": 1, "members": [4]},
            r"members\[0\] = 4 .*from 0 to 3",
        ),
        (
            {"kind": "down", "at_s": 1, "for_s": 1, "members": "1"},
            "= .1. .*a list of integers from 0 to 3",
        ),
        ({"kind": "rate", "at_s": 1, "for_s": 1}, "share is missing"),
        ({"kind": "rate", "at_s": 1, "for_s": 1, "share": 0}, "share = 0 .*0.001 to 1"),
    ],
)
def test_a_bad_fault_names_table_key_and_range(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_faults([table], 4)


def test_faults_overlap() -> None:
    down = Fault("down", 1, 5, (0,))
    slow = Fault("rate", 2, 2, share=0.1)
    apart = Fault("partition", 3, 1, (0, 1))
    schedule = FaultSchedule([down, slow, apart])
    changes = schedule.changes()
    assert [seconds for seconds, _, _ in changes] == [1, 2, 3, 4, 4, 6]
    for seconds, fault, begins in changes:
        if seconds < 4:
            schedule.switch(fault, begins)
    assert [schedule.apart(member, LEAD) for member in range(3)] == [True, True, False]
    assert schedule.apart(1, 2)
    assert schedule.apart(0, 1)  # member 0's link is down, partition or not
    assert schedule.rate_share(2) == 0.1
    for seconds, fault, begins in changes:
        if seconds >= 4:
            schedule.switch(fault, begins)
    assert not any(schedule.apart(member, LEAD) for member in range(3))
    assert schedule.rate_share(2) == 1


def test_a_partition_leaves_its_members_together() -> None:
    schedule = FaultSchedule([])
    schedule.switch(Fault("partition", 0, 1, (0, 1)), True)
    assert not schedule.apart(0, 1)
    assert schedule.apart(0, 2)


def test_hubs_are_struck_by_number() -> None:
    (fault,) = parse_faults([{"kind": "down", "at_s": 0, "for_s": 1, "hubs": [1]}], 4, 2)
    assert str(fault) == "link of hub 1: down for 1 s"
    schedule = FaultSchedule([])
    schedule.switch(fault, True)
    assert schedule.apart(0, hub_node(1))
    assert not schedule.apart(0, LEAD)
    assert not schedule.apart(0, 1)
    schedule.switch(fault, False)
    schedule.switch(Fault("partition", 0, 1, (0,), hubs=(1,)), True)
    assert not schedule.apart(0, hub_node(1))
    assert schedule.apart(0, LEAD)
    assert schedule.apart(1, hub_node(1))
