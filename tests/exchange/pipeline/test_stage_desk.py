"""Stages and their hub, with integers in place of tensors: the order of gradients, the window, what
becomes of a stage that dies, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.pipeline_room import HUB, PipelineRoom, join_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgetrain.errors import BadMessage, ConfigError, Refused
from edgetrain.exchange.further_messages import Activation, StageBegin, StageState
from edgetrain.exchange.hub.effects import Answered, Note, Send
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.messages import Beat, Contribute, Figure, Leave, Refuse
from edgetrain.exchange.pipeline.desk import StageDesk, window_of
from edgetrain.exchange.pipeline.relay import Relay, RelayTerms
from edgetrain.exchange.transport import owned

TERMS = RelayTerms("job", 4, 5, 2, 8, evaluate_every=4)


class Sums:
    """A stage that adds its number to what it is given. Its parameter is a history: which gradient
    of which step came in which order, so that any other order or step shows."""

    def __init__(self, stage: int, stages: int, microbatches: int = 6) -> None:
        self.stage, self.last, self.microbatches = stage, stages - 1, microbatches
        self.history, self.seen = b"", b""
        self.whole, self.clips = [], False

    def forward(self, step, micro, given):
        value = int.from_bytes(given, "big") if given is not None else 1000 * step + micro
        self.step = step
        return None if self.stage == self.last else (value + 1).to_bytes(8, "big")

    def backward(self, micro, given):
        value = int.from_bytes(given, "big") if given is not None else 7 * micro + 1
        self.seen += b"%d/%d " % (micro, value)
        passed = None if self.stage == 0 else (value + 1).to_bytes(8, "big")
        return passed, float(micro) if self.stage == self.last else 0.0

    def squares(self):
        return float(self.stage + 1)

    def finish(self, step, loss, squares):
        assert squares == (sum(range(self.last + 2)) if self.clips else 0)
        self.history += b"%d %g: %s\n" % (step, loss, self.seen)
        self.seen = b""

    def state(self):
        return self.history

    def begin(self, step, state):
        self.history, self.seen = state, b""
        if state.count(b"\n") != step:
            raise BadMessage("another state")

    def evaluate(self, step, stage, state):
        assert self.stage == 0
        if not stage:
            self.whole = []
        assert stage == len(self.whole), "states come in the order of their stages"
        self.whole.append(state)
        if stage < self.last:
            return None
        stages = self.last + 1
        assert self.whole == [expected(s, stages, step, self.microbatches) for s in range(stages)]
        return Figure("good", 1.0, False, step)


def expected(stage: int, stages: int, steps: int, microbatches: int = 6) -> bytes:
    """What the history is after so many steps."""
    hops, micros = stages - 1 - stage, range(microbatches)
    seen = b"".join(b"%d/%d " % (m, 7 * m + 1 + hops) for m in micros)
    return b"".join(b"%d %g: %s\n" % (s, sum(micros), seen) for s in range(steps))


def room_of(
    terms: RelayTerms, windows: list[int], seed: int, microbatches: int = 6, clips: bool = False
) -> PipelineRoom:
    def make(stage: int) -> Sums:
        made = Sums(stage, terms.stages, microbatches)
        made.clips = clips
        return made

    return PipelineRoom(terms, make, windows, seed, microbatches)


def assert_trained(room: PipelineRoom) -> None:
    stages, steps = room.terms.stages, room.terms.steps
    whole = tuple(expected(stage, stages, steps, room.microbatches) for stage in range(stages))
    assert room.relay.states == whole
    assert room.figures[-1].step == steps


@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.integers(1, 6),
    st.integers(0, 8), st.integers(0, 1 << 30), st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_gradients_are_added_in_order_whatever_the_network_does(
    stages, micros, steps, every, wider, seed, clips
):
    terms = RelayTerms("job", stages, steps, every, 8)
    windows = [min(micros, stages - stage + wider) for stage in range(stages)]
    room = room_of(terms, windows, seed, micros, clips)
    room.run()
    assert_trained(room)
    assert all(most <= window for most, window in zip(room.most_out, windows, strict=True))


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_all_states_of_a_step_are_there_before_the_next_ones_begin(
    stages, micros, every, size, seed
):
    terms = RelayTerms("job", stages, 6, every, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgetrain.exchange.pipeline.desk.PART_BYTES", size)
        patch.setattr("edgetrain.exchange.pipeline.relay.PART_BYTES", size)
        room = room_of(terms, [micros] * stages, seed, micros)
        room.run()
    assert room.commits == sorted({0, *range(every, 7, every), 6})


KILLS = st.dictionaries(st.integers(1, 2500), st.integers(HUB, 3), max_size=6)


@given(KILLS, st.integers(0, 1 << 30), st.booleans())
@settings(max_examples=80, deadline=None)
def test_stages_and_hubs_that_die_go_on_with_the_same_bits(kills, seed, clips):
    room = room_of(TERMS, [6, 5, 3, 1], seed, clips=clips)
    room.run(dict(kills))
    assert_trained(room)


@given(KILLS, st.integers(0, 2500), st.integers(0, 1 << 30), st.booleans())
@example(kills={}, at=1257, seed=6906, clips=False)  # the last states are on their way
@settings(max_examples=80, deadline=None)
def test_a_paused_pipeline_stands_and_has_the_bits_of_one_that_was_not(kills, at, seed, clips):
    """Stages and hubs die before the pause, while all stand, and after it. A pause holds gradients
    back; a job whose last ones had passed before it ends."""
    room = room_of(TERMS, [6, 5, 3, 1], seed, clips=clips)
    early = dict(kills)
    while room.turns < at and not room.relay.finished:
        room.go_on(early)
    if (answer := room.tell("pause")).get("error"):
        why = "the job is over" if room.relay.finished else "training has not begun"
        assert answer["error"] == f"pause: {why}"
        return
    assert answer["course"] == "paused"
    most = room.relay.committed + TERMS.save_every
    late = {room.turns + i: who for i, who in enumerate(kills.values())}
    room.run(late, paused=True)
    assert room.relay.committed <= most, "no more than what was under way"
    if room.relay.finished:
        assert room.tell("pause")["error"] == "pause: the job is over"
        assert_trained(room)
        return
    assert room.tell("pause")["round"] == room.relay.committed
    assert room.tell("resume")["course"] == ""
    room.run({room.turns + turn: who for turn, who in kills.items()})
    assert_trained(room)


def test_orders_that_a_pipeline_does_not_take_are_refused_by_name():
    room = room_of(TERMS, [6, 5, 3, 1], 1)
    assert "pause: training has not begun" in room.tell("pause")["error"]
    while not any(note.event == "started" for note in room.notes):
        room.turn()
    stop = room.tell("stop")
    assert "stop: a stage of a pipeline has a part of the model alone" in stop["error"]
    assert "--resume goes on" in stop["hint"]
    assert room.tell("remove", "m9")["error"] == "no member 'm9' is in"
    assert "takes no such order" in room.tell("hubs", "add", "tcp://c:1")["error"]
    assert room.tell("resume") == {"course": "", "round": 0, "members": ["m0", "m1", "m2", "m3"]}


def test_a_stage_that_is_removed_leaves_its_place_to_another_machine():
    keys = [owned(bytes([key]) * 32, b"") for key in range(5)]
    relay = Relay(TERMS)
    for stage in range(4):
        relay.handle(keys[stage], join_of(stage))
    answers = []
    effects = relay.obey(Order(("remove", "m2"), answers.append))
    assert refused(effects).startswith("removed:")
    (answered,) = [each for each in effects if isinstance(each, Answered)]
    assert answered.told["members"] == ["m0", "m1", "m3"]
    assert relay.handle(keys[0], Activation(1, 0, 0, False, 0.0, b"12345678")) == []
    assert Note("joined", "m2", "stage 2") in relay.handle(keys[4], join_of(2))
    assert relay.generation == 2


@pytest.mark.parametrize("at", range(20))
def test_a_hub_killed_at_twenty_instants_goes_on_from_the_last_states(at):
    whole = room_of(TERMS, [6, 5, 3, 1], at)
    whole.run()
    room = room_of(TERMS, [6, 5, 3, 1], at)
    room.run({(at + 1) * whole.turns // 21: HUB})
    assert_trained(room)


def test_a_hub_that_is_restored_after_the_last_step_hands_the_states_out():
    room = room_of(TERMS, [6, 5, 3, 1], 1)
    while not room.relay.finished:
        room.turn()
    for queue in room.down.values():
        queue.clear()
    room.kill_hub()
    room.run()
    assert_trained(room)


def test_states_are_evaluated_as_often_as_the_job_says():
    room = room_of(TERMS, [6, 5, 3, 1], 1)
    room.run()
    assert {each.step for each in room.figures} == {4, 5}


def test_a_journal_of_another_job_is_refused():
    room = room_of(TERMS, [6, 5, 3, 1], 1)
    room.run()
    with pytest.raises(ConfigError, match="is of the job job, and this one is other"):
        Relay(dataclasses.replace(TERMS, job="other")).restore(room.relay.state())


def test_a_hub_whose_job_is_over_waits_for_all_to_hear_it():
    room = room_of(TERMS, [6, 5, 3, 1], 1)
    room.run()
    relay = room.relay
    assert not relay.is_over
    for sender in room.senders[1:]:
        relay.handle(sender, Leave("done"))
    assert not relay.is_over
    relay.unreachable(room.senders[0])
    for second in range(100, 150):
        relay.tick(float(second))
    assert not relay.is_over
    first = relay.handle(b"new", join_of(0, generation=1))
    assert [type(e.message) for e in first[1:3]] == [StageBegin, StageState]
    assert refused(first) == "ended: the job is over"
    relay.unreachable(b"new")
    for second in range(150, 220):
        relay.tick(float(second))
    assert relay.is_over


@pytest.mark.parametrize("at", range(20))
def test_a_stage_killed_at_twenty_instants(at):
    whole = room_of(TERMS, [6, 5, 3, 1], at)
    whole.run()
    room = room_of(TERMS, [6, 5, 3, 1], at)
    room.run({(at + 1) * whole.turns // 21: at % 4})
    assert_trained(room)
    assert room.relay.generation > 1, "nothing was lost"


def test_the_window_is_as_wide_as_the_link_is_long():
    assert [window_of(s, 4, 64, 0.0, 0.01) for s in range(4)] == [4, 3, 2, 1]
    assert [window_of(s, 4, 64, 0.1, 0.05) for s in range(4)] == [16, 11, 6, 1]
    assert [window_of(s, 4, 8, 0.1, 0.01) for s in range(4)] == [8, 8, 8, 1]


# -- refusals --------------------------------------------------------------------------------------


def running(terms: RelayTerms = TERMS) -> Relay:
    relay = Relay(terms)
    for stage in range(terms.stages):
        relay.handle(b"%d" % stage, join_of(stage))
    return relay


def refused(effects: list) -> str:
    """The code and the reason of the one refusal among these."""
    (found,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Refuse)]
    return f"{found.code}: {found.reason}"


def test_who_may_join():
    relay = Relay(TERMS)
    assert refused(relay.handle(b"x", join_of(0, job="other"))).startswith("job:")
    assert refused(relay.handle(b"x", dataclasses.replace(join_of(0), protocol=3))).startswith(
        "protocol:"
    )
    assert "m0, m1, m2, m3" in refused(relay.handle(b"x", join_of(7)))
    assert relay.handle(b"0", join_of(0)) == [Note("joined", "m0", "stage 0")]
    assert refused(relay.handle(b"x", join_of(0))).startswith("name:")
    assert refused(relay.handle(b"1", join_of(1, microbatches=5))).startswith("model:")
    assert refused(relay.handle(b"1", join_of(1, generation=1 << 63))).startswith("session:")
    assert refused(relay.handle(b"1", join_of(1, model="other"))).startswith("model:")
    assert refused(relay.handle(b"?", Activation(1, 0, 0, False, 0.0, b""))).startswith("unknown:")


def test_what_is_too_large_and_who_comes_with_another_key():
    small = Relay(dataclasses.replace(TERMS, most_elements=9))
    assert refused(small.handle(b"0", join_of(0))) == "large: 10 parameters; there is memory for 9"
    first, other = (owned(bytes([key]) * 32, b"") for key in range(2))
    relay = Relay(TERMS)
    relay.handle(first, join_of(0))
    relay.unreachable(first)
    assert refused(relay.handle(other, join_of(0))).startswith("taken:")
    assert relay.handle(first, join_of(0)) == [Note("joined", "m0", "stage 0")]


@pytest.mark.parametrize(
    ("stage", "message", "code"),
    [
        (0, Activation(1, 0, 1, False, 0.0, b"12345678"), "order: the activation of micro-batch 1"),
        (0, Activation(1, 1, 0, False, 0.0, b"12345678"), "order: the activation"),
        (0, Activation(1, 0, 0, True, 0.0, b"12345678"), "order: stage 0"),
        (3, Activation(1, 0, 0, False, 0.0, b"12345678"), "order: stage 3"),
        (1, Activation(1, 0, 0, True, 0.0, b"12345678"), "order: the gradient"),
        (0, Activation(2, 0, 0, False, 0.0, b"12345678"), "order: stage 0"),
        (0, Activation(1, 0, 0, False, 0.0, b"123456789"), "size: 9 bytes"),
        (0, StageState(1, 1, 0, 1, b""), "order: part 0"),
        (0, StageState(1, 2, 1, 2, b""), "order: part 1"),
        (0, StageState(1, 2, 0, 1, bytes((1 << 20) + 321)), "size: a state"),
        (0, Contribute(0, 0, 1, 1.0, 0, 0, 0, b"", 1.0, 0), "order: Contribute"),
    ],
)
def test_the_hub_refuses_what_no_stage_sends(stage, message, code):
    relay = running()
    assert refused(relay.handle(b"%d" % stage, message)).startswith(code)
    assert refused(relay.handle(b"%d" % stage, message)).startswith("unknown:")


def test_activations_of_another_shape_are_refused_by_their_bytes():
    relay = running()
    (sent,) = relay.handle(b"0", Activation(1, 0, 0, False, 0.0, b"1234"))
    assert sent == Send(b"1", Activation(1, 0, 0, False, 0.0, b"1234"))
    assert refused(relay.handle(b"0", Activation(1, 0, 1, False, 0.0, b"12"))).startswith("size:")


def test_what_was_on_its_way_when_a_stage_died_no_longer_counts():
    relay = running()
    relay.unreachable(b"2")
    assert relay.handle(b"0", Activation(1, 0, 0, False, 0.0, b"1234")) == []
    relay.handle(b"new", join_of(2))
    assert relay.generation == 2
    assert relay.handle(b"0", Activation(1, 0, 0, False, 0.0, b"1234")) == []


def test_a_stage_refuses_what_no_hub_sends():
    desk = StageDesk(1, 4, 6, 5, 2, 4, Sums(1, 4))
    with pytest.raises(BadMessage, match="stage 1 of 3"):
        desk.handle(StageBegin(1, 1, 3, 0, 0))
    with pytest.raises(BadMessage, match="this is stage 1 of 4"):
        desk.handle(StageBegin(1, 2, 4, 0, 0))
    desk.handle(StageBegin(1, 1, 4, 0, 0))
    with pytest.raises(BadMessage, match="micro-batch 0 of step 3 in step 0"):
        desk.handle(Activation(1, 3, 0, False, 0.0, b""))
    with pytest.raises(BadMessage, match="not announced"):
        desk.handle(StageState(1, 2, 0, 1, b""))
    with pytest.raises(BadMessage, match="nothing is to be done"):
        desk.handle(StageBegin(1, 1, 4, 0, 1))
    with pytest.raises(Refused, match="over"):
        desk.handle(Refuse("ended", "it is over"))


SMALL = st.integers(0, 6)
ANYTHING = st.one_of(
    st.builds(
        Activation, st.integers(1, 3), SMALL, SMALL, st.booleans(), st.just(0.0),
        st.binary(max_size=9),
    ),
    st.builds(StageState, st.integers(1, 3), st.integers(1, 6), SMALL, st.integers(1, 6),
              st.binary(max_size=9)),
    st.builds(StageBegin, st.integers(1, 3), SMALL, st.integers(1, 6), SMALL, SMALL),
    st.builds(join_of, st.integers(0, 5)), st.just(Beat()), st.just(Leave("")),
    st.just(Refuse("full", "")),
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 4), ANYTHING), max_size=40))
def test_no_messages_break_the_hub(given):
    """Whatever members say: what is sent goes to members that are there, and nothing is raised."""
    relay = running()
    for sender, message in given:
        for effect in relay.handle(b"%d" % sender, message):
            assert not isinstance(effect, Send) or effect.to
    assert relay.committed <= TERMS.steps


@given(st.lists(ANYTHING, max_size=40))
def test_no_messages_break_a_stage(given):
    desk = StageDesk(1, 4, 6, 5, 2, 4, Sums(1, 4))
    for message in given:
        try:
            desk.handle(message)
            desk.work()
        except (BadMessage, Refused):
            return
