"""Schedules with real processes, each in a process of its own, several at once; and their evidence.

    python -m edgetrain.training.chaos.trials PARENT FOLDER < trial.json

A trial's process ends what it started when it is told to (SIGTERM), which the kernel does for a
parent that is gone; then its folder goes too. What is kept is for whoever asks why a law broke.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from edgetrain.errors import EdgetrainError
from edgetrain.fleet import interpreters
from edgetrain.fleet.networks.emulation import linux
from edgetrain.jobs import reading
from edgetrain.runs.files import write_text
from edgetrain.training.chaos import fleet
from edgetrain.training.chaos.fleet import Setting
from edgetrain.training.chaos.laws import Outcome
from edgetrain.training.chaos.schedule import KINDS, Happening, Kind, draw

SECONDS = 4.0
"""In which things go wrong with stand-ins; then there is time to heal before the end."""
SHARE = 0.6
"""Of a job's time without faults in which things go wrong."""
MOST_TIMES, MOST_S = 10.0, 60.0
"""A trial that takes so many times the seconds of its schedule, and so many more, stands still."""

_POLL_S = 0.05


@dataclass(frozen=True)
class Schedules:
    """What is drawn for each seed."""

    seconds: float = SECONDS
    """In which things go wrong."""
    happenings: int = 5
    kinds: tuple[Kind, ...] = KINDS

    def of(self, seed: int, setting: Setting) -> tuple[Happening, ...]:
        """The schedule of this seed, in seconds of real processes."""
        share = fleet.share_of(setting.job)
        members = setting.job.fleet.members
        drawn = draw(seed, members, self.seconds / share, self.happenings, self.kinds)
        return tuple(happening.shrunk(share) for happening in drawn)


CALM = Schedules(seconds=360.0, happenings=0)
"""For a job of which nobody knows yet how long it takes: an hour, if it has to."""


@dataclass(frozen=True)
class Trial:
    """What became of one schedule."""

    outcome: Outcome
    folder: Path
    """Logs, journal, ledgers. Gone when the next one is asked for, unless it is moved."""


def run_all(
    setting: Setting, schedules: Schedules, seeds: Sequence[int], at_once: int = 1
) -> Generator[Trial, None, None]:
    """The trials of these seeds as they end, `at_once` of them at a time.

    When the caller stops asking, what still runs is ended and its folders go. Raises EdgetrainError
    for a trial that failed by itself, in which no law was broken.
    """
    waiting, running = list(seeds), dict[int, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                seed = waiting.pop(0)
                running[seed] = _Running(setting, schedules, seed)
            for seed in [seed for seed, trial in running.items() if trial.ended]:
                trial = running[seed]
                yield Trial(trial.outcome(), trial.folder)
                running.pop(seed).clear()
            time.sleep(_POLL_S)
    finally:
        for trial in running.values():
            trial.terminate()
        for trial in running.values():
            trial.clear()


class _Running:
    """A trial's process, and its folder."""

    def __init__(self, setting: Setting, schedules: Schedules, seed: int) -> None:
        self._seed = seed
        self.folder = Path(tempfile.mkdtemp(prefix="edgetrain-chaos-"))
        told = {
            "setting": _plain(setting),
            "schedules": asdict(schedules),
            "seed": seed,
        }
        try:
            self._process = self._started()
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as file:
                file.write(json.dumps(told).encode())
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _started(self) -> subprocess.Popen[bytes]:
        words = [str(os.getpid()), str(self.folder)]
        with (self.folder / "trial.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "edgetrain.training.chaos.trials", *words],
                env=interpreters.environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C is for the parent, which ends its trials itself
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def outcome(self) -> Outcome:
        found = self.folder / "outcome.json"
        if not found.exists():
            said = (self.folder / "trial.log").read_text().strip().splitlines()
            raise EdgetrainError(
                f"the trial of seed {self._seed} itself failed: {said[-1] if said else 'killed'}"
            )
        table = json.loads(found.read_text())
        happenings = tuple(
            Happening(each["at_s"], each["kind"], each["for_s"], tuple(each["members"]))
            for each in table.pop("happenings")
        )
        return Outcome(**{**table, "happenings": happenings, "broken": tuple(table["broken"])})

    def terminate(self) -> None:
        self._process.terminate()

    def clear(self) -> None:
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _plain(setting: Setting) -> dict[str, Any]:
    beside = None if setting.beside is None else str(setting.beside)
    return {**asdict(setting), "job": setting.job.to_dict(), "beside": beside}


def _setting(table: dict[str, Any]) -> Setting:
    return Setting(
        job=reading.parse(table["job"]),
        task=table["task"],
        beside=Path(table["beside"]) if table["beside"] else None,
        devices=tuple(table["devices"]),
        networks=tuple(table["networks"]),
        program=tuple(table["program"]),
    )


def keep(trial: Trial, to: Path) -> None:
    """Move what a trial has written into the folder `to`, which is there. Keys are left out."""
    shutil.rmtree(trial.folder / "keys", ignore_errors=True)
    shutil.copytree(trial.folder, to, dirs_exist_ok=True)


# -- the process of one trial ---------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Run one trial, and leave its outcome in its folder; no folder, where nobody waits for it."""
    parent, folder = int(words[0]), Path(words[1])
    signal.signal(signal.SIGTERM, _end)
    linux.die_with_parent(signal.SIGTERM)
    try:
        told = sys.stdin.read()
        if os.getppid() == parent:
            _run(json.loads(told), folder)
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


def _run(told: dict[str, Any], folder: Path) -> None:
    setting, table = _setting(told["setting"]), told["schedules"]
    schedules = Schedules(table["seconds"], table["happenings"], tuple(table["kinds"]))
    try:
        outcome = fleet.run(
            setting,
            folder,
            told["seed"],
            schedules.of(told["seed"], setting),
            MOST_TIMES * schedules.seconds + MOST_S,
            lambda happening: print(happening, flush=True),
        )
    except EdgetrainError as error:
        sys.exit(str(error))
    write_text(folder / "outcome.json", json.dumps(asdict(outcome)))


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main(sys.argv[1:])
