"""A server's agent as the run that commands it sees it: a program here, or behind the system's ssh.

state      event                                   next state
starting   it says that it is ready                ready
starting   other versions; START_S seconds         gone
ready      its output ends (killed, or ssh lost)   gone
gone       RETRY_S seconds                         starting, by a new one
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from edgetrain.fleet import ssh
from edgetrain.fleet.cluster import LOCAL_HOSTS, ServerEntry
from edgetrain.training.servers.agent import versions
from edgetrain.training.servers.attempt import Attempt, RankEnd

START_S, STOP_S = 60.0, 10.0
AGENT = "edgetrain.training.servers.agent"


def argv_of(entry: ServerEntry) -> list[str]:
    if entry.host in LOCAL_HOSTS:
        return [entry.python or sys.executable, "-m", AGENT]
    python = shlex.quote(entry.python or "python3")
    return ssh.argv(entry.host, f"exec {python} -m {AGENT}")


class There:
    """The agent of one server, and the ranks that it runs."""

    def __init__(self, entry: ServerEntry) -> None:
        """Started, and not waited for."""
        self.entry, self.is_ready = entry, False
        self._started_at = time.monotonic()
        self._trains_since: float | None = None
        self._closed = threading.Event()
        self._ended: dict[int, RankEnd] = {}
        self._number, self._stopped = -1, -1
        self._refused, self._said = "", deque[str](maxlen=20)
        self._process = subprocess.Popen(
            argv_of(entry), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        self._readers = [
            threading.Thread(target=target, daemon=True) for target in (self._read, self._listen)
        ]
        for reader in self._readers:
            reader.start()

    # -- what it says --------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    self._hear(json.loads(line))
                except (ValueError, TypeError, KeyError):
                    self._said.append(line.strip())  # of a login shell
        self._closed.set()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if line.strip():
                    self._said.append(line.strip())

    def _hear(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._refused = disagreement(self.entry, message["ready"])
            self.is_ready = not self._refused
        elif "began" in message:
            self._trains_since = time.monotonic() - float(message["began"])
        elif "stopped" in message:
            self._stopped = int(message["stopped"])
        elif message["number"] == self._number:
            self._ended[int(message["ended"])] = RankEnd(
                int(message["code"]), str(message["error"])
            )

    @property
    def gone(self) -> bool:
        """Whether it has ended, or says the wrong things."""
        late = not self.is_ready and time.monotonic() - self._started_at > START_S
        return self._closed.is_set() or bool(self._refused) or late

    @property
    def problem(self) -> str:
        if self._refused:
            return self._refused
        told = f": {self._said[-1]}" if self._said else ""
        if not self.is_ready and not self._closed.is_set():
            return f"server '{self.entry.name}' does not answer within {START_S:g} s{told}"
        verb = "was lost" if self.is_ready else f"cannot be reached at {self.entry.host}"
        return f"server '{self.entry.name}' {verb}{told}"

    @property
    def is_refused(self) -> bool:
        """Whether what it runs is not what runs here."""
        return bool(self._refused)

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since training began, if the leader, rank 0, is there; None: it has not."""
        since = self._trains_since
        return None if since is None else time.monotonic() - since

    def ended(self) -> dict[int, RankEnd]:
        return dict(self._ended)

    # -- what it is told -----------------------------------------------------------------------

    def start(self, attempt: Attempt, ranks: Sequence[int]) -> None:
        self._number, self._trains_since = attempt.number, None
        self._ended.clear()
        self._tell(start=attempt.plain(), ranks=list(ranks), interface=self.entry.interface)

    def stop(self) -> None:
        """End all ranks, and wait until they have."""
        self._tell(stop=self._number)
        deadline = time.monotonic() + STOP_S
        while self._stopped != self._number and not self.gone and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """End the agent: it ends its ranks when its input ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # What ssh left behind may keep a pipe open: each reader closes its own when that ends.
        for reader in self._readers:
            reader.join(1.0)

    def _tell(self, **message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # that it is gone is seen when its output ends
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


def disagreement(entry: ServerEntry, theirs: dict[str, str]) -> str:
    """What of the versions of a server is not as here, in a line; "": nothing. Builds of torch
    for CPUs and for CUDA talk to each other; other versions do not."""
    ours = versions()
    for name in ("edgetrain", "torch"):
        mine, other = (re.sub(r"\+.*", "", each.get(name, "none")) for each in (ours, theirs))
        if mine != other:
            return (
                f"server '{entry.name}' has {name} {other}, and this machine {mine} "
                f"(install {name}=={mine} there)"
            )
    return ""
