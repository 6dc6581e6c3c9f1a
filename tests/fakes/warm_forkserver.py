"""Commands forked from a process that has imported torch: each saves seconds of imports.

`Forked` is a `subprocess.Popen`. What it starts has its own pid, session, folder, environment and
streams, like `python -m edgetrain`. Its parent is this file, run as a program: it computes nothing,
has one thread, and ends with the process that started it, and its children with it. A test of
start-up, imports, encodings or memory needs an interpreter of its own instead, and so does one that
changes the umask or a limit of its own process, which a forked command does not inherit.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing import util
from pathlib import Path
from typing import Any

_PRELOAD = (
    "torch",
    "torch._dynamo",  # the first optimizer of a process imports it
    "matplotlib.pyplot",
    "edgetrain.cli.hub",
    "edgetrain.cli.member",
    "edgetrain.cli.run",
    "edgetrain.exchange.hub.serve",
    "edgetrain.jobs.placement.decision",
    "edgetrain.runs.reports.live.view",
    "edgetrain.runs.reports.page.document",
    "edgetrain.training.emulated",
    "edgetrain.training.hub",
    "edgetrain.training.member.joining",
    "edgetrain.training.servers.process",
    "edgetrain.training.member.train",
)
_WITH_FORK_SERVER = {"run", "sweep"}
"""Verbs that start multiprocessing's fork server, which is forked from here, too."""
_READ_ONCE = ("PYTHON", "LANG", "LC_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", "LD_", "MPL", "TZ")
"""Prefixes of the variables that an interpreter or its modules read at their start."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST = 200_000
"""Bytes of a request, most of which are an environment."""


# -- the process of the tests ---------------------------------------------------------------------


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A command under way; args: [sys.executable, "-m", module, *words]."""

    server: subprocess.Popen[bytes] | None = None
    _lock = threading.Lock()
    _door: socket.socket
    _read_once: dict[str, str]
    _status: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(super()._execute_child).bind(*given).arguments
        env = dict(os.environ if call["env"] is None else call["env"])
        if not self._is_warm_for(env):
            super()._execute_child(*given)
            return
        pipes = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if fd == -1 else fd for number, fd in enumerate(pipes)]
        cwd = str(Path(call["cwd"] or ".").absolute())
        request = [call["args"], cwd, env, call["start_new_session"]]
        self._status, theirs = socket.socketpair()
        with theirs:
            text = json.dumps(request).encode()
            socket.send_fds(self._door, [text], [*streams, theirs.fileno()])
        self.pid = int(self._status.recv(16))
        self._child_created = True
        names = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
        self._close_pipe_fds(*(call[name] for name in names))

    @classmethod
    def _is_warm_for(cls, env: dict[str, str]) -> bool:
        """Whether the server read what a command with this environment would; start it first."""
        read = {name: value for name, value in env.items() if name.startswith(_READ_ONCE)}
        with cls._lock:
            if cls.server is None:
                cls._read_once = read
                cls._door, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
                with theirs:
                    cls.server = subprocess.Popen(
                        [sys.executable, __file__, str(theirs.fileno())],
                        env={**os.environ, **read}, pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    )  # fmt: skip
                atexit.register(cls._end, cls.server, cls._door)
        return read == cls._read_once

    @staticmethod
    def _end(server: subprocess.Popen[bytes], door: socket.socket) -> None:
        door.close()
        server.communicate()

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*given, **named)
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._wait(None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._status is None:
            return super()._wait(timeout)
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._status:  # the server that ended has taken the command along
                self.returncode = int(self._status.recv(16) or -signal.SIGKILL)
        return self.returncode


# -- the server, and the commands that are forked from it -----------------------------------------


def serve(door: socket.socket) -> tuple[list[Any], list[int]]:
    """Fork a child per request until the door closes. Returns in each child: request, streams."""
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "threads do not survive a fork"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    # What commands leave behind is reaped here, and its CPU time counted.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    waiting: dict[int, socket.socket] = {}
    while True:
        ready = select.select([door, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap(waiting)
        if door in ready:
            text, fds, _, _ = socket.recv_fds(door, _MOST, 4)
            if not text:
                os._exit(0)
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                return json.loads(text), fds[:3]
            waiting[pid] = socket.socket(fileno=fds.pop())
            waiting[pid].send(str(pid).encode())
            for fd in fds:
                os.close(fd)


def _reap(waiting: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in waiting:
            with waiting.pop(pid) as end:
                end.send(str(os.waitstatus_to_exitcode(status)).encode())


def command(server: int, request: list[Any], streams: list[int]) -> None:
    """Be a new process of these arguments: [argv, cwd, env, new_session]."""
    argv, cwd, env, new_session = request
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
    for place, fd in enumerate(streams):
        os.dup2(fd, place)
        _open_stream(place)
    os.closerange(3, 1 + max(int(each.name) for each in Path("/proc/self/fd").iterdir()))
    if new_session:
        os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _start_anew(cwd, env)
    sys.orig_argv[:], sys.argv[:], sys.path[0] = argv, argv[2:], str(Path.cwd())
    if _WITH_FORK_SERVER & set(argv):
        _keep_fork_server()
    runpy.run_module(argv[2], run_name="__main__", alter_sys=True)


def _open_stream(place: int) -> None:
    """As an interpreter does: a stream knows whether it is a terminal's, or can be sought."""
    name, unbuffered = ("stdin", "stdout", "stderr")[place], sys.stdout.write_through
    old = getattr(sys, name)
    binary = open(place, f"{old.mode}b", 0 if unbuffered and place else -1, closefd=False)  # noqa: SIM115
    getattr(binary, "raw", binary).name = f"<{name}>"
    new = io.TextIOWrapper(
        binary, old.encoding, old.errors, "\n", write_through=unbuffered,
        line_buffering=not unbuffered and (place == 2 or binary.isatty()),
    )  # fmt: skip
    new.mode = old.mode
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def _start_anew(cwd: str, env: dict[str, str]) -> None:
    """What a process that was forked shares with others, and a new one does not."""
    import numpy as np
    import torch

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    np.random.seed()
    torch.default_generator.seed()


def _keep_fork_server() -> None:
    """Fork, before anything is computed or a thread is started, what can be this process's fork
    server: in place of an interpreter that imports all again. It is used once at most."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not (pid := os.fork()):
        ours.close()
        _be_fork_server(theirs)
    theirs.close()
    spawn = util.spawnv_passfds

    def instead(path: bytes, args: list[str], fds: list[int]) -> int:
        if "multiprocessing.forkserver" not in args[-1]:
            return spawn(path, args, fds)
        util.spawnv_passfds = spawn
        with ours:
            request = [args[-1], fds, str(Path.cwd()), dict(os.environ)]
            socket.send_fds(ours, [json.dumps(request).encode()], fds)
        return pid

    util.spawnv_passfds = instead


def _be_fork_server(door: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    text, fds, _, _ = socket.recv_fds(door, _MOST, 4)
    if not text:
        os._exit(0)
    code, places, cwd, env = json.loads(text)
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(places) + 1) for fd in fds]
    door.close()
    os.closerange(3, min(above))
    for fd, place in zip(above, places, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    _start_anew(cwd, env)
    sys.argv[:], sys.path[0] = ["-c"], ""
    exec(code, {"__name__": "__main__"})
    raise SystemExit


if __name__ == "__main__":
    command(os.getpid(), *serve(socket.socket(fileno=int(sys.argv[1]))))
