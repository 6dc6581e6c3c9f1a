"""Processes and networks that end with the one that started them, however that ends.

SIGTERM and SIGKILL end a test runner without its fixtures. A guest consists of many processes, some
of them stopped and traced: here they are one process namespace, which the kernel kills as a whole
when its first process dies; and that one dies with its parent. A network has no name and no file:
it is gone with the last process in it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_PARENT_ENDS = ("setpriv", "--pdeathsig", "KILL")


def why_not() -> str:
    """Why nothing can be held here; "" if it can."""
    lacking = [tool for tool in ("setpriv", "unshare", "nsenter") if not shutil.which(tool)]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    done = subprocess.run(held(["true"]), capture_output=True, text=True, check=False)
    return done.stderr.strip()


def held(words: list[str]) -> list[str]:
    """A command that is killed, with all that it started, when the thread that starts it ends.

    Needs root. SIGKILL of it does the same."""
    own = ("unshare", "--pid", "--fork", "--kill-child=KILL")
    # The shell stays: it is the namespace's first process, to which signals mean little.
    return [*_PARENT_ENDS, *own, "sh", "-c", '"$@"; exit $?', "sh", *words]


@dataclass(frozen=True)
class Space:
    """A network namespace, by a process in it."""

    process: int

    def within(self, *words: str) -> list[str]:
        """The command, with its network in here."""
        return ["nsenter", f"--net=/proc/{self.process}/ns/net", *words]


@contextlib.contextmanager
def network() -> Iterator[Space]:
    """A network namespace of its own, for as long as this process lives at most."""
    words = [*_PARENT_ENDS, "unshare", "--net", "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.read(1), "no network namespace"
            yield Space(keeper.pid)
        finally:
            keeper.kill()
