"""`edgetrain hub` as a process that is watched, killed and resumed.

The parent's side, and what runs in the process: the command itself, with another clock.

    python -m edgetrain.training.chaos.hub PARENT CLOCK WORDS…
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from edgetrain.errors import EdgetrainError
from edgetrain.fleet.catalog import PACKAGE_PARENT

OURS = (sys.executable, "-m", "edgetrain.training.chaos.hub")
"""The program that a hub is, unless another one is wanted."""


def free_port() -> int:
    """A port of this machine that nothing listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class HubProcess:
    """A hub with these words on its command line, in the folder `cwd`, and when it said what.

    What it says is added to `cwd`/hub.log. Its clock is the file `cwd`/hub.clock. It is killed when
    the thread that made it ends, however that comes about.
    """

    def __init__(self, cwd: Path, *words: str, program: Sequence[str] = OURS) -> None:
        self.said: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self._log = cwd / "hub.log"
        command = [*program, str(os.getpid()), str(cwd / "hub.clock"), *words]
        self.process = subprocess.Popen(
            command, cwd=cwd, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
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
        """When it said so for the `count`-th time, by time.monotonic(); waits for it.

        Raises EdgetrainError when it has ended, or `patience_s` have passed, without.
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
        """SIGKILL; returns when it is over. Works twice."""
        self.process.kill()
        self.process.wait()
        self._listening.join()


def _environment() -> dict[str, str]:
    """In another folder the same edgetrain is found."""
    paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main(words: Sequence[str]) -> int:
    """What runs in the process: `edgetrain hub`, by a clock that can jump."""
    from edgetrain.cli import hub
    from edgetrain.cli.parser import parser
    from edgetrain.fleet.networks.emulation import linux
    from edgetrain.training.chaos.clock import Clock

    parent, clock, *rest = words
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    try:
        return hub.run(parser().parse_args(["hub", *rest]), Clock(Path(clock)))
    except EdgetrainError as error:
        print(f"edgetrain: {error}", flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
