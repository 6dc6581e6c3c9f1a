"""The laws of secure aggregation, on the pure sides alone: sums are exact whoever drops out, and
nobody is asked for, or gives, what shows a single contribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from secure_room import PATIENCE_S, Room, vector

from edgetrain.errors import BadMessage, ConfigError, Diverged, EdgetrainError
from edgetrain.exchange.further_messages import KeyList, Rekey, Reveal, Shares, Unmask
from edgetrain.exchange.masks import primitives
from edgetrain.exchange.masks.fixed_point import LARGEST, FixedPoint
from edgetrain.exchange.masks.masker import Masker, pair_key
from edgetrain.exchange.masks.payloads import (
    read_table,
    round_context,
    shares_bytes,
    write_table,
)
from edgetrain.exchange.masks.terms import MaskTerms, default_threshold, why_not

PHASES = ("advertise", "share", "contribute", "unmask")


# -- fixed point numbers --------------------------------------------------------------------------


@given(
    st.integers(1, 2000),
    st.floats(2**-20, 2**20),
    st.lists(st.floats(-2.0, 2.0, width=32), min_size=1, max_size=30),
    st.floats(0.001, 1.0),
)
@example(775, 173184.1875, [2.0], 1.0)
@example(775, 173184.1875, [-2.0], 0.1)
@example(1, 0.1, [2.0], 1.0)
@example(3, 2**20 / 3, [2.0], 1.0)
def test_numbers_within_the_range_come_back_within_half_a_step(members, clip_range, shares, factor):
    fixed = FixedPoint(clip_range, members)
    inside = np.array([share * clip_range / 2 for share in shares], np.float32)
    words = np.empty(inside.size, np.uint32)
    assert fixed.encode(inside, words, factor) == 0
    back = np.empty_like(inside)
    fixed.decode(words, factor, back)
    rounding = np.abs(inside) * 2.0**-23
    assert (np.abs(back.astype(float) - inside) <= fixed.error(1, factor) + rounding).all()


@given(st.integers(1, 2**20), st.floats(2**-20, 2**20))
def test_no_sum_overflows(members, clip_range):
    fixed = FixedPoint(clip_range, members)
    words = np.empty(2, np.uint32)
    far = np.array([3e38, -3e38], np.float32)
    assert fixed.encode(far, words) == 2
    largest = int(words.view(np.int32)[0])
    assert words.view(np.int32)[1] == -largest
    assert largest * members <= LARGEST
    assert abs(largest / fixed.scale - clip_range) <= 1 / fixed.scale
    assert 4 * largest * members >= LARGEST // 2, "a bit is wasted"


def test_what_is_not_a_number_is_not_sent():
    words = np.empty(1, np.uint32)
    with pytest.raises(Diverged):
        FixedPoint(8.0, 2).encode(np.array([np.nan], np.float32), words)


@pytest.mark.parametrize(("clip_range", "members"), [(0.0, 2), (1e9, 2), (1.0, 0)])
def test_a_range_that_cannot_be(clip_range, members):
    with pytest.raises(ConfigError, match="allowed"):
        FixedPoint(clip_range, members)


# -- sums -----------------------------------------------------------------------------------------


@st.composite
def happenings(draw):
    """Members, a threshold, weights, and in which phase each of those who drop out does so."""
    members = draw(st.integers(2, 6))
    threshold = draw(st.integers(members // 2 + 1, members))
    order = draw(st.permutations([f"m{i}" for i in range(members)]))
    droppers = order[: draw(st.integers(0, members - threshold))]
    phases = {name: draw(st.sampled_from(PHASES)) for name in droppers}
    weights = {f"m{i}": draw(st.sampled_from([1.0, 0.5, 3.0, 1000.0])) for i in range(members)}
    return members, threshold, phases, weights


def run(members, threshold, phases, weights=None, seed=0):
    """One round; the room, the vectors that counted, and what became of them."""
    room = Room(members, threshold)
    room.weights = weights or room.weights
    when = {phase: [n for n, p in phases.items() if p == phase] for phase in PHASES}
    room.set_up(advertise=when["advertise"], share=when["share"])
    room.gone |= set(when["contribute"])
    vectors = {name: vector((name, seed)) for name in room.able(0)}
    for name, mine in vectors.items():
        room.give(name, 0, mine)
    return room, vectors, room.unmask(0, when["unmask"])


@given(happenings())
def test_the_sum_is_exact_whoever_drops_out_in_whatever_phase(happening):
    room, vectors, end = run(*happening)
    assert end is not None
    assert end.vector is not None, end.reason
    assert end.vector.tobytes() == room.expected(vectors).tobytes()
    weight = sum(room.weights[n] for n in vectors)
    exact = sum(room.weights[n] * v.astype(float) for n, v in vectors.items()) / weight
    unit = max(room.weights[n] for n in room.hub.blocks[-1].names)
    fixed = FixedPoint(8.0, room.terms.members)
    bound = fixed.error(len(vectors), weight / unit) + np.abs(exact) * 2.0**-23
    assert (np.abs(end.vector - exact) <= bound).all()


@pytest.mark.parametrize("phase", PHASES)
def test_three_of_ten_drop_out(phase):
    room, vectors, end = run(10, default_threshold(10), dict.fromkeys(["m1", "m4", "m9"], phase))
    assert len(vectors) == (10 if phase == "unmask" else 7)
    assert end.vector.tobytes() == room.expected(vectors).tobytes()


def test_three_of_ten_each_in_another_phase():
    phases = dict(zip(["m0", "m5", "m8"], PHASES[1:], strict=True))
    room, vectors, end = run(10, 7, phases)
    assert set(vectors) == set(room.maskers) - {"m0", "m5"}
    assert end.vector.tobytes() == room.expected(vectors).tobytes()


def test_every_round_of_a_block_has_masks_of_its_own():
    room = Room(3, 3)
    room.set_up(rounds=3)
    same = vector("same")
    seen = [room.give("m0", round, same).tobytes() for round in range(3)]
    assert len({*seen}) == 3
    for round in (2, 0, 1):
        for name in ("m1", "m2"):
            if round == 2:
                for each in range(3):
                    room.give(name, each, vector((name, each)))
        end = room.unmask(round)
        given = {"m0": same, **{n: vector((n, round)) for n in ("m1", "m2")}}
        assert end.vector.tobytes() == room.expected(given).tobytes()


# -- too few --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_with_one_too_many_gone_the_round_is_given_up_and_nothing_is_told(phase):
    room, _, end = run(4, 3, dict.fromkeys(["m1", "m3"], phase))
    if phase in ("advertise", "share"):
        assert room.hub.contributors(0) is None
        room.now += PATIENCE_S
        room.deliver(room.step())
        assert not room.hub.blocks, "it is begun again once enough members are there"
        assert room.hub.remarks == [
            "2 of at least 3 members made keys for rounds 0 to 1: they are asked again"
        ]
    elif phase == "unmask":
        assert end is None
        room.now += PATIENCE_S
        end = room.hub.unmask_round(0, PATIENCE_S, room.now)
        assert end.reason == "2 of at least 3 members helped to unmask it"
    if phase != "unmask":
        assert end.reason in ("2 of at least 3 members contributed to it",
                              "0 of at least 3 members contributed to it")  # fmt: skip
        assert not room.asked
    assert end.vector is None
    assert not room.hub.open_sums[0].total.size


def test_a_set_up_waits_for_those_who_are_there_and_no_longer():
    room = Room(4, 3)
    asked = room.hub.begin_block(room.weights, 0, 2, 0.0)
    room.deliver([each for each in asked if each[0] != "m2"])
    assert not room.step()
    room.now = PATIENCE_S
    room.deliver(room.step())
    room.deliver(room.step())
    assert room.hub.contributors(0) == {"m0", "m1", "m3"}
    room.deliver([("m2", asked[2][1])])  # too late: it has no part in this block
    assert room.hub.contributors(0) == {"m0", "m1", "m3"}
    assert room.maskers["m2"].state(0) == "soon"


# -- what nobody may see --------------------------------------------------------------------------


@given(happenings())
def test_of_no_member_both_kinds_of_share_are_asked_for(happening):
    room, vectors, end = run(*happening)
    requests = {(m.block, m.round): set() for _, m in room.asked}
    for _, message in room.asked:
        requests[message.block, message.round].add(bytes(message.payload))
    assert all(len(flags) == 1 for flags in requests.values())
    names = room.hub.blocks[-1].names
    for (_, _), (flags,) in requests.items():
        assert {names[i] for i, flag in enumerate(flags) if flag} == set(vectors)
    assert end is not None


def test_a_member_gives_one_kind_of_share_and_then_no_other():
    room = Room(5, 3)
    room.set_up()
    for name in room.maskers:
        room.give(name, 0, vector(name))
    block = room.hub.blocks[-1].number
    honest = Unmask(block, 0, bytes([1, 1, 1, 1, 0]))
    given = room.maskers["m0"].answer_hub(honest)
    assert isinstance(given, Reveal)
    assert room.maskers["m0"].answer_hub(honest) == given, "the same again is no more than before"
    with pytest.raises(EdgetrainError, match="a second time, for other members"):
        room.maskers["m0"].answer_hub(Unmask(block, 0, bytes([1, 1, 1, 1, 1])))


@pytest.mark.parametrize("flags", [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
def test_a_member_helps_to_unmask_no_sum_of_too_few_or_of_strangers(flags):
    room = Room(5, 3)
    room.set_up(share=["m4"])
    block = room.hub.blocks[-1].number
    with pytest.raises(EdgetrainError, match="agreed are at least 3"):
        room.maskers["m0"].answer_hub(Unmask(block, 0, bytes(flags)))


def test_a_round_is_masked_once_whatever_the_hub_says():
    room = Room(3, 2)
    room.set_up()
    room.give("m0", 0, vector("m0"))
    assert room.maskers["m0"].state(0) == "out"
    room.hub.start_masks(0)
    room.hub.begin_block({}, 0, 2, room.now)  # nobody answers: its rounds get another block
    room.deliver(room.step())
    room.set_up()
    assert room.hub.contributors(0) == set(room.maskers)
    with pytest.raises(EdgetrainError, match=r"cannot be masked \(again\)"):
        room.give("m0", 0, vector("m0"))


def test_a_late_contribution_stays_hidden_by_the_mask_of_its_own():
    """What the hub has learnt of a member it took for gone takes off all masks but one."""
    room = Room(4, 3)
    room.set_up()
    late = room.maskers["m3"]
    own_seed = late.blocks[0].own[0]
    masked = np.empty(room.elements, np.uint32)
    given = {name: vector(name) for name in ("m0", "m1", "m2")}
    for name, mine in given.items():
        room.give(name, 0, mine)
    room.deliver(room.hub.close_round(0, room.now), ["m3"])
    reveals = dict(room.hub.open_sums[0].reveals)
    hub_knows = {
        place: primitives.combine({holder: table[place] for holder, table in reveals.items()})
        for place in range(4)
    }
    end = room.hub.unmask_round(0, PATIENCE_S, room.now)
    assert end.vector.tobytes() == room.expected(given).tobytes()
    late.mask(0, vector("m3"), 1.0, masked)

    block = room.hub.blocks[-1]
    for other in range(3):
        key = pair_key(hub_knows[3], block.number, 0, block.row(other, 0)[0], block.digest)
        primitives.add_mask(key, 1 if other < 3 else -1, masked)
    plain = np.empty_like(masked)
    FixedPoint(8.0, 4).encode(vector("m3"), plain)
    assert masked.tobytes() != plain.tobytes()
    context = round_context(block.number, 0) + block.digest
    primitives.add_mask(primitives.own_key(own_seed, context), -1, masked)
    assert masked.tobytes() == plain.tobytes(), "nothing but its own mask hid it"
    assert own_seed not in hub_knows.values()


def test_a_member_that_knows_it_was_left_out_sends_nothing():
    room = Room(4, 3)
    room.set_up()
    for name in ("m0", "m1", "m2"):
        room.give(name, 0, vector(name))
    room.unmask(0)
    assert room.maskers["m3"].state(0) == "out"
    assert room.maskers["m3"].state(1) == "ready"


def test_nothing_that_goes_through_the_hub_holds_a_secret():
    room = Room(4, 3)
    room.deliver(room.hub.begin_block(room.weights, 0, 2, 0.0))
    secrets = []
    for masker in room.maskers.values():
        (block,) = masker.blocks.values()
        secrets += [*block.own.values(), *block.keys.values(), block.seal_seed]
    for _ in range(2):
        room.deliver(room.step())
    heard = b"".join(room.said)
    assert len(secrets) == 20
    assert not any(secret in heard for secret in secrets)
    shares = [
        share
        for masker in room.maskers.values()
        for held in masker.blocks[0].held.values()
        for pair in held.values()
        for share in (pair.own, pair.key)
    ]
    assert not any(share in heard for share in shares)


def test_secrets_are_forgotten_once_they_are_used():
    room = Room(3, 2)
    room.set_up()
    masker = room.maskers["m0"]
    room.give("m0", 0, vector("m0"))
    (block,) = masker.blocks.values()
    assert set(block.own) == set(block.keys) == {1}
    for name in ("m1", "m2"):
        room.give(name, 0, vector(name))
    room.unmask(0)
    assert set(block.held) == {1}
    masker.forget_rounds(2)
    assert not masker.blocks


# -- hubs and members that do not keep to it ------------------------------------------------------


def keys_of(room, names, **other):
    """What the hub would send m0 of these members."""
    for name, message in room.hub.begin_block(room.weights, 0, 2, 0.0):
        room.hub.accept_message(name, room.maskers[name].answer_hub(message))
    adverts = [room.hub.blocks[-1].adverts[name] for name in names]
    fields = {"block": 0, "place": 0, "members": len(names), "unit": 1.0} | other
    return KeyList(**fields, payload=b"".join(adverts))


@pytest.mark.parametrize(
    ("names", "place", "reason"),
    [
        (["m0", "m1"], 0, "contributions of 2 members"),
        (["m1", "m2", "m3"], 0, "another key than this member's"),
        (["m0", "m1", "m1"], 0, "the same key"),
        (["m0", "m1", "m2"], 1, "another key"),
        (["m0", "m1", "m2"], 9, "another key"),
    ],
)
def test_a_list_of_keys_that_could_show_a_member_is_refused(names, place, reason):
    room = Room(4, 3)
    with pytest.raises(EdgetrainError, match=reason):
        room.maskers["m0"].answer_hub(keys_of(room, names, place=place))


def test_two_lists_of_keys_of_one_block_are_refused():
    room = Room(5, 3)
    told = keys_of(room, ["m0", "m1", "m2"])
    shares = room.maskers["m0"].answer_hub(told)
    assert room.maskers["m0"].answer_hub(told) == shares
    other = KeyList(0, 0, 3, 1.0, bytes(told.payload)[::-1])
    with pytest.raises(EdgetrainError, match="two lists of keys"):
        room.maskers["m0"].answer_hub(other)


@pytest.mark.parametrize("what", ["keys", "unit", "clip_range"])
def test_members_that_were_told_different_things_share_nothing(what):
    """Masks and shares are bound to all of it: a hub that tells it twice gets noise, no sum. With
    another unit or clip_range it could let the contributions of all but one vanish."""
    room = Room(4, 3)
    if what == "clip_range":
        room.maskers["m1"] = Masker(MaskTerms(4, 3, 2.0**20), room.elements)
    told = keys_of(room, ["m0", "m1", "m2"])
    first = told.payload
    second, unit = first, 1.0
    if what == "keys":
        second = bytes(first[: len(first) // 3 * 2]) + room.hub.blocks[-1].adverts["m3"]
    elif what == "unit":
        unit = 1e15
    a = room.maskers["m0"].answer_hub(told)
    room.maskers["m1"].answer_hub(KeyList(0, 1, 3, unit, second))
    size = shares_bytes(2)
    sealed = read_table(a.payload, 3, size, "")[1]
    rows = {0: sealed, 1: bytes(size), 2: bytes(size)}
    room.maskers["m1"].answer_hub(Shares(0, write_table(rows, 3, size)))
    held = room.maskers["m1"].blocks[0].held[0]
    assert set(held) == {1}, "only its own"
    keys = [
        pair_key(masker.blocks[0].keys[0], 0, 0, masker.blocks[0].public(other, 0),
                 masker.blocks[0].digest)
        for masker, other in ((room.maskers["m0"], 1), (room.maskers["m1"], 0))
    ]  # fmt: skip
    assert keys[0] != keys[1]


def test_shares_that_cannot_be_opened_cost_nobody_but_their_sender():
    room = Room(4, 3)
    room.deliver(room.hub.begin_block(room.weights, 0, 1, 0.0))
    outgoing = room.step()
    for name, message in outgoing:
        answer = room.maskers[name].answer_hub(message)
        if name == "m3":  # of all it says to m0 nothing can be read
            table = read_table(answer.payload, 4, shares_bytes(1), "")
            table[0] = bytes(shares_bytes(1))
            answer = Shares(0, write_table(table, 4, shares_bytes(1)))
        room.hub.accept_message(name, answer)
    room.deliver(room.step())
    vectors = {name: vector(name) for name in room.maskers}
    for name, mine in vectors.items():
        room.give(name, 0, mine)
    assert room.unmask(0).vector.tobytes() == room.expected(vectors).tobytes()


@pytest.mark.parametrize("liar", ["m0", "m2"])
def test_wrong_shares_are_noticed_and_the_round_is_given_up(liar):
    room = Room(3, 3)
    room.set_up()
    for name in room.maskers:
        room.give(name, 0, vector(name))
    for name, message in room.hub.close_round(0, 0.0):
        reveal = room.maskers[name].answer_hub(message)
        if name == liar:
            reveal = Reveal(0, 0, bytes(reveal.payload[:3]) + bytes(48))
        room.hub.accept_message(name, reveal)
    end = room.hub.unmask_round(0, PATIENCE_S, 0.0)
    assert end.vector is None
    assert "shares of m0's mask are wrong" in end.reason


@pytest.mark.parametrize(
    "message",
    [
        Rekey(0, 0, 1),
        Reveal(0, 0, b"short"),
        Reveal(0, 0, bytes([2, 0, 0]) + bytes(48)),
        KeyList(0, 0, 3, 1.0, b""),
    ],
)
def test_the_hub_tells_nonsense_from_answers(message):
    room = Room(3, 3)
    room.set_up()
    for name in room.maskers:
        room.give(name, 0, vector(name))
    room.hub.close_round(0, 0.0)
    with pytest.raises(BadMessage):
        room.hub.accept_message("m0", message)
    with pytest.raises(BadMessage):
        room.hub.accept_message("stranger", Reveal(0, 0, bytes(51)))


@pytest.mark.parametrize(
    "message",
    [KeyList(0, 0, 3, 1.0, b"x"), Shares(0, b""), Unmask(0, 0, b"\x01\x01\x02"), Unmask(0, 0, b"")],
)
def test_a_member_tells_nonsense_from_requests(message):
    room = Room(3, 3)
    room.deliver(room.hub.begin_block(room.weights, 0, 2, 0.0))
    outgoing = room.step()
    if not isinstance(message, KeyList):
        room.deliver(outgoing)
    if isinstance(message, Unmask):
        room.deliver(room.step())
    with pytest.raises(BadMessage):
        room.maskers["m0"].answer_hub(message)


def test_what_is_of_another_time_is_passed_over():
    masker = Masker(MaskTerms(3, 2, 8.0), 4)
    for message in (Rekey(1 << 32, 0, 4), KeyList(5, 0, 3, 1.0, b""), Shares(5, b""),
                    Unmask(5, 0, b"")):  # fmt: skip
        assert masker.answer_hub(message) is None
    masker.restart(1)
    assert masker.answer_hub(Rekey(1 << 32, 0, 4)) is not None
    assert masker.state(0) == "soon"


# -- what a job may say ---------------------------------------------------------------------------


@given(st.integers(2, 64))
def test_the_default_threshold_is_more_than_two_thirds(members):
    threshold = default_threshold(members)
    assert 3 * threshold > 2 * members
    assert not why_not(members, threshold)
    assert "more than half" in why_not(members, members // 2, honest_hub=True)
    assert "more than half" in why_not(members, members + 1, honest_hub=True)
    for below in range(members // 2 + 1, threshold):
        assert "honest_hub=true" in why_not(members, below)
        assert not why_not(members, below, honest_hub=True)


@pytest.mark.parametrize("members", [1, 65])
def test_too_few_or_too_many_members(members):
    assert "allowed are 2 to 64" in why_not(members, members)


def test_a_set_up_that_failed_is_tried_again_for_the_same_rounds():
    room = Room(4, 3)
    room.deliver(room.hub.begin_block(room.weights, 0, 2, 0.0))
    for name in ("m1", "m2"):
        room.hub.drop_secrets(name)  # they have started anew
        room.maskers[name] = Masker(room.terms, room.elements)
    assert room.hub.wants_block(0) is False
    room.deliver(room.step())
    assert room.hub.remarks == [
        "2 of at least 3 members made keys for rounds 0 to 1: they are asked again"
    ]
    assert room.hub.wants_block(0)
    room.set_up()
    vectors = {name: vector(name) for name in room.able(0)}
    assert len(vectors) == 4
    for name, mine in vectors.items():
        room.give(name, 0, mine)
    assert room.unmask(0).vector.tobytes() == room.expected(vectors).tobytes()


def test_rounds_that_are_over_do_not_hold_up_those_of_a_later_block():
    room = Room(4, 3)
    room.set_up(advertise=["m0"])
    room.now = PATIENCE_S
    for _ in range(2):
        room.deliver(room.step())
    assert room.hub.contributors(0) == {"m1", "m2", "m3"}
    assert room.maskers["m0"].state(0) == "soon", "it does not know"
    room.gone.clear()
    room.deliver(room.hub.begin_block(room.weights, 0, 2, room.now))
    for _ in range(2):
        room.deliver(room.step())
    assert [room.maskers["m0"].state(round) for round in range(5)] == [
        "out", "out", "ready", "ready", "soon",
    ]  # fmt: skip
    room.maskers["m0"].forget_rounds(3)
    assert room.maskers["m0"].state(2) == "out", "its reply is here"
