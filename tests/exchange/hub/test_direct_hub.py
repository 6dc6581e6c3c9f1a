"""The hub that all join where members reduce: what it does once a reducer is lost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hub_desk import Desk, lost, refusal, the

from edgetrain import codecs
from edgetrain.exchange.further_messages import Reached, Takeover
from edgetrain.exchange.hub.direct import DirectPart, share_out
from edgetrain.exchange.hub.effects import Save, Write
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import unpack_state
from edgetrain.exchange.messages import (
    PROTOCOL,
    Base,
    Beat,
    Contribute,
    Leave,
    Map,
    Resume,
    Welcome,
)
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.ranges import Stretch

RANGES, ELEMENTS = 12, 5000
SPANS = {"a": (0, 4), "b": (4, 8), "c": (8, 12)}


class DirectDesk(Desk):
    """a, b and c reduce, and have begun; `journal` is what the hub has written."""

    def __init__(self):
        super().__init__(3, lost_after_s=1.0)
        self.journal = []
        self.hub = self.new_hub()

    def new_hub(self):
        terms = replace(self.hub.terms, stretch=Stretch(RANGES, 0, 0), local_steps=1)
        rules = Mean(True), codecs.Dense(), codecs.Dense()
        hub = Hub(terms, self.hub.policy, *rules)
        return DirectPart(partial(share_out, ranges=RANGES)).attach(hub)

    def take(self, effects):
        effects = [*effects]
        self.journal += [each for each in effects if isinstance(each, Write | Save)]
        super().take(effects)

    def begin(self):
        for number, name in enumerate(SPANS, 1):
            said = self.join(
                name, address=f"tcp://10.0.0.{number}:1", session=number, elements=ELEMENTS
            )
        map = the(Map, said["a"])
        for name in SPANS:
            others = tuple((other, 1) for other in SPANS if other != name)
            said = self.tell(name, Reached(map.number, others))
        assert the(Welcome, said["a"]).upload
        self.tell("a", Base(0, 1, b""))
        assert self.hub.started
        self.rounds(1)
        return self

    def rounds(self, end, names="abc"):
        """All contribute to the rounds before this one."""
        for round in range(self.hub.round, end):
            for name in names:
                self.tell(name, Contribute(round, 0, 1, 1.0, round, 0, 0, b""))
        assert self.hub.round == end

    def restart(self):
        """The hub is killed, and goes on from its journal; nobody is back yet."""
        at = max(n for n, each in enumerate(self.journal) if isinstance(each, Save))
        records = [each.record for each in self.journal[at + 1 :]]
        hub = self.new_hub()
        hub.restore(self.journal[at].state, records, self.now)
        self.hub, self.said = hub, {}

    def come_back(self, name, round):
        session = 1 + [*SPANS].index(name)
        resume = Resume(PROTOCOL, "model", ELEMENTS, name, session, round, 0, round, round, 1)
        return self.tell(name, replace(resume, address=f"tcp://10.0.0.{session}:1"))

    def answer(self, name, span, applied, hosts=True):
        return self.tell(name, Takeover(1, *span, applied, hosts))


def lose(desk, name):
    """Its member is given up; what the hub says then."""
    for other in SPANS:
        desk.tell(other, Beat()) if other != name else None
    lost(desk, name)
    return desk.said


def test_the_member_with_most_replies_goes_on_and_gone_and_done_members_have_no_seat_there():
    desk = DirectDesk().begin()
    desk.rounds(3)
    desk.tell("b", Beat(merged=3))  # it contributes no more
    said = lose(desk, "a")
    assert the(Takeover, said["b"]) == the(Takeover, said["c"]) == Takeover(0, 0, 4)
    desk.answer("c", SPANS["a"], 2)
    asked = the(Takeover, desk.answer("b", SPANS["a"], 3)["b"])
    assert (asked.stage, asked.applied) == (2, 3)
    state = unpack_state(asked.payload)
    assert [seat.name for seat in state.seats] == ["c"]
    assert [seat.name for seat in state.away] == ["a"]
    said = desk.tell("b", Takeover(3, *SPANS["a"], address="tcp://10.0.0.2:9"))
    assert the(Map, said["c"]).rows[-1][:2] == ("b", "tcp://10.0.0.2:9")


def test_nobody_goes_on_without_replies_that_only_a_member_has_that_left():
    """It ended with them: whoever went on without them would end with other parameters."""
    desk = DirectDesk().begin()
    desk.rounds(3)
    desk.tell("b", Beat(merged=3))
    desk.tell("b", Leave("done"))
    lose(desk, "a")
    said = desk.answer("c", SPANS["a"], 2)
    assert refusal(desk, said, "c") == (
        "session",
        "nobody can reduce ranges 0 to 3: only b had the last replies",
    )
    assert desk.hub.finished


def test_where_nobody_can_be_reached_all_are_told_so():
    desk = DirectDesk().begin()
    lose(desk, "a")
    desk.answer("b", SPANS["a"], 1, hosts=False)
    said = desk.answer("c", SPANS["a"], 1, hosts=False)
    for name in "bc":
        assert "nobody can reduce ranges 0 to 3" in refusal(desk, said, name)[1]


@pytest.mark.parametrize("is_back", [True, False])
def test_a_hub_that_is_started_again_goes_on_replacing_a_reducer(is_back):
    """Members take nothing more from it, whether its member is back or not."""
    desk = DirectDesk().begin()
    desk.rounds(2)
    lose(desk, "a")
    desk.answer("b", SPANS["a"], 2)
    if is_back:
        desk.come_back("a", 2)
    desk.restart()
    for name in "abc" if is_back else "bc":
        assert Takeover(0, 0, 4) in desk.come_back(name, 2)[name]
    names = "abc" if is_back else "bc"
    for name in names:
        said = desk.answer(name, SPANS["a"], 2)
    (heir,) = [
        name
        for name, messages in said.items()
        for each in messages
        if isinstance(each, Takeover) and each.stage == 2
    ]
    assert heir in names
