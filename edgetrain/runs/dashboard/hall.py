"""Which runs there are below a folder, and the name of each in an address.

A name is looked up among the folders that are there; it is never put together into a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.runs.folder import JOB, METRICS, folders_in, runs_in
from edgetrain.runs.reports import units
from edgetrain.runs.reports.listing import RunEntry, listed

MOST_FOLDERS = 200
"""Folders in the list, the newest."""


class Hall:
    """The runs below `root`: a folder of run folders, or one run folder that may still be empty."""

    def __init__(self, root: Path) -> None:
        """ConfigError for what is no folder."""
        if not root.is_dir():
            raise ConfigError(f"{root} is no folder", "give a folder of runs, or a run folder")
        self._root = root.absolute()
        is_run = (root / JOB).exists() or (root / METRICS).exists()
        self._base = self._root.parent if is_run else self._root
        self._over: dict[Path, list[RunEntry]] = {}
        """Entries of folders whose runs have all ended: those do not change."""

    def rows(self) -> list[dict[str, Any]]:
        """The runs, the newest first, as `edgetrain runs --json` has them, and the `id` of each
        that `find` takes."""
        rows = []
        for folder in self._folders()[: -MOST_FOLDERS - 1 : -1]:
            entries = self._over.get(folder) or listed(folder)
            if all(entry.status not in ("no summary", "damaged") for entry in entries):
                self._over[folder] = entries
            rows += [self._row(entry) for entry in entries]
        return rows

    def find(self, name: str) -> Path | None:
        """The folder of the run with this id; None: there is none."""
        return next((run for run in self._runs() if self._id(run) == name), None)

    def only(self) -> str:
        """The id of the run, where there is one run alone; "": there are others, or none."""
        runs = list(self._runs())
        return self._id(runs[0]) if len(runs) == 1 else ""

    def _row(self, entry: RunEntry) -> dict[str, Any]:
        row = {
            key: units.printable(value) if isinstance(value, str) else value
            for key, value in entry.as_json().items()
        }
        said = {
            "final": units.figure(entry.metric, entry.final),
            "to target": units.duration(entry.target_seconds),
            "took": units.duration(entry.seconds),
            "wall clock": units.duration(entry.wall_seconds),
        }
        return row | {"id": self._id(Path(entry.folder)), "said": said}

    def _id(self, run: Path) -> str:
        return run.relative_to(self._base).as_posix()

    def _folders(self) -> list[Path]:
        return [self._root] if self._base != self._root else folders_in(self._root)

    def _runs(self) -> Iterator[Path]:
        for folder in self._folders():
            try:
                yield from runs_in(folder)
            except (ConfigError, OSError):
                if folder == self._root:  # a run that has not begun
                    yield folder
