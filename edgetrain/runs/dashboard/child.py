"""A dashboard beside a run: a process of its own, which ends when this one does, however it ends.

It is only started here: no web framework is loaded.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def dashboard_beside(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Show this run folder until the block ends. `say` is given the address, or why there is none,
    by a thread of its own as soon as it is known: nobody waits for it."""
    words = "dashboard", str(folder), "--bind", "127.0.0.1:0", "--until-stdin-ends"
    child = subprocess.Popen(
        [sys.executable, "-m", "edgetrain", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is this process's to answer
    )
    assert child.stdin is not None
    assert child.stdout is not None
    said = child.stdout

    def hand_on() -> None:
        with said:
            for line in said:
                say(line.rstrip())

    thread = threading.Thread(target=hand_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        child.stdin.close()
        try:
            child.wait(3.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        thread.join(1.0)
