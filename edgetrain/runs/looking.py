"""Looking at a run beside it: `edgetrain dashboard` and `edgetrain track`, a process each.

They end when this one does, however it ends; whatever becomes of them, the run goes on. They are
only started here: no web framework and no tracker is loaded.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

NICE = 10
"""Added to the priority number: looking yields to whatever trains on this machine."""

FLAG = "--until-stdin-ends"
"""The option of verbs that end so."""


@contextlib.contextmanager
def beside(
    words: Sequence[str], say: Callable[[str], None], patience_s: float = 3.0, killed: str = ""
) -> Iterator[None]:
    """Run `edgetrain WORDS` until the block ends; it gets `patience_s` for that, and `killed` is
    said if it takes longer. `say` is given its lines by a thread of its own as they come: nobody
    waits for them."""
    child = subprocess.Popen(
        [sys.executable, "-m", "edgetrain", *words, FLAG],
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
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            if killed:
                say(killed)
        thread.join(1.0)


def when_stdin_ends(act: Callable[[], None]) -> None:
    """Call `act` when standard input ends: the process that holds its other end has ended, or wants
    no more. By a thread of its own."""

    def wait() -> None:
        while sys.stdin.buffer.read(1):
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()
