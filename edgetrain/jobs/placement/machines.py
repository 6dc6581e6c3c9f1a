"""What the planner knows of machines: servers, their accelerators, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from edgetrain.jobs.placement.formulas import USABLE, RankLink


@dataclass(frozen=True)
class Server:
    """One machine with equal accelerators, each of which can be a rank."""

    name: str
    accelerators: int
    memory_bytes: float
    """Memory of one accelerator."""
    flops_s: float
    """Speed of one accelerator in a training step, in the wanted precision."""
    dispatch_s: float
    """Seconds of one operator call."""
    inside: RankLink
    profile: str = ""
    has_gpus: bool = False
    """Whether its accelerators have a memory of their own, beside the main memory."""

    @property
    def usable_bytes(self) -> float:
        """Bytes a rank may fill."""
        return USABLE * self.memory_bytes


@dataclass(frozen=True)
class Servers:
    """Servers in the order in which a pipeline goes through them."""

    servers: tuple[Server, ...]
    between: RankLink
    """From one server to another."""

    @property
    def ranks(self) -> int:
        return sum(server.accelerators for server in self.servers)

    @property
    def are_equal(self) -> bool:
        """Whether it makes no difference which of them is used."""
        first = self.servers[0]
        return all(
            (s.memory_bytes, s.flops_s, s.dispatch_s, s.inside)
            == (first.memory_bytes, first.flops_s, first.dispatch_s, first.inside)
            for s in self.servers
        )


@dataclass(frozen=True)
class Slot:
    """Room for one stage: as many ranks of one server as the stage is wide."""

    server: int
    flops_s: float
    dispatch_s: float
    usable_bytes: float
    wide: RankLink
    """Link between the ranks of the stage."""


def slots(servers: Servers, width: int) -> list[Slot]:
    """The slots for stages of `width` ranks: parts of one server, or several whole ones, of which
    the slowest and the smallest decides."""
    found: list[Slot] = []
    waiting: list[tuple[int, Server]] = []
    for index, server in enumerate(servers.servers):
        if server.accelerators >= width:
            waiting.clear()
            one = Slot(index, server.flops_s, server.dispatch_s, server.usable_bytes, server.inside)
            found += [one] * (server.accelerators // width)
            continue
        waiting.append((index, server))
        together = [each for _, each in waiting]
        if sum(each.accelerators for each in together) == width:
            found.append(
                Slot(
                    waiting[0][0],
                    min(each.flops_s for each in together),
                    max(each.dispatch_s for each in together),
                    min(each.usable_bytes for each in together),
                    servers.between,
                )
            )
            waiting.clear()
    return found
