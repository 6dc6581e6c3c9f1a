"""The program that runs a server's ranks: `python -m edgetrain.training.servers.agent`.

It reads JSON lines from its input and writes JSON lines to its output; whoever holds the other ends
(a run on the same machine, or one that came over ssh) decides. Without torch: its ranks import it.

    read                                    written
    -                                       {"ready": {"edgetrain": …, "torch": …}}
    {"start": {…}, "ranks": [0, 1]}         {"began": seconds ago}, {"ended": rank, "code": …}
    {"stop": number}                        {"stopped": number}
    (end of input)                          (all ranks are ended, and the agent with them)
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import socket
import sys
import threading
from importlib import metadata
from multiprocessing import forkserver
from typing import Any, TextIO

from edgetrain import __version__
from edgetrain.errors import EdgetrainError
from edgetrain.training.servers.attempt import Attempt
from edgetrain.training.servers.here import Here
from edgetrain.training.servers.interfaces import check_interface, interface_towards

POLL_S = 0.05


def versions() -> dict[str, str]:
    """Versions required to be equal on all servers."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return {"edgetrain": __version__, "torch": torch, "python": platform.python_version()}


class Agent:
    """The ranks of one server, as somebody else commands."""

    def __init__(self, answers: TextIO) -> None:
        self._answers, self._here = answers, Here()
        self._told: set[int] = set()
        self._number, self._began = -1, False

    def say(self, **message: Any) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def obey(self, message: dict[str, Any]) -> None:
        """Do what a line says."""
        if "start" in message:
            attempt = Attempt.of(message["start"])
            self._number, self._began = attempt.number, False
            self._told.clear()
            interface = message.get("interface", "")
            try:
                if interface:
                    check_interface(interface)
                else:
                    interface = interface_towards(attempt.host)
                self._here.start(attempt, message["ranks"], interface)
            except EdgetrainError as error:
                for rank in message["ranks"]:
                    self._told.add(rank)
                    self.say(ended=rank, code=2, error=str(error), number=self._number)
        if "stop" in message:
            self._here.stop()
            self.say(stopped=message["stop"])

    def look(self) -> None:
        elapsed = self._here.elapsed_s
        if elapsed is not None and not self._began:
            self._began = True
            self.say(began=elapsed)
        for rank, end in self._here.ended().items():
            if rank not in self._told:
                self._told.add(rank)
                self.say(ended=rank, code=end.code, error=end.error, number=self._number)

    def close(self) -> None:
        self._here.close()


def serve(commands: TextIO, answers: TextIO) -> None:
    """Obey until the input ends."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in commands:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    agent = Agent(answers)
    forkserver.ensure_running()  # it imports torch in the background, before there are ranks
    agent.say(ready=versions() | {"host": socket.gethostname()})
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=POLL_S)
                if not line:
                    return
                agent.obey(json.loads(line))
            agent.look()
    except BrokenPipeError:
        return
    finally:
        agent.close()


def main() -> None:
    """Serve on standard input and output; what ranks print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
    # Not through Python's shutdown, which would wait for the thread that reads.
    os._exit(0)


if __name__ == "__main__":
    main()
