"""Chaos with real processes, in small: the benchmark itself, with a schedule in which a message
arrives damaged, its sender is killed and starts anew under its name, and the disk is full."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "processes.py"


@contextlib.contextmanager
def started(*words):
    """In a process group of its own, none of which may be left in the end."""
    running = subprocess.Popen(
        [sys.executable, str(PROGRAM), *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with running:
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def test_every_law_holds_whatever_happens_to_processes():
    with started("--schedules", "1", "--seed", "1") as running:
        said, _ = running.communicate(timeout=100)
        assert running.returncode == 0, said
        assert said.startswith("1 of 1, 0 broke a law\n1 schedules, 5 things went wrong, 70 rounds")


def test_who_is_interrupted_leaves_no_process_behind():
    with started("--schedules", "2", "--at-once", "2") as running:
        until = time.monotonic() + 60
        while not (born := of_group(running.pid, "--bind")):  # a hub
            assert time.monotonic() < until
            assert running.poll() is None
        os.kill(running.pid, signal.SIGINT)
        said, _ = running.communicate(timeout=60)
        assert said == "interrupted: 0 schedules, 0 things went wrong, 0 rounds: every law held\n"
        assert running.returncode == 1
        while left := of_group(running.pid, ""):  # multiprocessing's helpers end by themselves
            assert time.monotonic() < until, (left, born)


def of_group(group, word):
    """The processes of a group whose command has this word, by their numbers."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == group:
                command = (entry / "cmdline").read_text()
                found += [entry.name] if word in command and command else []
    return found
