"""Charts as SVG text: axes with round ticks, lines, bars. Nothing here knows what a run is.

Colours are classes of the page's style sheet (`s0` … `s6`), so that a dark page has its own.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 470.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 14.0, 30.0, 42.0
SERIES = 7
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_MOST_POINTS = 400


@dataclass(frozen=True)
class Line:
    """One line of a chart: points in the order of x."""

    name: str
    points: tuple[tuple[float, float], ...]
    place: int
    """Number of the line: decides colour and dashes."""


@dataclass(frozen=True)
class Mark:
    """A mark on a chart where something happened; `kind` decides its shape."""

    kind: str
    x: float
    y: float
    place: int
    """The number of its line: decides the colour."""
    title: str


SHAPES = {
    "fault": "M-4-4L4 4M4-4L-4 4",
    "absence": "M-4.5-4H4.5L0 5Z",
    "gone": "M-4-4H4V4H-4Z",
    "back": "M-4.5 4H4.5L0-5Z",
    "error": "M-5 0H5M0-5V5",
    "delay": "M0-5L5 0L0 5L-5 0Z",
}
"""A path around 0, 0 for each kind of sign."""


@dataclass(frozen=True)
class Scale:
    """A linear axis from `low` to `high` with its ticks."""

    low: float
    high: float
    label: str
    say: Callable[[float], str]

    def ticks(self, most: int = 6) -> list[float]:
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            return [self.low]
        raw = span / most
        power = 10.0 ** math.floor(math.log10(raw))
        unit = next(u for u in (1, 2, 2.5, 5, 10) if u * power >= raw * 0.999) * power
        first = math.ceil(self.low / unit - 1e-9)
        last = math.floor(self.high / unit + 1e-9)
        return [number * unit for number in range(first, last + 1)]

    def place(self, value: float, start: float, end: float) -> float:
        span = self.high - self.low
        return start + (end - start) * ((value - self.low) / span if span > 0 else 0.5)


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{html.escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    size = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.0):.2f}" height="{height:.2f}"'
    inner = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<rect {size} class="{kind}">{inner}</rect>'


def figure(body: Sequence[str], width: float, height: float, title: str) -> str:
    """A whole picture that grows with the page; `title` is for those who cannot see it."""
    head = (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{html.escape(title, quote=True)}">'
    )
    return head + "".join(body) + "</svg>"


def axes(x: Scale, y: Scale, width: float = WIDTH, height: float = HEIGHT) -> list[str]:
    right, bottom = width - _RIGHT, height - _BOTTOM
    drawn = []
    for tick in y.ticks():
        at = y.place(tick, bottom, _TOP)
        drawn.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right:.1f}"/>')
        drawn.append(text(_LEFT - 6, at + 4, y.say(tick), "end", "tick"))
    for tick in x.ticks():
        at = x.place(tick, _LEFT, right)
        drawn.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom:.1f}"/>')
        # A word in the middle of the last tick would leave the picture.
        anchor = "end" if right - at < 3 * len(x.say(tick)) else "middle"
        place = min(at + 6, WIDTH) if anchor == "end" else at
        drawn.append(text(place, bottom + 16, x.say(tick), anchor, "tick"))
    drawn.append(text((_LEFT + right) / 2, height - 6, x.label, "middle", "label"))
    drawn.append(text(2, _TOP - 16, y.label, "start", "label"))
    return drawn


def ruler(x: Scale, ends: tuple[float, float], top: float, bottom: float, most: int) -> list[str]:
    """Ticks of bars from `ends[0]` to `ends[1]`, and their words below `bottom`."""
    drawn = []
    for tick in x.ticks(most):
        at = x.place(tick, *ends)
        drawn.append(f'<path class="grid" d="M{at:.1f} {top:.0f}V{bottom:.1f}"/>')
        drawn.append(text(at, bottom + 13, x.say(tick) if tick else "0", "middle", "tick"))
    return drawn


def lines(
    every: Sequence[Line],
    x: Scale,
    y: Scale,
    title: str,
    mark: float | None = None,
    said: str = "",
    signs: Sequence[Mark] = (),
    band: Sequence[tuple[float, ...]] = (),
) -> str:
    """A chart of lines (`key` names them). `mark`: a level to draw across, called `said`; `signs`
    are drawn on top (`sign_key` explains them), and a `band` of (x, low, high) below."""
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    drawn = axes(x, y)
    if mark is not None and y.low <= mark <= y.high:
        at = y.place(mark, bottom, _TOP)
        drawn.append(f'<path class="mark" d="M{_LEFT} {at:.1f}H{right:.1f}"/>')
        drawn.append(text(right - 2, at - 4, said, "end", "tick"))

    def path(points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(
            f"{x.place(px, _LEFT, right):.1f} {y.place(py, bottom, _TOP):.1f}" for px, py in points
        )

    if band:
        around = [*((at, low) for at, low, _ in band), *((at, high) for at, _, high in band[::-1])]
        drawn.append(f'<path class="band" d="{path(around)}Z"/>')
    for line in filter(lambda line: line.points, every):
        drawn.append(_path(line.place, path(_thinned(line.points)), line.name))
    for sign in signs:
        at, height = x.place(sign.x, _LEFT, right), y.place(sign.y, bottom, _TOP)
        drawn.append(
            f'<path class="sign s{sign.place % SERIES}" d="{SHAPES[sign.kind]}" '
            f'transform="translate({at:.1f} {height:.1f})"><title>{html.escape(sign.title)}'
            "</title></path>"
        )
    return figure(drawn, WIDTH, HEIGHT, title)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about _MOST_POINTS of them, with the last one."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    every = -(-len(points) // _MOST_POINTS)
    return [*points[::every], points[-1]]


def _keys(box: str, entries: Iterable[tuple[str, str]]) -> str:
    """A legend: a drawing within `box` (x y width height) and its name, for each entry."""
    *_, width, height = box.split()
    shown = "".join(
        f'<span class="key"><svg viewBox="{box}" width="{width}" height="{height}" '
        f'aria-hidden="true">{drawing}</svg>{html.escape(name)}</span>'
        for drawing, name in entries
    )
    return f'<p class="keys">{shown}</p>' if shown else ""


def key(names: Sequence[str]) -> str:
    """The names of the lines of a chart, each with a piece of its line."""
    return _keys("0 0 34 10", [(_path(place, "M1 5H33"), n) for place, n in enumerate(names)])


def sign_key(kinds: Sequence[tuple[str, str]]) -> str:
    """The legend of the signs of these kinds."""
    signs = [(f'<path class="sign plain" d="{SHAPES[kind]}"/>', said) for kind, said in kinds]
    return _keys("-8 -8 16 16", signs)


def part_key(kinds: Iterable[tuple[str, str]]) -> str:
    """The legend of the parts of a step."""
    return _keys("0 0 16 12", [(rect(0, 1, 16, 10, kind), said) for kind, said in kinds])


def _path(place: int, d: str, name: str = "") -> str:
    """A line in the look of number `place`; its name is shown below a pointer."""
    dashes = _DASHES[place // SERIES % len(_DASHES)] or _DASHES[place % 4]
    look = f'class="line s{place % SERIES}" stroke-dasharray="{dashes}"'
    inner = f"<title>{html.escape(name)}</title>" if name else ""
    return f'<path {look} d="{d}">{inner}</path>'
