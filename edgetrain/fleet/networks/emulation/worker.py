"""An emulator's process: how it is started, asked, and made to end with its parent.

The parent writes lines to the worker's stdin and reads JSON lines from its stdout. The worker ends
when stdin closes, when its parent is no longer its parent, and when the kernel says that the parent
died; the first of the three wins, so nothing outlives a SIGKILL. No network profile is known here.
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
    """The parent's end. `ready` is the first answer; `close` works twice."""

    def __init__(self, module: str, config: Mapping[str, Any]) -> None:
        self._module = module
        # The kernel's death signal follows the thread that started the process, so a thread that
        # may end before the process does must not ask for it.
        lasting = threading.current_thread() is threading.main_thread()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), str(int(lasting))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=interpreters.environment(),
        )
        try:
            self._write(json.dumps(config))
            self.ready = self._read(_READY_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, seconds: float = _STOP_SECONDS) -> dict[str, Any]:
        """Send one command and wait for its answer. NetworkError where the worker has ended."""
        self.tell(command)
        return self.answer(seconds)

    def tell(self, command: str) -> None:
        """Send one command; `answer` waits for what it brings."""
        self._write(command)

    def answer(self, seconds: float) -> dict[str, Any]:
        return self._read(seconds)

    def close(self) -> None:
        """Let the worker end by itself, then make it; everything it held ends with it."""
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

    def _read(self, seconds: float) -> dict[str, Any]:
        """One JSON line, whatever pieces it comes in."""
        assert self._process.stdout is not None
        fd, line, until = self._process.stdout.fileno(), b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise NetworkError(f"{self._module} gave no answer within {seconds:g} s")
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
    """The worker's end: commands come in on stdin, answers leave on stdout.

    Use: `config = parent.config()`, `parent.answer(...)`, then register `parent.fd` for reading and
    call `commands()` when it is readable, `gone()` at least twice a second.
    """

    def __init__(self) -> None:
        self._pid, lasting = int(sys.argv[1]), sys.argv[2] == "1"
        if lasting:
            linux.die_with_parent(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._end)
        # Ctrl-C goes to the whole terminal; the parent decides when its emulator ends.
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
        """Tell the parent of an error within the block, and end: `what` could not be started."""
        try:
            yield
        except OSError as error:
            self.answer({"error": f"{what} did not start: {error}"})
            sys.exit(1)
        except EdgetrainError as error:
            self.answer({"error": error.message, "hint": error.hint})
            sys.exit(1)

    def commands(self) -> list[str]:
        """The commands that have come in whole."""
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self.fd, 1 << 16)
            self._closed = self._closed or not piece
            self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]

    def _end(self, *_: object) -> None:
        self._closed = True

    def gone(self) -> bool:
        """True once the worker should end."""
        return self._closed or os.getppid() != self._pid

    def died(self) -> bool:
        """True where the parent did not say goodbye but is no more. Asked after `gone`."""
        if os.getppid() == self._pid:
            time.sleep(_DYING_SECONDS)  # its descriptors close before it stops being our parent
        return os.getppid() != self._pid
