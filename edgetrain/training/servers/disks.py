"""Disks of servers: whether all ranks see the leader's, and files that go from one to another."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

_CHUNK = 1 << 24


class Disks:
    """Which ranks see the run folder of the leader, rank 0. All ranks make one together."""

    def __init__(self, folder: Path) -> None:
        self._rank = dist.get_rank()
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
        """Whether all ranks see the leader's folder."""
        return not self._blind

    def collect(self, folder: Path, pattern: str) -> None:
        """Bring the files of ranks that do not see the leader's disk to its `folder`: those in
        their own with names like `pattern`, in which {rank} is theirs. All ranks call it."""
        for rank in self._blind:
            if self._rank == rank:
                _send(sorted(folder.glob(pattern.format(rank=rank))), 0)
            elif self._rank == 0:
                _receive(folder, rank)

    def spread(self, folder: Path, into: Path) -> None:
        """Give the files of the leader's `folder` to each rank that does not see them, in its
        folder `into`. All ranks call it."""
        for rank in self._blind:
            if self._rank == 0:
                _send(sorted(path for path in folder.iterdir() if path.is_file()), rank)
            elif self._rank == rank:
                into.mkdir(parents=True, exist_ok=True)
                _receive(into, 0)


def _send(paths: Sequence[Path], to: int) -> None:
    dist.send_object_list([[(path.name, path.stat().st_size) for path in paths]], to)
    for path in paths:
        with path.open("rb") as file:
            for count in _chunks(path.stat().st_size):
                dist.send(torch.frombuffer(bytearray(file.read(count)), dtype=torch.uint8), to)


def _receive(folder: Path, source: int) -> None:
    told: list[list[tuple[str, int]]] = [[]]
    dist.recv_object_list(told, source)
    for name, size in told[0]:
        with (folder / Path(name).name).open("wb") as file:
            for count in _chunks(size):
                chunk = torch.empty(count, dtype=torch.uint8)
                dist.recv(chunk, source)
                file.write(chunk.numpy().data)


def _chunks(size: int) -> Iterator[int]:
    while size > 0:
        yield min(size, _CHUNK)
        size -= _CHUNK
