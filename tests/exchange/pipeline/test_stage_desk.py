"""Stages and their hub, with integers in place of tensors: the order of gradients, the window, what
becomes of a stage that dies, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.pipeline_room import PipelineRoom, join_of
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import BadMessage, Refused
from edgetrain.exchange.hub.effects import Note, Send
from edgetrain.exchange.messages import (
    Activation,
    Beat,
    Contribute,
    Leave,
    Refuse,
    StageBegin,
    StageState,
)
from edgetrain.exchange.pipeline.desk import StageDesk, window_of
from edgetrain.exchange.pipeline.relay import Relay, RelayTerms

TERMS = RelayTerms("job", 4, 6, 5, 2, 8, 1 << 20)


class Sums:
    """A stage that adds its number to what it is given. Its parameter is a history: which gradient
    of which step came in which order, so that any other order or step shows."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.last = stage, stages - 1
        self.history, self.seen = b"", b""

    def forward(self, step, micro, given):
        value = int.from_bytes(given, "big") if given is not None else 1000 * step + micro
        self.step = step
        return None if self.stage == self.last else (value + 1).to_bytes(8, "big")

    def backward(self, micro, given):
        value = int.from_bytes(given, "big") if given is not None else 7 * micro + 1
        self.seen += b"%d/%d " % (micro, value)
        passed = None if self.stage == 0 else (value + 1).to_bytes(8, "big")
        return passed, float(micro) if self.stage == self.last else 0.0

    def finish(self, step, loss):
        self.history += b"%d %g: %s\n" % (step, loss, self.seen)
        self.seen = b""

    def state(self):
        return self.history

    def begin(self, step, state):
        self.history, self.seen = state, b""
        if state.count(b"\n") != step:
            raise BadMessage("another state")


def expected(stage: int, terms: RelayTerms) -> bytes:
    """What the history is in the end."""
    hops, micros = terms.stages - 1 - stage, range(terms.microbatches)
    seen = b"".join(b"%d/%d " % (m, 7 * m + 1 + hops) for m in micros)
    return b"".join(b"%d %g: %s\n" % (s, sum(micros), seen) for s in range(terms.steps))


def room_of(terms: RelayTerms, windows: list[int], seed: int) -> PipelineRoom:
    return PipelineRoom(terms, lambda stage: Sums(stage, terms.stages), windows, seed)


@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.integers(1, 6),
    st.integers(0, 8), st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_gradients_are_added_in_order_whatever_the_network_does(
    stages, micros, steps, every, wider, seed
):
    terms = RelayTerms("job", stages, micros, steps, every, 8, 1 << 20)
    windows = [min(micros, stages - stage + wider) for stage in range(stages)]
    room = room_of(terms, windows, seed)
    room.run()
    assert room.relay.states == tuple(expected(stage, terms) for stage in range(stages))
    assert all(most <= window for most, window in zip(room.most_out, windows, strict=True))


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_all_states_of_a_step_are_there_before_the_next_ones_begin(
    stages, micros, every, size, seed
):
    terms = RelayTerms("job", stages, micros, 6, every, 8, 1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgetrain.exchange.pipeline.desk.PART_BYTES", size)
        patch.setattr("edgetrain.exchange.pipeline.relay.PART_BYTES", size)
        room = room_of(terms, [micros] * stages, seed)
        room.run()
    assert room.commits == sorted({0, *range(every, 7, every), 6})


@given(st.dictionaries(st.integers(1, 900), st.integers(0, 3), max_size=6), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_stages_that_die_go_on_with_the_same_bits(kills, seed):
    room = room_of(TERMS, [6, 5, 3, 1], seed)
    room.run(dict(kills))
    assert room.relay.states == tuple(expected(stage, TERMS) for stage in range(4))


@pytest.mark.parametrize("at", range(20))
def test_a_stage_killed_at_twenty_instants(at):
    whole = room_of(TERMS, [6, 5, 3, 1], at)
    whole.run()
    room = room_of(TERMS, [6, 5, 3, 1], at)
    room.run({(at + 1) * whole.turns // 21: at % 4})
    assert room.relay.states == tuple(expected(stage, TERMS) for stage in range(4))
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
    assert refused(relay.handle(b"1", join_of(1, model="other"))).startswith("model:")
    assert refused(relay.handle(b"?", Activation(1, 0, 0, False, 0.0, b""))).startswith("unknown:")


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
        (0, StageState(1, 2, 0, 1, bytes((1 << 20) + 1)), "size: a state"),
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
