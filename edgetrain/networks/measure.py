"""Measuring an emulation with real traffic: round trip, rate, loss, jitter. The parent's side."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from edgetrain.networks.emulation import Emulation, Link
from edgetrain.networks.worker import Worker

#: Payload of a full TCP segment (with timestamps) over its bytes on the wire.
PAYLOAD_SHARE = 1448 / 1514
_PATIENCE_SECONDS = 180.0


class End:
    """One measuring process inside a link."""

    def __init__(self, link: Link, role: str) -> None:
        host, _, port = link.address.removeprefix("tcp://").rpartition(":")
        namespace = dataclasses.asdict(link.namespace) if link.namespace else None
        config = {"namespace": namespace, "role": role, "host": host, "port": int(port)}
        self._worker = Worker("edgetrain.networks.meter", config)

    def begin(self, what: str, **values: Any) -> None:
        """Start measuring; `result` waits for it. For several ends at once."""
        self._worker.tell(json.dumps({"do": what, "with": values}))

    def result(self) -> Any:
        return self._worker.answer(_PATIENCE_SECONDS)["result"]

    def do(self, what: str, **values: Any) -> Any:
        self.begin(what, **values)
        return self.result()

    def close(self) -> None:
        self._worker.close()


class Bench:
    """A server at the hub and a client at each of some members; a context manager."""

    def __init__(self, emulation: Emulation, members: Sequence[int] = (0,)) -> None:
        self.server = End(emulation.hub_link(), "server")
        self.clients: list[End] = []
        try:
            for member in members:
                self.clients.append(End(emulation.link(member), "client"))
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> End:
        return self.clients[0]

    def close(self) -> None:
        for end in (*self.clients, self.server):
            end.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class OneWay:
    """Numbered datagrams in one direction."""

    sent: int
    arrived: int
    delays_ms: tuple[float, ...]
    in_order: bool

    @property
    def lost_percent(self) -> float:
        return 100 * (1 - self.arrived / self.sent)

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.delays_ms)

    @property
    def deviation_ms(self) -> float:
        return statistics.pstdev(self.delays_ms)


def one_way(bench: Bench, count: int, gap_s: float, size: int = 64) -> OneWay:
    """Datagrams from the member to the hub, timed at both ends."""
    bench.client.do("datagrams", count=count, gap_s=gap_s, size=size)
    seen: list[Any] = []
    bench.client.do("echoes", count=1, gap_s=0.01)
    seen = bench.server.do("arrivals")
    numbers = [number for number, _, _ in seen]
    delays = tuple((arrived - sent) / 1e6 for _, sent, arrived in seen)
    return OneWay(count, len(seen), delays, numbers == sorted(numbers))


def steady_mbit(seen: Sequence[Sequence[int]], skip: float = 0.4) -> float:
    """Payload Mbit/s of a transfer, its first part (slow start) left out.

    `seen` is [(ns, bytes so far)]; `skip` is the share of its time that does not count.
    """
    first, last = seen[0][0], seen[-1][0]
    begin = first + skip * (last - first)
    rest = [(at, count) for at, count in seen if at >= begin]
    if len(rest) < 2 or rest[-1][0] == rest[0][0]:
        return 0.0
    return (rest[-1][1] - rest[0][1]) * 8000 / (rest[-1][0] - rest[0][0])


def line_mbit(seen: Sequence[Sequence[int]], skip: float = 0.4, windows: int = 10) -> float:
    """Payload Mbit/s of a line that is kept busy: the median over windows.

    A hole in the sequence holds arrived bytes back and then hands them over at once; the median
    does not mind, the mean of a short transfer does.
    """
    first, last = seen[0][0], seen[-1][0]
    begin = first + skip * (last - first)
    rest = [(at, count) for at, count in seen if at >= begin]
    size = max(len(rest) // windows, 1)
    marks = rest[::size]
    rates = [
        (right[1] - left[1]) * 8000 / (right[0] - left[0])
        for left, right in itertools.pairwise(marks)
        if right[0] > left[0]
    ]
    return statistics.median(rates) if rates else 0.0
