"""What people tell a hub: a paused job gives the same bits, and a hub that is killed obeys too."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from fleet import Disk, Fleet
from hub_desk import ZEROS, Desk, back, lost, raw, refusal, the
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import BadMessage
from edgetrain.exchange.hub.effects import Answered, Save, Write
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.records import Departed, Steered, decode, encode
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.messages import Base, Leave, Refuse, Reply


class ToldDesk(Desk):
    """A desk at which people give orders, too."""

    def order(self, *words):
        """The answer; what else the hub says is in `said`."""
        answers, self.said = [], {}
        effects = self.hub.obey(Order(words, answers.append), self.now)
        self.effects = effects
        self.take(effects)
        answers += [effect.told for effect in effects if isinstance(effect, Answered)]
        (answer,) = answers
        return answer


def begun(members=2, **policy):
    desk = ToldDesk(members, **policy)
    return desk.started("abcdefgh"[:members])


# -- pausing --------------------------------------------------------------------------------------


def test_while_a_job_is_paused_no_round_closes():
    desk = begun()
    answer = desk.order("pause")
    assert answer == {"course": "paused", "round": 0, "members": ["a", "b"]}
    desk.give("a", 0)
    assert not desk.give("b", 0)
    assert not [m for said in desk.tick(1e6).values() for m in said if isinstance(m, Reply)]
    assert desk.order("pause")["course"] == "paused", "twice is no error"
    assert desk.order("resume")["course"] == ""
    assert isinstance(the(Reply, desk.said["a"]), Reply)
    assert desk.closed[0].members == ("a", "b")


@given(st.floats(0, 9.9), st.floats(0, 1e6), st.floats(0, 9.9), st.sampled_from(["a", "ab"]))
def test_no_deadline_comes_nearer_while_a_job_is_paused(before_s, pause_s, left_s, early):
    """A round of three members with a deadline of 10 s, of which a pause takes nothing."""
    desk = begun(3, deadline_s=10.0, quorum=1)
    for name in early:
        desk.give(name, 0)
    desk.tick(before_s)
    desk.order("pause")
    desk.tick(pause_s)
    desk.order("resume")
    assert not desk.closed
    left_s = min(left_s, 9.9 - before_s)
    desk.tick(max(0.0, left_s))
    assert not desk.closed
    for name in sorted({*"abc"} - {*early}):
        desk.give(name, 0)
    assert desk.closed[0].missing == ()


def test_the_deadline_still_comes():
    desk = begun(2, deadline_s=10.0)
    desk.give("a", 0)
    desk.tick(4)
    desk.order("pause")
    desk.tick(100)
    desk.order("resume")
    desk.tick(5.9)
    assert not desk.closed
    desk.tick(0.2)
    assert desk.closed[0].missing == ("b",)


def test_a_contribution_during_a_pause_counts_as_if_it_came_at_its_beginning():
    desk = begun(2, deadline_s=10.0)
    desk.order("pause")
    desk.tick(500)
    desk.give("a", 0)
    desk.tick(500)
    desk.order("resume")
    desk.tick(9.9)
    assert not desk.closed
    desk.give("b", 0)
    assert desk.closed[0].missing == ()


def test_members_that_cannot_be_reached_keep_their_place_while_a_job_is_paused():
    desk = begun(3, lost_after_s=5.0)
    desk.order("pause")
    lost(desk, "b")
    desk.tick(1000)
    assert desk.hub.present == ["a", "b", "c"]
    desk.order("resume")
    desk.tick(4.9)
    assert desk.hub.present == ["a", "b", "c"]
    desk.tick(0.2)
    assert desk.hub.present == ["a", "c"]


def test_a_measured_delay_does_not_follow_from_a_pause():
    """A trip that took a pause says nothing; the fleet agrees again once others are measured."""
    delays = {}
    for paused in (False, True):
        desk = ToldDesk(1, delay=None).started("a")
        for round in range(40):
            if paused and round == 2:
                desk.order("pause")
                desk.tick(3600)
                desk.order("resume")
            trip = 9_000 if paused and round == 3 else 3
            desk.give(
                "a", round, applied=round, checksum=desk.hub.checksum(round),
                wanted_delay=trip, step_s=0.1,
            )  # fmt: skip
            desk.tick(0.3)
        delays[paused] = desk.hub.rounds.delay.delay
        assert max(each.delay for each in desk.closed) <= 8
    assert delays[True] == delays[False]


# -- the same bits, and whoever dies --------------------------------------------------------------


class ToldFleet(Fleet):
    """A fleet whose people tell the hub something now and then, by the scheduler's dice."""

    def __init__(self, *args, words=("pause",), share=0.05, **known):
        super().__init__(*args, disk=Disk(), **known)
        self._words, self._share = words, share
        self.told = []
        self.expected = ""

    def say(self, *words):
        answers = []
        self.survive(lambda: self.carry_out(self.hub.obey(Order(words, answers.append), self.now)))
        if answers and "error" not in answers[0] and "course" in answers[0]:
            self.expected = answers[0]["course"]
            self.told.append(words)
        elif not answers:  # the hub died, and may have obeyed before
            self.expected = self.hub.steering.course

    def let_refused_leave(self):
        """As a `Member` does; works twice."""
        for member in self.members:
            if member.state == "refused" and member.driver is not None:
                member.driver.leave("refused")

    def each(self):
        self.let_refused_leave()
        if not self.hub.started or self.hub.finished:
            return
        assert self.hub.steering.course == self.expected
        if self.expected == "" and self.rng.random() < self._share:
            self.say(self.rng.choice(self._words))
        elif self.expected == "paused" and self.rng.random() < self._share:
            self.say("resume")

    def let_time_pass(self):
        self.let_refused_leave()
        if self.hub.steering.course == "paused":
            self.now += 1e5
            self.survive(lambda: self.tick(0.0))
            self.say("resume")
        else:
            super().let_time_pass()


CASES = [
    ("dga", {"delay": 3, "codec": "fp32"}),
    ("dga", {"delay": 5, "codec": "topk(0.4) | int8"}),
    ("fedavg", {"delay": 0, "codec": "int8"}),
    ("sync-sgd", {"delay": 0, "codec": "fp32"}),
]


def fleet(case, kind=Fleet, seed=0, **more):
    strategy, known = CASES[case]
    delay, codec = known["delay"], known["codec"]
    policy = Policy(3, deadline_s=50.0)
    rng = random.Random(seed)
    return kind(strategy, 3, 2, delay, 12, codec=codec, rng=rng, policy=policy, **more)


@functools.cache
def calm(case):
    return fleet(case).run()


def bits(found):
    return [member.params.tobytes() for member in found.members], [c.members for c in found.closed]


@settings(max_examples=60)
@given(st.integers(0, len(CASES) - 1), st.integers(0, 10**6))
def test_a_paused_job_has_the_bits_of_one_that_was_not(case, seed):
    paused = fleet(case, ToldFleet, seed)
    paused.run(paused.each)
    assert bits(paused) == bits(calm(case))


@settings(max_examples=60)
@given(
    st.integers(0, len(CASES) - 1),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
)
def test_a_hub_that_is_killed_and_resumed_has_the_course_that_it_was_told(case, seed, kills):
    paused = fleet(case, ToldFleet, seed, kills=[200, *kills])
    paused.run(paused.each)
    assert bits(paused)[0] == bits(calm(case))[0]
    assert [member.state for member in paused.members] == ["done"] * 3


@settings(max_examples=60)
@given(
    st.integers(0, len(CASES) - 1),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 60), max_size=3),
)
def test_a_job_that_is_stopped_ends_with_the_base_of_its_last_round(case, seed, kills):
    stopped = fleet(case, ToldFleet, seed, kills=kills, words=("pause", "stop"), share=0.02)
    stopped.run(stopped.each)
    hub, before = stopped.hub, calm(case)
    assert hub.finished
    assert {member.state for member in stopped.members} <= {"refused", "done"}
    if ("stop",) in stopped.told:
        assert hub.steering.course == "stopped"
        assert stopped.disk.state.course == "stopped"
        known = before.members[0].checksums.get(hub.round)
        assert known is None or hub.checksum(hub.round, known) == known


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_laws_above_are_about_jobs_that_were_paused_and_stopped(case):
    paused = [fleet(case, ToldFleet, seed) for seed in range(4)]
    stopped = [fleet(case, ToldFleet, seed, words=("stop",)) for seed in range(4)]
    for each in (*paused, *stopped):
        each.run(each.each)
    assert sum(each.told.count(("pause",)) for each in paused) >= 4
    assert all(each.told == [("stop",)] for each in stopped)


# -- removing -------------------------------------------------------------------------------------


def test_a_member_that_is_removed_is_told_so_and_not_waited_for():
    desk = begun(3)
    desk.give("a", 0)
    desk.give("c", 0)
    answer = desk.order("remove", "b")
    assert answer["members"] == ["a", "c"]
    assert refusal(desk, desk.said, "b")[0] == "removed"
    assert desk.closed[0].members == ("a", "c")
    assert ("removed", "b") in desk.events()
    assert Write(Departed("b", final=True)) in desk.effects


def test_while_a_job_is_paused_a_member_can_be_removed():
    desk = begun(3)
    desk.order("pause")
    desk.order("remove", "b")
    desk.give("a", 0)
    desk.give("c", 0)
    assert not desk.closed
    desk.order("resume")
    assert desk.closed[0].members == ("a", "c")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("remove", "z"), "no member 'z' is in"),
        (("remove", "<script>"), "no member '<script>' is in"),
        (("remove", ""), "no member '' is in"),
        (("remove",), "remove: this hub takes no such order"),
        (("pause", "a"), "pause a: this hub takes no such order"),
        (("hubs",), "hubs: this hub takes no such order"),
        ((), ": this hub takes no such order"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(words, error):
    desk = begun()
    assert desk.order(*words)["error"] == error
    assert desk.effects == []
    assert desk.hub.present == ["a", "b"]


def test_the_last_member_is_not_removed():
    desk = begun(1)
    answer = desk.order("remove", "a")
    assert (answer["error"], answer["hint"]) == (
        "a is the last member",
        "end the job: edgetrain control RUN stop",
    )


@pytest.mark.parametrize("word", ["pause", "resume", "stop"])
def test_before_training_there_is_no_course(word):
    desk = ToldDesk(2)
    desk.join("a")
    assert desk.order(word)["error"] == f"{word}: training has not begun"
    assert not desk.hub.steering.stands


# -- ending ---------------------------------------------------------------------------------------


def test_a_job_that_is_ended_tells_its_members_until_they_have_left():
    desk = with_session_of_two()
    desk.give("a", 0, np.ones_like(ZEROS))
    desk.give("b", 0, np.ones_like(ZEROS))
    desk.order("stop")
    assert {who: said[-1].code for who, said in desk.said.items()} == {"a": "ended", "b": "ended"}
    (saved,) = [effect.state for effect in desk.effects if isinstance(effect, Save)]
    np.testing.assert_array_equal(saved.base, np.ones_like(ZEROS))
    assert desk.order("resume")["error"] == "the job is ending: people told it to stop"
    desk.give("a", 1)
    desk.give("b", 1)
    assert len(desk.closed) == 1
    assert not desk.hub.finished
    desk.tell("a", Leave("refused"))
    assert not desk.hub.finished
    assert the(Refuse, back(desk)["z"]).code == "ended"
    assert desk.hub.finished


def with_session_of_two():
    desk = ToldDesk(2)
    desk.join("a")
    desk.join("b", session=7)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    return desk


def test_a_job_that_is_ended_takes_nobody_in_and_waits_for_nobody_that_is_gone():
    desk = begun(3, lost_after_s=5.0)
    desk.order("stop")
    assert refusal(desk, desk.join("z"), "z")[0] == "ended"
    for who in "ab":
        desk.tell(who, Leave("refused"))
    lost(desk, "c")
    assert desk.hub.finished


# -- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("course", ["", "paused", "stopped"])
def test_records_keep_the_course(course):
    header, payloads = encode(Steered(course))
    assert decode(header, b"".join(payloads)) == Steered(course)
    desk = begun()
    if course:
        desk.order({"paused": "pause", "stopped": "stop"}[course])
    header, payloads = encode(desk.hub.state())
    assert decode(header, b"".join(map(bytes, payloads))).course == course


def test_a_record_with_another_course_is_refused():
    header, _ = encode(Steered("dancing"))
    with pytest.raises(BadMessage, match="'dancing'"):
        decode(header, b"")
