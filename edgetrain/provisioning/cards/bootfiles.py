"""The files of a card's boot partition (FAT), through mtools: nothing is mounted."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.provisioning.cards.looking import Partition, find_program

Content = bytes | Path
"""Content of a file: its bytes, or a file of this machine that has them."""
SPARE = 1 << 20
"""Bytes that stay free: folders and half-filled clusters take some."""
_ENVIRONMENT = {"MTOOLSRC": "/dev/null", "LC_ALL": "C"}


class BootFiles:
    """The FAT file system at an offset of a card. Methods raise ConfigError."""

    def __init__(self, path: str, partition: Partition) -> None:
        self._image = f"{path}@@{partition.start}"

    def read(self, name: str) -> bytes | None:
        done = self._run("mcopy", "-n", f"::{name}", "-")
        return done.stdout if not done.returncode else None

    def free(self) -> int:
        done = self._run("mdir", "::")
        match = re.search(rb"([\d ]+) bytes free", done.stdout)
        if done.returncode or not match:
            raise ConfigError("the boot partition cannot be read", _said(done))
        return int(match[1].replace(b" ", b""))

    def write(self, files: Mapping[str, Content]) -> None:
        """Write files, in place of those of the same name. Folders are made.

        Raises ConfigError before anything is written if there is not enough space.
        """
        sizes = [c.stat().st_size if isinstance(c, Path) else len(c) for c in files.values()]
        need, free = sum(sizes) + SPARE, self.free()
        if need > free + sum(len(self.read(name) or b"") for name in files if need > free):
            raise ConfigError(
                f"the boot partition has {free / 1e6:.0f} MB free, and "
                f"{need / 1e6:.0f} MB are needed",
                "an image with a larger boot partition, or less data",
            )
        for folder in sorted({name.rpartition("/")[0] for name in files} - {""}):
            self._run("mmd", "-D", "s", f"::{folder}")
        for name, content in files.items():
            source = str(content) if isinstance(content, Path) else "-"
            data = content if isinstance(content, bytes) else None
            done = self._run("mcopy", "-o", source, f"::{name}", data=data)
            if done.returncode:
                raise ConfigError(f"cannot write {name} to the boot partition", _said(done))

    def check(self, files: Mapping[str, Content]) -> None:
        """Read files back. Raises ConfigError for the first that is not what was written.

        What a file was to be is hashed while it is read.
        """
        with ThreadPoolExecutor(1) as pool:
            meant = [(name, pool.submit(_digest, content)) for name, content in files.items()]
            for name, digest in meant:
                if self._digest_of(name) != digest.result():
                    raise ConfigError(f"{name} did not read back from the card", "throw it away")

    def _digest_of(self, name: str) -> bytes | None:
        digest = hashlib.sha256()
        with subprocess.Popen(
            self._words("mcopy", "-n", f"::{name}", "-"), bufsize=0, env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            while data := process.stdout.read(1 << 20):
                digest.update(data)
        return None if process.returncode else digest.digest()

    def _run(
        self, name: str, *words: str, data: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self._words(name, *words), input=data or b"", capture_output=True, timeout=600,
            check=False, env=_ENVIRONMENT,
        )  # fmt: skip

    def _words(self, name: str, *words: str) -> list[str]:
        program = find_program(name)
        if program is None:
            raise ConfigError(f"{name} is not installed", "apt install mtools")
        return [program, "-i", self._image, *words]


def _digest(content: Content) -> bytes:
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
