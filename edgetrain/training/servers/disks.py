"""Disks of servers: whether all ranks see the leader's, and files that go from one to another."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

_CHUNK = 1 << 24


class Disks:
    """Which ranks see the run folder of the leader, rank 0. All ranks make one together. Files go
    over `group`, which has all ranks; None: the default one."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._rank = group, dist.get_rank()
        token = torch.zeros(1, dtype=torch.int64)
        if self._rank == 0:
            token[0] = secrets.randbits(62)
            mark = folder / f".seen-{int(token)}"
            mark.touch()
        dist.broadcast(token, 0)
        self.sees = (folder / f".seen-{int(token)}").exists()
        """Whether this rank sees it."""
        seen = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        seen[self._rank] = self.sees
        dist.all_reduce(seen)
        self._blind = [rank for rank, sees in enumerate(seen.tolist()) if not sees]
        if self._rank == 0:
            mark.unlink(missing_ok=True)

    @property
    def are_one(self) -> bool:
        return not self._blind

    def collect(self, folder: Path, pattern: str) -> None:
        """Bring the files of ranks that do not see the leader's disk to its `folder`: those in
        their own with names like `pattern`, in which {rank} is theirs. All ranks call it. OSError
        if the leader's disk refuses one; no rank waits for it then."""
        for rank in self._blind:
            if self._rank == rank:
                self._send(sorted(folder.glob(pattern.format(rank=rank))), 0)
            elif self._rank == 0:
                self._receive(folder, rank)

    def spread(self, folder: Path, into: Path) -> None:
        """Give the files of the leader's `folder` to each rank that does not see them, in its
        folder `into`. All ranks call it."""
        for rank in self._blind:
            if self._rank == 0:
                self._send(sorted(path for path in folder.iterdir() if path.is_file()), rank)
            elif self._rank == rank:
                into.mkdir(parents=True, exist_ok=True)
                self._receive(into, 0)

    def _send(self, paths: Sequence[Path], to: int) -> None:
        """A list of names and sizes as JSON, never as a pickle, and then the files."""
        told = json.dumps([(path.name, path.stat().st_size) for path in paths]).encode()
        self._send_bytes(len(told).to_bytes(8, "little"), to)
        self._send_bytes(told, to)
        for path in paths:
            with path.open("rb") as file:
                for count in _chunks(path.stat().st_size):
                    self._send_bytes(file.read(count), to)

    def _receive(self, folder: Path, source: int) -> None:
        size = int.from_bytes(self._receive_bytes(8, source), "little")
        problem: OSError | None = None
        for name, length in json.loads(self._receive_bytes(size, source)):
            chunks = (self._receive_bytes(count, source) for count in _chunks(length))
            try:
                with (folder / Path(name).name).open("wb") as file:
                    file.writelines(chunks)
            except OSError as error:
                problem = error
            for _ in chunks:
                pass  # the sender would wait
        if problem is not None:
            raise problem

    def _send_bytes(self, content: bytes, to: int) -> None:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.send(tensor, to, group=self._group)

    def _receive_bytes(self, count: int, source: int) -> bytes:
        found = torch.empty(count, dtype=torch.uint8)
        dist.recv(found, source, group=self._group)
        return found.numpy().tobytes()


def _chunks(size: int) -> Iterator[int]:
    while size > 0:
        yield min(size, _CHUNK)
        size -= _CHUNK
