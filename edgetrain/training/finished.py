"""What a calibration has finished, a line each, so that another process can go on from it.

A line is written as soon as its run is over, and says of which job and version it is. What a power
cut left of the last line is not read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from edgetrain import __version__
from edgetrain.errors import ConfigError
from edgetrain.jobs.plan import Plan
from edgetrain.runs.reports.calibration import Pair

FILE = "finished.jsonl"


@dataclass(frozen=True)
class Done:
    """A run of a job: its summary, the bases of its members, and its seconds on this machine."""

    summary: dict[str, Any]
    bases: set[str]
    real_s: float


class Finished:
    """The finished runs of a calibration by the names of their jobs: those that the folder had, and
    those that are added, which are written into it at once.

    What was run with other settings or by another version does not count, nor does what failed.
    """

    def __init__(
        self,
        folder: Path | None = None,
        digests: Mapping[str, str] | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """`digests` of the jobs, see `digest_of`. Reads the folder if it is `resumed`; ConfigError
        if no calibration has written it, or if one is writing it. None: nothing is read or written.
        """
        self.resumed = resumed
        self._path = None if folder is None else folder / FILE
        self._digests = dict(digests or {})
        self._emulated: dict[str, Done] = {}
        self._pairs: dict[str, Pair] = {}
        if self._path is not None and resumed:
            self._read(self._path)
        self._append("")
        self._release: Callable[[], object] = lambda: None
        if self._path is not None:
            self._lock(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def _lock(self, path: Path) -> None:
        """Keep others out, who would write into the same runs, until the end of `with`."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._release = weakref.finalize(self, os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another calibration is at work in {path.parent}",
                "wait until it has ended, or leave out --resume",
            ) from None

    def __len__(self) -> int:
        """Pairs."""
        return len(self._pairs)

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text("utf-8", errors="replace")
        except OSError:
            raise ConfigError(
                f"{path.parent} is no calibration that can be resumed: no {FILE} in it",
                "give the folder of one, or leave out --resume",
            ) from None
        names = {digest: name for name, digest in self._digests.items()}
        for line in text.splitlines():
            try:
                found = json.loads(line)
                name = names.get(found["digest"])
                if name is not None and found["version"] == __version__:
                    self._add(name, found)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # cut short, or damaged: it is run again
        if text and not text.endswith("\n"):
            self._append("\n")

    def _add(self, name: str, found: Mapping[str, Any]) -> None:
        if "pair" in found:
            values: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in found["pair"].items()
            }
            pair = Pair(**values)
            if not pair.incomplete:
                self._pairs[name] = pair
        else:
            done = found["emulated"]
            self._emulated[name] = Done(done["summary"], set(done["bases"]), float(done["real_s"]))

    def pair(self, name: str) -> Pair | None:
        """The pair of this job; None: it has to be run."""
        return self._pairs.get(name)

    def emulated(self, name: str) -> Done | None:
        """The emulated run of this job; None: it has to be run."""
        return self._emulated.get(name)

    def add_pair(self, name: str, pair: Pair) -> None:
        """Keep a pair."""
        self._pairs[name] = pair
        self._write(name, {"pair": asdict(pair)})

    def add_emulated(self, name: str, done: Done) -> None:
        """Keep an emulated run, which is still to be simulated."""
        self._emulated[name] = done
        if done.summary.get("status", "finished") == "finished":
            told = {"summary": done.summary, "bases": sorted(done.bases), "real_s": done.real_s}
            self._write(name, {"emulated": told})

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        if self._path is not None:
            line = {"digest": self._digests[name], "version": __version__, **values}
            self._append(json.dumps(line) + "\n")

    def _append(self, text: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._path}: {error.strerror}", "make room, or use --runs"
            ) from None


def digest_of(name: str, plan: Plan, draws: int) -> str:
    """Of all that decides what a pair says: the job with what is in its networks' and devices'
    profiles, wherever their files lie, and how often it is simulated."""
    job = plan.job.to_dict()
    job["fleet"] = {key: value for key, value in job["fleet"].items() if key != "network"}
    links = [repr(replace(profile, name="")) for profile in plan.links]
    devices = [repr(plan.device_profiles[device]) for device in plan.devices]
    told = [name, job, links, repr(plan.sites), devices, draws]
    text = json.dumps(told, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
