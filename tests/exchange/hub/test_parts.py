"""What a hub has besides: a part is around all that the hub does, and is no other hub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hub_desk import Desk

import edgetrain
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.protocol import HubPart
from edgetrain.exchange.messages import Beat
from edgetrain.vectors.ranges import Stretch

POINTS = [
    name for name in vars(HubPart) if not name.startswith("_") and callable(vars(HubPart)[name])
]


class Noted(HubPart):
    """Notes at which points it is asked."""

    def __init__(self):
        self.asked = []

    def __getattribute__(self, name):
        if name in POINTS:
            self.asked.append(name)
        return super().__getattribute__(name)


def told(part):
    """A short life of a hub with this part, and what it said."""
    desk, said = Desk(2), []
    part.attach(desk.hub)
    desk.started()
    hub = desk.hub
    for name in "ab":
        said.append(desk.give(name, 0))
    said.append(hub.garbled(b"a", 1.0))
    said.append(hub.unreachable(b"b", 1.0))
    said.append(hub.revoke_all_but([], 1.0))
    said.append(desk.tick(1.0))
    said.append(hub.obey(Order(("pause",), print), 1.0))
    hub.part.hear(1.0)
    again = Desk(2).hub
    part.attach(again)
    again.restore(hub.state(), [], 2.0)
    return said, again.tick(3.0)


def test_a_part_is_asked_at_each_point_and_by_itself_changes_nothing():
    noted = Noted()
    assert str(told(noted)) == str(told(HubPart()))
    assert set(noted.asked) == set(POINTS)


def test_nothing_is_derived_from_a_hub():
    package = Path(edgetrain.__file__).parent
    texts = "\n".join(path.read_text("utf-8") for path in package.rglob("*.py"))
    derived = re.findall(r"^class \w+\([^)]*\bHub\b[^)]*\):", texts, re.MULTILINE)
    assert derived == []


@pytest.mark.parametrize("holds", [True, False])
def test_a_part_may_hold_a_hub_whose_members_have_left(holds, monkeypatch):
    monkeypatch.setattr(HubPart, "holds", holds)
    desk = Desk(2).started()
    for name in "ab":
        desk.hub.membership.remove(desk.hub.members.named(name), "left", "done")
    assert desk.hub.finished is not holds


def test_a_hub_that_becomes_that_of_another_stretch_keeps_its_part_its_patience_and_its_tail():
    desk = Desk(2, heartbeat_s=3.0).started()
    hub, part = desk.hub, HubPart()
    part.attach(hub)
    hub.tail = 5
    hub.become(Stretch(4, 1, 2))
    assert (hub.part, hub.tail, hub.policy.heartbeat_s) == (part, 5, 3.0)
    assert hub.terms.stretch == Stretch(4, 1, 2)
    assert not hub.started
    assert not hub.members
    assert desk.tell("a", Beat())["a"][0].code == "unknown"
