"""Processes that stay, for tests of groups: forked once for each number of them."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from edgetrain.errors import EdgetrainError
from edgetrain.training import processes
from edgetrain.training.servers.mesh import open_group, open_store


class World:
    """So many ranks that wait for work. Those that do not answer for `patience_s` are ended."""

    patience_s = 120.0

    def __init__(self, count: int) -> None:
        context = processes.fork_server(["torch", "edgetrain.training.servers.rank", "ranks"])
        self._store, self.is_over = open_store(), False
        self.count, self._children, self._pipes = count, [], []
        for rank in range(count):
            here, there = context.Pipe()
            child = processes.start(
                context, f"rank{rank}", _serve, rank, count, self._store.port, there
            )
            self._children.append(child)
            self._pipes.append(here)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returns. The first error is raised here, and ends all ranks: the others
        would wait for the one that failed."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < self.count:
            ready = wait(
                [p for r, p in enumerate(self._pipes) if r not in answers], self.patience_s
            )
            if not ready:
                self.close()
                raise AssertionError("the ranks do not answer")
            for pipe in ready:
                kind, answer = pipe.recv()
                if kind != "done":
                    self.close()
                    raise EdgetrainError(answer) if kind == "refused" else AssertionError(answer)
                answers[self._pipes.index(pipe)] = answer
        return [answers[rank] for rank in range(self.count)]

    def close(self) -> None:
        self.is_over = True
        processes.stop_all(self._children, 0.2)


def _serve(rank: int, count: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    open_group(rank, count, port)
    groups = _Groups()
    dist.new_group = device_mesh.new_group = groups.take
    while True:
        function, arguments = pipe.recv()
        groups.begin()
        try:
            pipe.send(("done", function(*arguments)))
        except EdgetrainError as error:
            pipe.send(("refused", str(error)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


class _Groups:
    """Groups of ranks, made once: each has a thread that looks for messages a hundred times a
    second, and torch keeps what it has seen of a mesh for as long as the process lives. Half of the
    processors' time went to those threads. Within one work all groups are different ones."""

    def __init__(self) -> None:
        self._make, self._made = dist.new_group, defaultdict[str, list[Any]](list)
        self._taken = Counter[str]()

    def begin(self) -> None:
        """The next work: all groups are free."""
        self._taken.clear()

    def take(self, *arguments: Any, **more: Any) -> Any:
        """`dist.new_group`, and like that called by all ranks in the same order."""
        what = repr((arguments, sorted(more.items())))
        made, index = self._made[what], self._taken[what]
        self._taken[what] += 1
        if index == len(made):
            made.append(self._make(*arguments, **more))
        return made[index]


@contextmanager
def world(count: int) -> Iterator[World]:
    found = World(count)
    try:
        yield found
    finally:
        found.close()
