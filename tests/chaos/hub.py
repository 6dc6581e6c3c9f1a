"""A job's hub as a process of its own that is watched, killed and resumed.

`HubProcess` is the parent's side; `main` is what runs in the process: `training.hub`, with a clock
that can jump. Its request comes as JSON:

    python -m chaos.hub PARENT CLOCK REQUEST
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from chaos.clock import Clock
from edgetrain.errors import EdgetrainError
from edgetrain.fleet import interpreters
from edgetrain.fleet.networks.emulation import linux
from edgetrain.jobs import reading
from edgetrain.training.hub import HubRequest, serve_job
from edgetrain.training.stopping import Stop

OURS = (sys.executable, "-m", "chaos.hub")
"""The program that serves the hub, unless a test wants another one."""


def free_port() -> int:
    """A TCP port of this machine that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class HubProcess:
    """A hub in a process of its own, in the folder `cwd`, and the lines that it has said.

    The lines are also appended to `cwd`/hub.log. Its clock is the file `cwd`/hub.clock. The kernel
    kills it when the thread that made it ends. `said` are (time.monotonic(), line).
    """

    def __init__(self, cwd: Path, request: HubRequest, program: Sequence[str] = OURS) -> None:
        self.said: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self._log = cwd / "hub.log"
        command = [*program, str(os.getpid()), str(cwd / "hub.clock"), to_json(request)]
        self.process = subprocess.Popen(
            command, cwd=cwd, env=interpreters.environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            process_group=0,  # Ctrl-C goes to a terminal's whole group: the parent alone decides
        )  # fmt: skip
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, self._log.open("a", encoding="utf-8") as log:
            for line in lines:
                self.said.append((time.monotonic(), line.strip()))
                log.write(line)
                log.flush()

    def when(self, text: str, count: int = 1, patience_s: float = 60.0) -> float:
        """Wait for the `count`-th line that contains `text`; its time, by time.monotonic().

        Raises EdgetrainError if the process ends, or `patience_s` pass, before that line.
        """
        until = time.monotonic() + patience_s
        while True:
            ended = self.process.poll() is not None and not self._listening.is_alive()
            found = [at for at, line in list(self.said) if text in line]
            if len(found) >= count:
                return found[count - 1]
            if ended or time.monotonic() > until:
                last = " / ".join(line for _, line in self.said[-5:])
                raise EdgetrainError(f"the hub did not say '{text}', but: {last or 'nothing'}")
            time.sleep(0.002)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end. Works twice."""
        self.process.kill()
        self.process.wait()
        self._listening.join()


def to_json(request: HubRequest) -> str:
    """The request as text, for `from_json`."""
    return json.dumps({**asdict(request), "job": request.job.to_dict()}, default=str)


def from_json(text: str) -> HubRequest:
    """The request that `to_json` wrote; ConfigError for a job that cannot be."""
    table = json.loads(text)
    folders = {
        name: Path(table[name])
        for name in ("keys", "journal", "resume", "runs", "beside")
        if isinstance(table[name], str)
    }
    return HubRequest(**{**table, **folders, "job": reading.parse(table["job"])})


def main(words: Sequence[str]) -> int:
    """What runs in the process: a hub by a clock that can jump, its lines on stdout."""
    parent, clock, request = words
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    log = logging.getLogger("edgetrain.hub")
    log.setLevel(logging.INFO)
    try:
        with Stop().installed() as stop:
            serve_job(from_json(request), stop, log.info, log.warning, Clock(Path(clock)))
    except EdgetrainError as error:
        log.error("edgetrain: %s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
