"""Fixed tensors that the first member hands out: the hub passes bytes on, and keeps them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hub_desk import ZEROS, Desk, back, raw, refusal, the
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import BadMessage, Diverged
from edgetrain.exchange.hub.records import decode, encode
from edgetrain.exchange.member.beginning import Beginning
from edgetrain.exchange.messages import Base, Fixed, Leave, Start, Welcome
from edgetrain.vectors import blob

BLOB = np.full(3, np.nan, np.float32).tobytes()
"""What no base may hold: these bytes are nobody's business."""
OTHER = "0" * 64
FIRST = {"fixed_bytes": len(BLOB), "fixed": OTHER}


class Tensors:
    """Fixed tensors that are bytes."""

    def __init__(self, values):
        self.values = bytes(values)

    @property
    def size(self):
        return len(self.values)

    @property
    def digest(self):
        return blob.blob_digest([self.values])

    def read(self):
        return bytearray(self.values)

    def write(self, values):
        self.values = bytes(values)


DIGEST = blob.blob_digest([BLOB])


def begun(**policy):
    """A hub whose members a and b have begun, from what a gave."""
    desk = Desk(2, **policy)
    desk.join("a", session=1, **FIRST)
    desk.join("b", session=7, **FIRST)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    assert not desk.hub.started, "the fixed tensors belong to it"
    return desk, desk.tell("a", Fixed(0, 1, BLOB))


def sent(messages):
    return b"".join(bytes(each.payload) for each in messages if isinstance(each, Fixed))


def restored(desk):
    """Another hub, from the snapshot of this one, as the journal writes it."""
    header, payloads = encode(desk.hub.state())
    state = decode(header, b"".join(bytes(payload) for payload in payloads))
    again = Desk(2)
    again.hub.restore(state, [], 0.0)
    return again


def test_all_members_get_the_bytes_before_they_start():
    desk, said = begun()
    assert desk.hub.started
    assert sent(said["b"]) == BLOB
    assert [type(each) for each in said["b"]][-2:] == [Fixed, Start]
    assert the(Start, said["a"]).fixed == the(Start, said["b"]).fixed == DIGEST


def test_late_members_get_them_and_nobody_gets_what_it_has():
    desk, _ = begun()
    desk.tell("b", Leave("done"))
    assert sent(desk.join("c", **FIRST)["c"]) == BLOB
    desk.tell("c", Leave("done"))
    said = desk.join("d", fixed_bytes=len(BLOB), fixed=DIGEST)["d"]
    assert sent(said) == b""
    assert the(Start, said).fixed == DIGEST


def test_a_restored_hub_hands_them_out_to_newcomers_and_to_those_that_are_back():
    desk = restored(begun()[0])
    assert desk.hub.membership.fixed.digest == DIGEST
    assert sent(back(desk, "z", submitted=0, fixed=OTHER)["z"]) == BLOB
    assert sent(back(desk, "z", submitted=0, fixed=DIGEST)["z"]) == b""
    desk.tell("z", Leave("done"))
    assert sent(desk.join("c", **FIRST)["c"]) == BLOB
    assert restored(desk).hub.membership.fixed.digest == DIGEST, "also of a restored one"


def test_if_the_first_member_goes_before_all_is_here_the_second_one_offers():
    desk = Desk(2)
    desk.join("a", **FIRST)
    desk.join("b", **FIRST)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    assert the(Welcome, desk.tell("a", Leave("done"))["b"]).upload
    desk.join("c", **FIRST)
    own = bytes(len(BLOB))
    desk.tell("b", Base(0, 1, raw(ZEROS)))
    said = desk.tell("b", Fixed(0, 1, own))
    assert desk.hub.started
    assert sent(said["c"]) == own


def test_base_and_bytes_together_are_bounded_before_they_are_asked_for():
    desk = Desk(2, most_elements=1_000_000)
    said = desk.join("a", fixed_bytes=4_000_000, fixed=OTHER)
    code, reason = refusal(desk, said, "a")
    assert code == "large"
    assert "4 MB of fixed tensors; this hub takes 4 MB: hub.max_model_mb" in reason
    assert the(Welcome, desk.join("a", fixed_bytes=4_000_000 - 20, fixed=OTHER)["a"]).upload


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Fixed(0, 1, BLOB + b"x"), "size"),
        (Fixed(0, 2, BLOB), "size"),
        (Fixed(1, 2, BLOB), "order"),
        (Base(1, 2, raw(ZEROS)), "size"),
    ],
)
def test_bytes_that_were_not_told_of_are_refused(message, code):
    desk = Desk(1)
    desk.join("a", **FIRST)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    assert refusal(desk, desk.tell("a", message), "a")[0] == code


def test_nobody_hands_out_bytes_that_were_not_asked_for():
    desk, _ = begun()
    assert refusal(desk, desk.tell("b", Fixed(0, 1, BLOB)), "b")[0] == "order"
    desk = Desk(1)
    desk.join("a")
    assert refusal(desk, desk.tell("a", Fixed(0, 1, BLOB)), "a")[0] == "order"


def test_members_that_compare_and_that_take_over_are_not_mixed():
    desk, _ = begun()
    code, reason = refusal(desk, desk.join("c"), "c")
    assert code == "model"
    assert "one takes the first member's values (frozen = 'first'), one does not" in reason


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blob, "BLOB_PART_BYTES", 16)
        yield


@given(st.binary(min_size=1, max_size=100), st.data())
def test_every_blob_reaches_every_member_bit_for_bit(values, data):
    """From a member, through the hub, its journal and a restart, to another member."""
    first, last = Tensors(values), Tensors(bytes(len(values)))
    assert b"".join(map(bytes, blob.blob_parts(values))) == values
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    pieces = [values[a:b] for a, b in pairwise([0, *cuts, len(values)])]
    assert blob.blob_digest(pieces) == first.digest
    desk = Desk(2)
    for name, tensors in (("a", first), ("b", last)):
        desk.join(name, fixed_bytes=tensors.size, fixed=tensors.digest)
    for message in Beginning(ZEROS, first, first.digest).messages():
        said = desk.tell("a", message)
    take(last, said["b"])
    assert last.values == values
    late = Tensors(bytes(len(values)))
    again = restored(desk)
    for member in [*again.hub.members][1:]:
        again.take(again.hub.membership.remove(member, "left", ""))
    take(late, again.join("c", fixed_bytes=late.size, fixed=late.digest)["c"])
    assert late.values == values


def take(tensors, messages):
    beginning = Beginning(ZEROS.copy(), tensors, tensors.digest)
    for message in messages:
        if isinstance(message, Base | Fixed):
            beginning.accept_part(message)
        elif isinstance(message, Start):
            beginning.finish(message.fixed)


@pytest.mark.parametrize("spoilt", ["flip", "lost", "none"])
def test_a_member_takes_over_no_bytes_that_have_another_digest(spoilt):
    own = Tensors(bytes(40))
    beginning = Beginning(ZEROS.copy(), own, own.digest)
    values = bytes(range(40))
    parts = [Fixed(i, 3, part) for i, part in enumerate(blob.blob_parts(values))]
    if spoilt == "flip":
        parts[1] = Fixed(1, 3, b"x" * 16)
    for part in {"flip": parts, "lost": parts[:2], "none": []}[spoilt]:
        beginning.accept_part(part)
    with pytest.raises(Diverged, match="damaged"):
        beginning.finish(blob.blob_digest([values]))
    assert own.values == bytes(40), "nothing of it"


@pytest.mark.parametrize("part", [Fixed(0, 1 << 32, b""), Fixed(1, 3, bytes(16)), Fixed(0, 3, b"")])
def test_a_hub_cannot_send_more_than_the_model_has(part):
    own = Tensors(bytes(40))
    with pytest.raises(BadMessage, match="of 40 bytes"):
        Beginning(ZEROS.copy(), own, own.digest).accept_part(part)
    with pytest.raises(BadMessage, match="of 0 bytes"):
        Beginning(ZEROS.copy(), None, "").accept_part(part)


def test_an_answer_that_broke_off_leaves_nothing():
    own, values = Tensors(bytes(40)), bytes(range(40))
    beginning = Beginning(ZEROS.copy(), own, own.digest)
    parts = [Fixed(i, 3, part) for i, part in enumerate(blob.blob_parts(values))]
    beginning.accept_part(parts[0])
    beginning.restart()
    for part in parts:
        beginning.accept_part(part)
    assert beginning.finish(blob.blob_digest([values])) == own.digest
    assert own.values == values
