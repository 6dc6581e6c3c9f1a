"""Processes on this machine, from a preloaded fork server, that never outlive their parent.

Processes start quickly and share torch's memory, because they are forked from one process that has
imported it and done nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from edgetrain.errors import EdgetrainError, in_words, own_frames

_PR_SET_PDEATHSIG = 1


def fork_server(preload: Sequence[str]) -> ForkServerContext:
    """The context whose processes are forked from a server that has imported these modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


@dataclass
class Child:
    """A process that was started, and the error that it reported."""

    name: str
    process: ForkServerProcess
    _pipe: Connection
    error: str = ""
    """Its first line says what happened; frames may follow."""
    failed_at: float = 0.0
    """When it failed, by `time.monotonic`."""

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """None: it runs; 0: it succeeded; 1: a bug; 2: an EdgetrainError; negative: a signal."""
        self._read()
        return self.process.exitcode

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while not self.error and self._pipe.poll():
                self.failed_at, self.error = self._pipe.recv()

    def stop(self, grace_s: float = 3.0) -> None:
        """End it: SIGTERM, then SIGKILL after `grace_s`. Works twice."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(grace_s)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self._read()
        self._pipe.close()


def start(
    context: ForkServerContext, name: str, target: Callable[..., None], *arguments: Any
) -> Child:
    """Start `target(*arguments)` in its own process; `target` is a module's function."""
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(
        target=_run, args=(writer, os.getpid(), target, arguments), name=name, daemon=True
    )
    process.start()
    writer.close()
    return Child(name, process, reader)


def stop_all(children: Sequence[Child], grace_s: float = 3.0) -> None:
    """End all of them at the same time: SIGTERM, then SIGKILL after `grace_s`."""
    for child in children:
        if child.running:
            child.process.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        child.stop(0.1)


def _run(
    pipe: Connection, parent: int, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    # Ctrl-C reaches the terminal's whole process group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_the_server()
    if not _alive(parent):
        os._exit(1)
    try:
        target(*arguments)
    except EdgetrainError as error:
        pipe.send((time.monotonic(), str(error)))
        raise SystemExit(2) from None
    except Exception as error:
        told = in_words(error)
        if not own_frames(error):  # the user's code has no part in it: say where it comes from
            told += "\n" + "".join(traceback.format_tb(error.__traceback__))
        pipe.send((time.monotonic(), told))
        raise SystemExit(1) from None


def _die_with_the_server() -> None:
    """Have this process killed when the fork server ends, which ends when its parent has ended.

    The server notices that by a pipe. Each forked process inherits the pipe's other end, so that it
    can use the server too; the server would live on while any process holds it.
    """
    alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
        setattr(forkserver._forkserver, "_forkserver_alive_fd", None)  # noqa: B010  # not in typeshed
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
