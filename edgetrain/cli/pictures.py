"""Pictures of a verb's results, and the lines that name them and the run folder."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgetrain.cli import common
from edgetrain.errors import EdgetrainError


def picture(path: Path, draw: Callable[..., Any], *arguments: Any) -> Path | None:
    """Save what `draw` makes of these arguments and return its path, or say in one line on stderr
    why there is no picture."""
    from edgetrain.runs.reports.plot import save

    try:
        with _while_waiting("drawing the picture …"):
            return save(lambda: draw(*arguments), path)
    except Exception as error:
        told = error if isinstance(error, EdgetrainError) else f"{type(error).__name__}: {error}"
        common.warn(f"no picture: {' '.join(str(told).split())}")
        return None


@contextlib.contextmanager
def _while_waiting(text: str) -> Iterator[None]:
    """Show a line on a terminal within the block; it is wiped behind it."""
    shown = sys.stderr.isatty()
    if shown:
        print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say_pictures(pictures: Iterable[Path | None]) -> None:
    for path in pictures:
        if path is not None:
            common.say(f"picture: {path}")


def say_end(
    arguments: Namespace,
    answer: Mapping[str, Any],
    pictures: Iterable[Path | None],
    folder: Path,
) -> None:
    if arguments.json:
        common.say(json.dumps({**answer, "folder": str(folder)}))
    else:
        say_pictures(pictures)
        common.say(f"run folder: {folder}")
