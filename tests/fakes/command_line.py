"""The command as people run it: a process of its own, in a folder of its own.

Every process that a command starts inherits a mark in its environment, so that a test can tell
whether one of them was left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from patience import patience
from warm_forkserver import Forked

EDGETRAIN = (sys.executable, "-m", "edgetrain")
"""The command in an interpreter of its own, for tests of start-up, imports and memory. The others'
commands are forked from one that has imported torch."""
_MARK = "EDGETRAIN_TEST_MARK"

# A task that loads nothing and steps in microseconds; `width` makes another model of it.
TINY = """
import torch


class Tiny:
    name, metric, better, target = "tiny", "loss", "lower", None

    def __init__(self, width=4, seed=0):
        self.width = width

    def model(self):
        return torch.nn.Linear(3, self.width)

    def samples(self, member, members):
        return 10 + member

    def batches(self, member, members, batch, seed):
        generator = torch.Generator().manual_seed(seed * 1000 + member)
        while True:
            yield (torch.randn(batch, 3, generator=generator),)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def evaluate(self, model):
        return {"loss": float(model.weight.detach().square().sum())}
"""


def write_tiny(folder: Path, **tables: Any) -> str:
    """Write tiny.py and a job that names it into `folder`; returns the job file's name."""
    from edgetrain.files.toml import to_toml

    (folder / "tiny.py").write_text(TINY)
    (folder / "job.toml").write_text(to_toml({"task": "tiny:Tiny", **tables}))
    return "job.toml"


def environment(**more: str) -> dict[str, str]:
    """This process's environment, one thread a process; this checkout comes before others."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def _popen(program: Sequence[str] | None) -> tuple[type[subprocess.Popen[str]], Sequence[str]]:
    return (Forked, EDGETRAIN) if program is None else (subprocess.Popen, program)


def edgetrain(
    *words: str, cwd: Path, timeout: float = 240, program: Sequence[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. `timeout`: seconds on an idle machine (patience.py)."""
    popen, start = _popen(program)
    with popen(
        [*start, *words],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said = process.communicate(timeout=patience(timeout))
        except subprocess.TimeoutExpired as over:
            process.kill()
            told = b"".join(each for each in (over.stdout, over.stderr) if each).decode()
            raise AssertionError(f"{words} is not done after {timeout:g} s:\n{told}") from None
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


class Running:
    """A command that is under way, with everything it started."""

    def __init__(self, words: Sequence[str], cwd: Path, program: Sequence[str] | None) -> None:
        self._mark = uuid.uuid4().hex
        self.said = ""
        popen, start = _popen(program)
        self.process = popen(
            [*start, *words],
            cwd=cwd,
            env=environment(**{_MARK: self._mark}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until(self, text: str) -> str:
        """Read what it says until a line has `text` in it; that line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if text in line:
                return line
        raise AssertionError(f"it ended ({self.process.wait()}) without '{text}':\n{self.said}")

    def finish(self, timeout: float = 60) -> int:
        """Read the rest and wait for the end; the exit status."""
        self.said += self.process.communicate(timeout=patience(timeout))[0]
        return self.process.returncode

    def press_ctrl_c(self) -> None:
        """As a terminal does: the signal goes to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def started(self) -> list[psutil.Process]:
        """The processes that are there because of this command, itself included."""
        return [each for each in psutil.process_iter() if self._is_ours(each)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.environ().get(_MARK) == self._mark:
                return True
            # What was forked, and has started no program since, shows the environment of another.
            session = os.getsid(process.pid) == self.process.pid
            return session and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def left_behind(self, patience_s: float = 15) -> list[psutil.Process]:
        """What still runs; processes that are ending get a while for it."""
        return psutil.wait_procs(self.started(), timeout=patience(patience_s))[1]

    def workers(self) -> list[psutil.Process]:
        """Of `edgetrain run`: the hub's process, then the members', in order."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        forked = [c for c in children if c.ppid() != self.process.pid and "forkserver" in _line(c)]
        return sorted(forked, key=lambda c: (c.create_time(), c.pid))

    def end(self) -> None:
        """Kill whatever is left of it."""
        for each in self.started():
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


@contextmanager
def running(*words: str, cwd: Path, program: Sequence[str] | None = None) -> Iterator[Running]:
    """A command under way, forked unless there is a `program`; nothing is left after the block."""
    command = Running(words, cwd, program)
    try:
        yield command
    finally:
        command.end()


@contextmanager
def hub(
    *words: str, cwd: Path, program: Sequence[str] | None = None
) -> Iterator[tuple[Running, str]]:
    """A hub on a free port of this machine, and the address it says members join."""
    here = "--bind", "tcp://localhost:0"
    with running("hub", *words, *here, cwd=cwd, program=program) as command:
        yield command, command.until("members join").split()[-1]
