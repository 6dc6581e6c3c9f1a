"""Messages: what is packed comes back, and nothing but BadMessage leaves `unpack`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import string
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import BadMessage
from edgetrain.exchange import further_messages, messages
from edgetrain.exchange.further_messages import MOST_SLICES
from edgetrain.exchange.messages import (
    CODES,
    KINDS,
    MAX_CHECKSUM,
    MAX_COUNT,
    MAX_ELEMENTS,
    MAX_HEADER_BYTES,
    MAX_RANGES,
    MOST_FIGURE,
    MOST_OWN,
    Beat,
    Contribute,
    Join,
    Leave,
    Refuse,
    Start,
    pack,
    unpack,
)

WIRE = Path(__file__).parents[2] / "docs/reference/wire.md"


CLASSES = tuple(KINDS.values())


def _range(allowed: str) -> tuple[float, float]:
    low, high = re.fullmatch(r".* from (\S+) to (\S+)", allowed).groups()
    return float(low) if "float" in allowed else int(low), (
        float(high) if "float" in allowed else int(high)
    )


def valid(spec: dataclasses.Field) -> st.SearchStrategy:
    """Values of one field, from what it says itself is allowed."""
    if spec.name == "payload":
        return st.binary(max_size=64)
    allowed = spec.type.__metadata__[0].said
    if allowed == "true or false":
        return st.booleans()
    if "peers" in allowed:
        text = st.text(st.characters(exclude_categories=("C", "Z")), max_size=64)
        edges = st.tuples(st.integers(0, MAX_RANGES), st.integers(0, MAX_RANGES)).map(sorted)
        peer = st.tuples(text, text, text, edges).map(lambda p: (*p[:3], *p[3]))
        return st.lists(peer, max_size=4).map(tuple)
    if allowed.startswith("up to 16 integers"):
        return st.lists(st.integers(0, MOST_SLICES - 1), max_size=16).map(tuple)
    if f"{MOST_OWN} rows" in allowed:
        names = st.text(st.characters(exclude_categories=("C", "Z")), max_size=40)
        row = st.tuples(names, st.floats(-MOST_FIGURE, MOST_FIGURE), st.floats(0, MOST_FIGURE))
        return st.lists(row, max_size=4).map(tuple)
    if "weights" in allowed:
        names = st.text(st.characters(exclude_categories=("C", "Z")), max_size=64)
        weights = st.floats(0, 1e15, exclude_min=True)
        return st.lists(st.tuples(names, weights), max_size=4).map(tuple)
    if "text" in allowed:
        longest = int(re.search(r"\d+", allowed)[0])
        letters = st.characters(exclude_categories=("C", "Z"))
        return st.text(letters, max_size=longest) | st.just("\U0001f600" * longest)
    if "pairs" in allowed:
        names = st.text(st.characters(exclude_categories=("C", "Z")), max_size=64)
        pair = st.tuples(names, st.integers(0, MAX_COUNT))
        return st.lists(pair, max_size=4).map(tuple)
    low, high = _range(allowed)
    if "float" in allowed:
        return st.floats(low, high)
    return st.integers(low, high) | st.sampled_from([low, high])


def invalid(spec: dataclasses.Field) -> st.SearchStrategy:
    """Values that one field must refuse."""
    allowed = spec.type.__metadata__[0].said
    others = [st.none(), st.binary(max_size=3), st.lists(st.integers(), max_size=2)]
    if allowed == "true or false":
        return st.one_of(*others, st.integers(0, 1), st.just("true"))
    if "text" in allowed:
        longest = int(re.search(r"\d+", allowed)[0])
        bad = ["x" * (longest + 1), "new\nline", "nul\0", "esc\x1b[2J", "\ud800", "line\u2028"]
        return st.one_of(*others, st.sampled_from(bad), st.integers())
    if "peers" in allowed:
        bad = [
            ("m0", "", "", 0),
            ("m0", "", "", 2, 1),
            ("x" * 65, "", "", 0, 1),
            ("", 1, "", 0, 1),
            ("m0", "", "", 0, 1.0),
            ("m0", "\0", "", 0, 1),
            ("", "", "", 0, MAX_RANGES + 1),
        ]
        return st.sampled_from([(each,) for each in bad] + [None, 1, "m0"])
    if allowed.startswith("up to 16 integers"):
        return st.sampled_from([(-1,), (MOST_SLICES,), (1.0,), (True,), (0,) * 17, None, 1])
    if f"{MOST_OWN} rows" in allowed:
        wild = [("x", 0.0), ("x", 1, 1.0), ("x", 0.0, -1.0), ("x", 2e300, 1.0), ("\0", 0.0, 1.0),
                ("y" * 41, 0.0, 1.0), ("x", float("nan"), 1.0), 3]  # fmt: skip
        many = (("x", 0.0, 1.0),) * (MOST_OWN + 1)
        return st.sampled_from([(each,) for each in wild] + [many, None, 1, "m0"])
    if "weights" in allowed:
        wild = [("m0",), ("m0", 0.0), ("m0", float("nan")), ("m0", 2e15), ("m0", 1), ("\0", 1.0), 3]
        return st.sampled_from([(each,) for each in wild] + [None, 1, "m0"])
    if "pairs" in allowed:
        bad = [("m0",), ("m0", 1, 2), ("x" * 65, 1), ("m0", -1), ("m0", 1.0), (1, "m0"), "m0", 3]
        return st.sampled_from([(each,) for each in bad] + [None, 1, "m0"])
    low, high = _range(allowed)
    if "float" in allowed:
        wild = [float("nan"), float("inf"), float("-inf"), 0.0, -1.0, high * 2, low / 2, low * 2, 1]
        return st.one_of(*others, st.sampled_from([x for x in wild if not _within(x, low, high)]))
    return st.one_of(*others, st.sampled_from([low - 1, high + 1, True, 1.0, "1"]))


def _within(value, low: float, high: float) -> bool:
    return type(value) is float and low <= value <= high


@st.composite
def any_message(draw, kinds=CLASSES):
    cls = draw(st.sampled_from(kinds))
    return cls(**{f.name: draw(valid(f)) for f in dataclasses.fields(cls)})


@given(any_message(), st.sampled_from([bytes, bytearray, memoryview]))
def test_what_is_packed_comes_back(message, kind_of_buffer):
    frames = pack(message)
    assert unpack([kind_of_buffer(frame) for frame in frames]) == message
    assert len(frames[1]) <= MAX_HEADER_BYTES


@given(st.sampled_from(list(KINDS.values())), st.data())
def test_out_of_range_is_refused_on_both_ways(cls, data):
    specs = [f for f in dataclasses.fields(cls) if f.name in cls.header]
    if not specs:
        return
    message = data.draw(any_message((cls,)))
    spec = data.draw(st.sampled_from(specs))
    value = data.draw(invalid(spec))
    bad = dataclasses.replace(message, **{spec.name: value})
    with pytest.raises(BadMessage, match=f"{cls.__name__}.{spec.name} = .*allowed is") as caught:
        pack(bad)
    assert len(str(caught.value)) < 250
    values = [getattr(bad, f.name) for f in specs]
    try:
        header = msgpack.packb(values)
    except (OverflowError, ValueError):
        return  # no msgpack says this
    with pytest.raises(BadMessage, match=spec.name if value != "\ud800" else ""):
        unpack([cls.kind, header, *pack(message)[2:]])


FLOATS = [
    (cls, name)
    for cls in CLASSES
    for name, allowed in cls.header.items()
    if allowed.said.startswith("a float")
]


ODD = (
    True, False, 0, -1, 1, 2**70, 0.0, 1.0, -0.0, 1e300, float("nan"), float("inf"), "", "a", "\n",
    (), ((),), b"", None,
)  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
def test_a_quick_look_takes_nothing_that_a_field_does_not_allow(cls):
    for allowed, kind, low, high in zip(cls.header.values(), *cls.quick, strict=True):
        for value in (*ODD, low, high):
            is_taken = type(value) is kind and low <= value <= high
            assert allowed.check(value) or not is_taken, (allowed.said, value)


@pytest.mark.parametrize(("cls", "name"), FLOATS)
def test_floats_are_finite_and_in_range(cls, name):
    check, said, *_ = cls.header[name]
    low, high = _range(said)
    assert all(map(check, [low, high, (low + high) / 2]))
    nan, inf = float("nan"), float("inf")
    wild = [nan, inf, -inf, -low, 0.0, low / 2, low * 2, high * 2, 1, True, None, "1"]
    assert not any(check(value) for value in wild if not _within(value, low, high))


def shaken(frames, data):
    """Frames with one thing done to them that a bad wire or a bad peer might do."""
    frames = [bytearray(frame) for frame in frames]
    at = data.draw(st.integers(0, len(frames) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "double", "swap"])):
        case "flip" if frames[at]:
            frames[at][data.draw(st.integers(0, len(frames[at]) - 1))] ^= data.draw(
                st.integers(1, 255)
            )
        case "cut":
            del frames[at][data.draw(st.integers(0, len(frames[at]))) :]
        case "grow":
            frames[at] += data.draw(st.binary(min_size=1, max_size=20))
        case "drop":
            del frames[at]
        case "double":
            frames.insert(at, frames[at])
        case "swap":
            frames.reverse()
    return frames


@given(any_message(), st.data())
def test_damaged_messages_raise_only_bad_message(message, data):
    try:
        found = unpack(shaken(pack(message), data))
    except BadMessage:
        return
    pack(found)  # what got through is valid


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_raise_only_bad_message(frames):
    with contextlib.suppress(BadMessage):
        pack(unpack(frames))


LEAF = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
ANYTHING = st.recursive(
    LEAF | st.binary(),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.sampled_from(list(KINDS)), ANYTHING, st.booleans())
def test_any_msgpack_raises_only_bad_message(kind, value, payload):
    with contextlib.suppress(BadMessage):
        pack(unpack([kind, msgpack.packb(value), *[b"x"] * payload]))


@pytest.mark.parametrize("depth", [10, 500, 1000, 1020, 1023, 1024, 4000])
def test_nesting_however_deep_raises_only_bad_message(depth):
    with pytest.raises(BadMessage):
        unpack([Leave.kind, b"\x91" * depth + b"\xc0"])


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
        b"\xdb\xff\xff\xff\xff",  # a text of four gigabytes
        b"\x91\xdf\xff\xff\xff\xff",  # a map as large
        b"\x91\xc9\xff\xff\xff\xff\x01",  # an extension as large
        b"\x91\xd7\xff" + b"\xff" * 8,  # a timestamp that is none
        b"\x91\xd9\x02\xff\xff",  # not UTF-8
        b"\x91\xa0trailing",
        b"",
    ],
)
def test_sizes_that_lie_are_refused(header):
    with pytest.raises(BadMessage):
        unpack([Leave.kind, header])


def test_an_oversized_header_is_refused_before_it_is_parsed(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("parsed")

    monkeypatch.setattr(messages.msgpack, "unpackb", never)
    with pytest.raises(BadMessage, match="4097 bytes, allowed 4096"):
        unpack([Leave.kind, b"\x90" * (MAX_HEADER_BYTES + 1)])


def test_the_payload_is_not_copied():
    payload = memoryview(bytearray(b"abcd"))
    message = Contribute(0, 0, 1, 1.0, 0, 0, 0, payload)
    frames = pack(message)
    assert frames[2] is payload
    assert unpack(frames).payload is payload
    assert "abcd" not in repr(message)


def test_a_payload_of_any_size_is_left_for_the_codec_to_judge():
    assert unpack(pack(Contribute(0, 0, 1, 1.0, 0, 0, 0, b""))).payload == b""


def test_an_unknown_kind_is_named():
    with pytest.raises(BadMessage, match="no message kind b'Z'"):
        unpack([b"Z", b"\x90"])
    with pytest.raises(BadMessage, match="no message kind"):
        unpack([b"H" * 10**6, b"\x90"])


@pytest.mark.real  # an interpreter of its own
def test_kinds_that_no_module_has_asked_for_are_known():
    code = (
        "import sys\nfrom edgetrain.exchange import messages\n"
        "assert 'edgetrain.exchange.further_messages' not in sys.modules\n"
        "print(messages.unpack([b'v', bytes.fromhex('92 07 c3')]).takes_over)\n"
        "assert 'edgetrain.exchange.further_messages' not in sys.modules\n"
        "print(messages.unpack([b'h', bytes.fromhex('92 07 02')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["True", "Stored(position=7, parts=2)"]


def test_kinds_are_one_letter_each():
    assert len({cls.kind for cls in KINDS.values()}) == len(KINDS)
    assert all(len(k) == 1 and k.decode() in string.ascii_letters for k in KINDS)
    assert all(Refuse(code, why) == unpack(pack(Refuse(code, why))) for code, why in CODES.items())


# -- docs/reference/wire.md ---------------------------------------------------------------------


def vectors() -> list[str]:
    (block,) = re.findall(r"```vectors\n(.*?)```", WIRE.read_text("utf-8"), re.DOTALL)
    return block.strip().split("\n\n")


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: v.partition("(")[0])
def test_the_documented_bytes_are_the_bytes(vector):
    spelled, *frames = vector.split("\n")
    message = eval(
        spelled, {**vars(messages), **vars(further_messages)}
    )  # a file of this repository
    assert [bytes(frame).hex(" ") for frame in pack(message)] == frames
    assert unpack([bytes.fromhex(frame) for frame in frames]) == message


def test_every_kind_has_a_vector_and_every_field_a_row():
    text = WIRE.read_text("utf-8")
    named = sorted(v.partition("(")[0] for v in vectors())
    assert named == sorted(cls.__name__ for cls in KINDS.values())
    for cls in KINDS.values():
        (chapter,) = re.findall(
            rf"\n### `{cls.kind.decode()}` {cls.__name__}\n(.*?)(?=\n##)", text, re.S
        )
        rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*?) \|", chapter, re.M)
        assert rows == [
            (str(i), name, allowed.said.replace("e+", "e"))
            for i, (name, allowed) in enumerate(cls.header.items())
        ]
        assert ("payload" in chapter) == cls.carries
    for code, meaning in CODES.items():
        assert f"| `{code}` | {meaning} |" in text
    assert f"Protocol version: {messages.PROTOCOL}" in text
    assert f"{MAX_HEADER_BYTES} bytes" in text


def test_extremes_are_packed():
    Start(MAX_COUNT, 0, 1 << 32, MAX_CHECKSUM, True)
    join = Join(0, "", "", MAX_ELEMENTS, "", 1e-9, MAX_CHECKSUM)
    assert unpack(pack(join)) == join
    assert unpack(pack(Beat())) == Beat()
