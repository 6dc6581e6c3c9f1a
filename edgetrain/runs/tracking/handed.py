"""A run folder that is handed to a tracker, as far as it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from edgetrain.errors import ConfigError
from edgetrain.runs.folder import metrics_path, read_job, read_summary
from edgetrain.runs.metrics.lines import Follower
from edgetrain.runs.tracking.points import Curves, parameters
from edgetrain.runs.tracking.trackers import About, open_tracker

_PART = 20_000
"""Lines whose points are handed over at once."""


class HandedRun:
    """A run, its tracker, and how far it is handed over. A context: leaving it closes the tracker.

    ConfigError, one line, for whatever the tracker's library raises.
    """

    def __init__(
        self, folder: Path, to: str, *, into: str, project: str, offline: bool, members: int
    ) -> None:
        """`members`: how many have curves of their own."""
        self.curves = Curves(members)
        self.points = 0
        """Handed over so far."""
        self._folder, self._to = folder, to
        self._lines = Follower(metrics_path(folder))
        job = read_job(folder)
        began = (read_summary(folder) or {}).get("began")
        at = datetime.fromisoformat(began).timestamp() if began else folder.stat().st_mtime
        project = project or str(job.get("name") or "edgetrain")
        about = About(folder.name, project, folder, parameters(job), at, into, offline)
        with self._faults():
            self._tracker = open_tracker(to, about)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        after = contextlib.suppress(ConfigError) if error else contextlib.nullcontext()
        with after, self._faults():
            self._tracker.close(read_summary(self._folder) is not None)

    def hand_over(self, is_over: bool) -> None:
        while records := self._lines.read():
            for at in range(0, len(records), _PART):
                self._write(records[at : at + _PART])
        if is_over:
            self._write(self._lines.rest())

    def _write(self, records: list[dict[str, Any]]) -> None:
        points = list(self.curves.points(records))
        self.points += len(points)
        with self._faults():
            self._tracker.write(points)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """A tracker's library raises what it likes: one line of it."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"{self._to} took no more of {self._folder}: {said}",
                "the run goes on; track it again when that is mended",
            ) from error
