"""The servers of a run: which are there, which are lost, and what their ranks are doing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from edgetrain.errors import ConfigError
from edgetrain.fleet.cluster import LOCAL_HOSTS, Cluster
from edgetrain.training.servers.attempt import RankEnd
from edgetrain.training.servers.far import There
from edgetrain.training.servers.here import Here
from edgetrain.training.servers.interfaces import address_of, address_towards, host_name

RETRY_S = 5.0
"""Seconds between two attempts to reach a lost server."""
LOOPBACK = "127.0.0.1"


class Crew:
    """The sides of a run, by the place of their servers in the cluster. It owns their processes."""

    def __init__(self, cluster: Cluster | None) -> None:
        """Without a cluster this process runs the ranks itself."""
        self._cluster = cluster
        self._sides: dict[int, Here | There] = {} if cluster else {0: Here()}
        self.returning: dict[int, There] = {}
        """Agents of lost servers, that may or may not answer."""
        self._tried_at: dict[int, float] = {}
        self.lost: set[int] = set()

    def name(self, server: int) -> str:
        return self._cluster.servers[server].name if self._cluster else "local"

    def side(self, server: int) -> Here | There:
        """The side of a server; its agent is started if it is not there yet."""
        if server not in self._sides:
            assert self._cluster is not None
            self._sides[server] = There(self._cluster.servers[server])
        return self._sides[server]

    def wait_for(
        self, used: Sequence[int], watch: Callable[[], None], poll_s: float, *, first: bool
    ) -> None:
        """Wait until all of these servers are ready, or gone. The `first` time all have to be
        there: ConfigError with the reason of one that is not."""
        sides = [self.side(server) for server in used]
        while not all(side.is_ready or side.gone for side in sides):
            watch()
            time.sleep(poll_s / 2)
        for side in sides:
            refused = isinstance(side, There) and side.is_refused
            if side.gone and (first or refused):
                raise ConfigError(
                    side.problem, "`ssh -o BatchMode=yes HOST true` has to work without a question"
                    if not refused else "all servers run the same versions",
                )  # fmt: skip

    def gone(self, used: Sequence[int]) -> list[int]:
        return [server for server in used if self.side(server).gone]

    def give_up(self, servers: Sequence[int]) -> None:
        """Count these servers as lost, until they are back."""
        for server in servers:
            self._sides.pop(server).close()
            self.lost.add(server)
            self._tried_at[server] = time.monotonic()

    def take_back(self) -> tuple[str, ...]:
        """The names of lost servers that are back: they are no longer lost."""
        found = [s for s, side in self.returning.items() if side.is_ready and not side.gone]
        for server in found:
            self._sides[server] = self.returning.pop(server)
            self.lost.discard(server)
        return tuple(self.name(server) for server in found)

    def look_for_lost(self) -> None:
        """Start agents of lost servers again, every RETRY_S seconds; nothing waits for them."""
        for server, side in list(self.returning.items()):
            if side.gone:
                self.returning.pop(server).close()
                self._tried_at[server] = time.monotonic()
        for server in self.lost - self.returning.keys():
            if time.monotonic() - self._tried_at[server] >= RETRY_S:
                assert self._cluster is not None
                self.returning[server] = There(self._cluster.servers[server])

    def address(self, used: Sequence[int]) -> str:
        """Of the store, where all of these servers reach it: on the interface that the file names
        for this machine, or the one on the way to the others."""
        if self._cluster is None:
            return LOOPBACK
        entries = [self._cluster.servers[server] for server in used]
        far = [entry.host for entry in entries if entry.host not in LOCAL_HOSTS]
        if not far:
            return LOOPBACK
        for entry in self._cluster.servers:
            if entry.host in LOCAL_HOSTS and entry.interface and address_of(entry.interface):
                return address_of(entry.interface)
        return address_towards(host_name(far[0]))

    # -- an attempt ----------------------------------------------------------------------------

    def ended(self, used: Sequence[int]) -> dict[int, RankEnd]:
        return {rank: end for server in used for rank, end in self.side(server).ended().items()}

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since training began, as the leader's server said last."""
        known = [side.elapsed_s for side in self._sides.values() if side.elapsed_s is not None]
        return known[0] if known else None

    def wait(self, used: Sequence[int], seconds: float) -> None:
        """Wait this long, or a little less."""
        self.look_for_lost()
        side = self.side(used[0])
        if isinstance(side, Here):
            side.wait(seconds)
        else:
            time.sleep(seconds)

    def stop(self, used: Sequence[int]) -> None:
        for server in used:
            if server in self._sides:
                self._sides[server].stop()

    def close(self) -> None:
        for side in (*self._sides.values(), *self.returning.values()):
            with contextlib.suppress(OSError):
                side.close()
        self._sides.clear()
        self.returning.clear()
