"""The tensors of a flat vector as text and back: how a member proves its model.

One line a tensor, in the order of the vector: dtype, shape, name. Behind them, in the order of
their names, tensors that are not trained, where a member takes over the first member's values:
"fixed", dtype, shape, name. `read` checks every line of text that arrives. No torch, no numpy, no
socket.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING

from edgetrain.errors import BadMessage, ConfigError

if TYPE_CHECKING:
    from edgetrain.vectors.vector import Buffer, Layout

MAX_BYTES = 1 << 20
"""The longest description: about ten thousand tensors."""
MAX_NAME = 512

_LINE = re.compile(
    r"([a-z0-9_]{1,16}) (-|[0-9]{1,13}(?:x[0-9]{1,13}){0,31}) (.{1,MAX})".replace(
        "MAX", f"{MAX_NAME}"
    )
)
_FIXED = "fixed "
"""Begins the line of a tensor that is not in the vector: no shape is a dtype's name."""
_GRADIENT = "gradient of "
"""Begins the name of a parameter's gradient."""
_MEASURED = ("running_mean", "running_var", "running_square")
"""The last words of names of normalisation statistics, which stand behind the parameters."""

Tensors = Iterable[tuple[str, tuple[int, ...], str]]


def describe(tensors: Tensors, fixed: Tensors = ()) -> bytes:
    """The description of tensors given as (name, shape, dtype), in the order of the vector; behind
    them those that are not trained and that the first member hands to all others.

    Raises ConfigError for a model that cannot be described, and so cannot join.

    >>> describe([("0.weight", (16, 1, 3, 3), "float32"), ("scale", (), "float32")])
    b'float32 16x1x3x3 0.weight\\nfloat32 - scale\\n'
    """
    lines = []
    marked = [("", each) for each in tensors] + [(_FIXED, each) for each in fixed]
    for mark, (name, shape, dtype) in marked:
        line = f"{dtype} {'x'.join(map(str, shape)) or '-'} {name}"
        if not _LINE.fullmatch(line) or not name.isprintable():
            raise ConfigError(
                f"parameter {name[:60]!r} of {dtype} {shape} cannot be described",
                f"its name has 1 to {MAX_NAME} printable characters, its shape at most 32 numbers",
            )
        lines.append(f"{mark}{line}\n")
    described = "".join(lines).encode()
    if len(described) > MAX_BYTES:
        raise ConfigError(
            f"the model's {len(lines)} tensors take {len(described)} bytes to describe",
            f"allowed are {MAX_BYTES}: shorten the names of its modules",
        )
    return described


def doubled(description: bytes) -> bytes:
    """The description of a vector that has the mean gradient of every element behind itself.

    >>> doubled(b"float32 16 bias\\nfixed float32 2 mask\\n")
    b'float32 16 bias\\nfloat32 16 gradient of bias\\nfixed float32 2 mask\\n'
    """
    lines = description.decode().splitlines(keepends=True)
    own = [line for line in lines if not line.startswith(_FIXED)]
    parts = (line.split(" ", 2) for line in own)
    more = [f"float32 {shape} {_GRADIENT}{name}" for _, shape, name in parts]
    return "".join([*own, *more, *lines[len(own) :]]).encode()


def is_doubled(description: Buffer) -> bool:
    """Whether the vector of a description has gradients behind it."""
    return f" {_GRADIENT}".encode() in bytes(description)


def digest(description: Buffer, fixed: str = "") -> str:
    """A digest of names, shapes and dtypes: vectors with equal digests can be added.

    `fixed` is a digest of the values that are not in the vector, which it then ends with; "": they
    are not to be compared.
    """
    names = hashlib.sha256(description).hexdigest()[:32]
    return f"{names}:{fixed}" if fixed else names


def tensors_agree(one: str, other: str) -> bool:
    """Whether two digests are of tensors with equal names, shapes and dtypes."""
    return one.partition(":")[0] == other.partition(":")[0]


def fixed_agree(one: str, other: str) -> bool:
    """Whether two models' values outside the vector agree, as far as both state them."""
    mine, yours = one.partition(":")[2], other.partition(":")[2]
    return not mine or not yours or mine == yours


def first_difference(one: Buffer, other: Buffer) -> str:
    """The first tensor that differs between two descriptions, as a text; "" where one is empty."""
    if not one or not other:
        return ""
    pair = (bytes(each).decode(errors="replace").splitlines() for each in (one, other))
    for mine, yours in zip_longest(*pair, fillvalue="no tensor"):
        if mine != yours:
            return f"the first tensor that differs is '{_shown(mine)}' and '{_shown(yours)}'"
    return ""


def _shown(line: str) -> str:
    """The beginning of an untrusted line, with control characters replaced."""
    return "".join(each if each.isprintable() else "?" for each in line[:120])


def read(description: Buffer, elements: int) -> Layout:
    """The layout of a vector of `elements`. Raises BadMessage, and nothing else."""
    size = memoryview(description).nbytes
    if not 0 < size <= MAX_BYTES:
        raise BadMessage(f"a layout of {size} bytes, allowed are 1 to {MAX_BYTES}")
    try:
        text = bytes(description).decode()
    except UnicodeDecodeError:
        raise BadMessage("a layout that is not UTF-8") from None
    *lines, rest = text.split("\n")
    if rest:
        raise BadMessage("a layout whose last line does not end")
    layout = []
    at = 0
    is_fixed = False
    for number, line in enumerate(lines, 1):
        was_fixed, is_fixed = is_fixed, line.startswith(_FIXED)
        match = _LINE.fullmatch(line.removeprefix(_FIXED)) if is_fixed or not was_fixed else None
        if match is None or not match[3].isprintable():
            raise BadMessage(f"line {number} of a layout is not 'dtype shape name'")
        if is_fixed:
            continue
        shape = () if match[2] == "-" else tuple(map(int, match[2].split("x")))
        layout.append((match[3], at, shape))
        at += math.prod(shape)
        if at > elements:
            break
    if at != elements:
        raise BadMessage(f"a layout of {at} elements or more, the vector has {elements}")
    return tuple(layout)


def trained_elements(layout: Layout, elements: int) -> int:
    """How many elements of a vector are parameters, and no statistics, which no optimizer moves.

    >>> trained_elements((("0.weight", 0, (4,)), ("1.running_mean", 4, (2,))), 6)
    4
    """
    for name, start, _ in reversed(layout):
        if name.rpartition(".")[2] not in _MEASURED:
            break
        elements = start
    return elements
