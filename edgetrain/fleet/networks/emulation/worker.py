"""An emulator's process: how it is started, receives commands, and ends with its parent.

The parent writes lines to the worker's stdin and reads JSON lines from its stdout. The worker ends
when stdin closes, when it gets another parent, or when the kernel signals the parent's death,
whichever comes first; so it ends even if the parent is killed by SIGKILL. Does not know network
profiles.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from edgetrain.errors import EdgetrainError, NetworkError
from edgetrain.fleet import interpreters
from edgetrain.fleet.networks.emulation import linux

_READY_SECONDS = 20.0
_STOP_SECONDS = 5.0
_DYING_SECONDS = 0.05


class Worker:
    """The parent's end. `ready` is the first answer. `close` may be called twice."""

    def __init__(self, module: str, config: Mapping[str, Any]) -> None:
        self._module = module
        # The kernel's death signal depends on the thread that started the process, so it must not
        # be requested by a thread that may end before the process.
        lasting = threading.current_thread() is threading.main_thread()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), str(int(lasting))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=interpreters.environment(),
        )
        try:
            self._write(json.dumps(config))
            self.ready = self.read_answer(_READY_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, seconds: float = _STOP_SECONDS) -> dict[str, Any]:
        """Send one command and wait for its answer. NetworkError if the worker has ended."""
        self.send(command)
        return self.read_answer(seconds)

    def send(self, command: str) -> None:
        """Send one command; `read_answer` waits for its answer."""
        self._write(command)

    def close(self) -> None:
        """Let the worker end, kill it if it does not; all that it holds ends with it."""
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise NetworkError(f"{self._module} has ended (exit code {self._exit()})") from None

    def read_answer(self, seconds: float) -> dict[str, Any]:
        """Wait for the next answer. NetworkError if the worker has ended or reports an error."""
        assert self._process.stdout is not None
        fd, line, until = self._process.stdout.fileno(), b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise NetworkError(f"{self._module} did not answer within {seconds:g} s")
            piece = os.read(fd, 1 << 20)
            if not piece:
                raise NetworkError(f"{self._module} has ended (exit code {self._exit()})")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NetworkError(answer["error"], answer.get("hint", ""))
        return answer

    def _exit(self) -> int | None:
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None


class Parent:
    """The worker's end: reads commands from stdin, writes answers to stdout.

    Call `config()`, then `answer(...)`; then register `fd` for reading, call `commands()` when it
    is readable, and `gone()` at least twice a second.
    """

    def __init__(self) -> None:
        self._pid, lasting = int(sys.argv[1]), sys.argv[2] == "1"
        if lasting:
            linux.die_with_parent(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._end)
        # Ctrl-C goes to all processes of a terminal; the parent decides when its emulator ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.fd = sys.stdin.fileno()
        self._rest = b""
        self._closed = False

    def config(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            piece = os.read(self.fd, 1 << 16)
            if not piece:
                sys.exit(0)
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        os.set_blocking(self.fd, False)
        loaded: dict[str, Any] = json.loads(line)
        return loaded

    def answer(self, message: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Start `what` in this block: an error is reported to the parent and ends the process."""
        try:
            yield
        except OSError as error:
            self.answer({"error": f"{what} did not start: {error}"})
            sys.exit(1)
        except EdgetrainError as error:
            self.answer({"error": error.message, "hint": error.hint})
            sys.exit(1)

    def commands(self) -> list[str]:
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self.fd, 1 << 16)
            self._closed = self._closed or not piece
            self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]

    def _end(self, *_: object) -> None:
        self._closed = True

    def gone(self) -> bool:
        return self._closed or os.getppid() != self._pid

    def died(self) -> bool:
        """Return whether the parent died without closing the worker. Call it after `gone`."""
        if os.getppid() == self._pid:
            time.sleep(_DYING_SECONDS)  # a dying parent's descriptors close before its process ends
        return os.getppid() != self._pid
