"""The texts of a figure: inside the picture, and none over another."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock


def words(figure: Any) -> list[tuple[str, Any]]:
    """Every text that is really drawn, with the box it takes in pixels.

    A figure holds more: ticks beyond the ends of an axis exist too.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas, drawn, draw = FigureCanvasAgg(figure), {}, Text.draw

    def remember(text: Text, renderer: Any) -> None:
        drawn[id(text)] = text
        draw(text, renderer)

    with mock.patch.object(Text, "draw", remember):
        canvas.draw()
    # Of an annotation only its words: the line that leads to them may cross others.
    return [
        (text.get_text(), Text.get_window_extent(text, canvas.get_renderer()))
        for text in drawn.values()
        if text.get_text().strip() and text.get_visible()
    ]


def check(figure: Any) -> list[str]:
    """Every text lies within the picture and over no other; returns them."""
    found = words(figure)
    width, height = figure.canvas.get_width_height()
    for text, box in found:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    for (one, box), (other, beside) in itertools.combinations(found, 2):
        across = min(box.x1, beside.x1) - max(box.x0, beside.x0)
        down = min(box.y1, beside.y1) - max(box.y0, beside.y0)
        assert min(across, down) < 3, f"{one!r} lies over {other!r}"
    return [text for text, _ in found]
