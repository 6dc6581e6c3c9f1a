"""A `Remote` without ssh: each machine is a folder here, and commands run in it.

Paths in commands are relative to the folder, as they are to a home over ssh. Troubles are set by
name, and a connection can be cut after some bytes of a command's input.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from edgetrain.fleet.ssh import SshAnswer, SshHost, SshTrouble


class FolderRemote:
    """Machines as folders below one folder, by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.troubles: dict[str, SshTrouble] = {}
        """Machines that no command reaches, and why."""
        self.cuts: dict[str, int] = {}
        """Bytes of a command's input after which the connection is cut, once."""
        self.commands: list[tuple[str, list[str]]] = []
        """All commands so far, with the names of their machines."""

    def run(
        self,
        host: SshHost,
        words: Sequence[str],
        stdin: bytes | BinaryIO = b"",
        *,
        seconds: float = 60.0,
        root: bool = False,
        heard: Callable[[bytes], None] | None = None,
    ) -> SshAnswer:
        """See `Remote.run`. Nobody becomes root."""
        self.commands.append((host.name, list(words)))
        if trouble := self.troubles.get(host.name):
            return SshAnswer(-1, trouble=trouble)
        home = self.folder / host.name
        home.mkdir(parents=True, exist_ok=True)
        given = stdin if isinstance(stdin, bytes) else stdin.read()
        cut = self.cuts.pop(host.name, None) if given else None
        process = subprocess.Popen(
            list(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=home, env={"PATH": os.environ["PATH"], "HOME": str(home)}, start_new_session=True,
        )  # fmt: skip
        try:
            out, errors = process.communicate(given[:cut], seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return SshAnswer(-1, trouble=SshTrouble.TIMEOUT)
        if cut is not None:
            return SshAnswer(-1, trouble=SshTrouble.LOST)
        if heard is not None:
            heard(out)
            out = b""
        return SshAnswer(min(process.returncode % 256, 254), out, errors.decode())
