"""What the ranks of an attempt are told, and how they end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import EdgetrainError
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import parse

WAY_OUT = "take another placement, or name the model's `pieces` (docs/how-to/gpu-servers.md)"
"""The way out for a placement that torch cannot build or run."""


@dataclass(frozen=True)
class Attempt:
    """One placement on fresh processes: what all of its ranks are told."""

    number: int
    job: Job
    beside: Path | None
    """The folder of the job file."""
    folder: Path
    words: str
    count: int
    """Ranks."""
    host: str
    port: int
    """Port of the attempt's store."""
    elapsed_s: float | None
    """Since training began; None: it has not begun."""
    is_trial: bool = False
    """Whether it ends with the check before the first step."""
    member: int = -1
    """The member of a fleet that the group is; -1: the job is the group's alone."""
    keeps: bool = True
    """Whether snapshots are kept in the folder."""
    missing: tuple[int, ...] = ()
    """The members that the group stands in for; (): none."""

    def plain(self) -> dict[str, Any]:
        paths = {"folder": str(self.folder), "beside": str(self.beside) if self.beside else None}
        return {**asdict(self), "job": self.job.to_dict(), **paths}

    @classmethod
    def of(cls, table: dict[str, Any]) -> Attempt:
        """The attempt that `plain` wrote."""
        beside = Path(table["beside"]) if table["beside"] else None
        read = {"job": parse(table["job"]), "folder": Path(table["folder"]), "beside": beside,
                "missing": tuple(table["missing"])}  # fmt: skip
        return cls(**{**table, **read})


@dataclass(frozen=True)
class RankEnd:
    code: int
    """0: well; 1: a bug; 2: an EdgetrainError; negative: a signal."""
    error: str = ""

    @property
    def first(self) -> str:
        """The first line of the error."""
        return (self.error.strip() or "no reason given").splitlines()[0]

    def told(self, who: str, folder: Path | None, hint: str = "") -> EdgetrainError:
        """The error that ends a run because `who` has ended so. What a library raised is one line;
        its traceback goes to a file in `folder`."""
        if folder is None or "site-packages" not in self.error:
            return EdgetrainError(f"{who}: {self.error}", hint)
        path = folder / "error.txt"
        path.write_text(self.error)
        return EdgetrainError(f"{who}: {self.first}", hint or f"{WAY_OUT}; its frames: {path}")
