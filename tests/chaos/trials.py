"""Trials: schedules over real processes, each in a process of its own, several at a time.

    python -m chaos.trials PARENT FOLDER < trial.json

    event in the process of a trial          what it does
    the schedule has ended                   writes outcome.json, which the parent reads; exits
    the fleet did not start                  exits with 1; the last line of its log says why
    SIGTERM, from the parent                 ends its fleet and exits; the parent deletes the folder
    SIGTERM, from the kernel: no parent      ends its fleet, deletes the folder and exits

The folder (logs, journal, ledgers) is evidence if a law broke: `keep` copies it elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
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

from chaos import fleet
from chaos.fleet import Setting
from chaos.laws import Outcome
from chaos.schedule import KINDS, Happening, Kind, draw
from edgetrain.errors import EdgetrainError
from edgetrain.files.writing import write_text
from edgetrain.fleet import interpreters
from edgetrain.fleet.networks.emulation import linux
from edgetrain.jobs import reading

SECONDS = 4.0
"""Seconds in which things go wrong with stand-ins. They train longer, so that all can heal."""
SHARE = 0.6
"""The part of a job's time without faults in which things go wrong."""
MOST_TIMES, MOST_S = 10.0, 60.0
"""A trial stands still if it takes this many times its schedule's seconds, plus this many more."""

_POLL_S = 0.05

log = logging.getLogger("edgetrain.trials")


@dataclass(frozen=True)
class Schedules:
    """How a schedule is drawn from a seed."""

    seconds: float = SECONDS
    """Things go wrong within this time."""
    happenings: int = 5
    kinds: tuple[Kind, ...] = KINDS

    def of(self, seed: int, setting: Setting) -> tuple[Happening, ...]:
        """Draw the schedule of this seed, in seconds of real processes."""
        share = fleet.share_of(setting.job)
        members = setting.job.fleet.members
        drawn = draw(seed, members, self.seconds / share, self.happenings, self.kinds)
        return tuple(happening.shrunk(share) for happening in drawn)


_TRIES = 50
"""Times that a folder is deleted, because processes in it may not have ended yet."""

CALM = Schedules(seconds=360.0, happenings=0)
"""No faults, for a job whose duration is not known yet: it may take an hour."""


@dataclass(frozen=True)
class Trial:
    """How one schedule ended."""

    outcome: Outcome
    folder: Path
    """Logs, journal, ledgers. It is deleted when the next trial is requested: `keep` it before."""


def run_all(
    setting: Setting, schedules: Schedules, seeds: Sequence[int], at_once: int = 1
) -> Generator[Trial, None, None]:
    """Run the trials of these seeds, `at_once` at a time; yields each as it ends.

    Closing the generator ends what still runs, and deletes its folders. Raises EdgetrainError for a
    trial that failed itself, without breaking a law.
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
                [sys.executable, "-m", "chaos.trials", *words],
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
    """Copy the files of a trial, except keys, into the folder `to`, which exists."""
    shutil.rmtree(trial.folder / "keys", ignore_errors=True)
    shutil.copytree(trial.folder, to, dirs_exist_ok=True)


# -- the process of one trial ---------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Run one trial and leave its outcome in its folder; delete the folder if the parent died."""
    parent, folder = int(words[0]), Path(words[1])
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    log.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _end)
    linux.die_with_parent(signal.SIGTERM)
    try:
        told = sys.stdin.read()
        if os.getppid() == parent:
            _run(json.loads(told), folder)
    finally:
        if os.getppid() != parent:
            _delete(folder)


def _delete(folder: Path) -> None:
    """Delete a folder in which processes that are about to end may still write."""
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_POLL_S)


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
            log.info,
        )
    except EdgetrainError as error:
        sys.exit(str(error))
    write_text(folder / "outcome.json", json.dumps(asdict(outcome)))


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main(sys.argv[1:])
