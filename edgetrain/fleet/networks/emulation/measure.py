"""Measure an emulation with real traffic: round trip, rate, loss, jitter. The parent's side."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgetrain.fleet.networks.emulation.emulation import Attachment, Emulation
from edgetrain.fleet.networks.emulation.worker import Worker

#: Payload of a full TCP segment (with timestamps), divided by its bytes on the wire.
PAYLOAD_SHARE = 1448 / 1514
_PATIENCE_SECONDS = 180.0


class MeasuringEnd:
    def __init__(self, attachment: Attachment, role: str) -> None:
        host, _, port = attachment.address.removeprefix("tcp://").rpartition(":")
        namespace = dataclasses.asdict(attachment.namespace) if attachment.namespace else None
        config = {"namespace": namespace, "role": role, "host": host, "port": int(port)}
        self._worker = Worker("edgetrain.fleet.networks.emulation.meter", config)

    def begin(self, what: str, **values: Any) -> None:
        self._worker.send(json.dumps({"do": what, "with": values}))

    def result(self) -> Any:
        return self._worker.read_answer(_PATIENCE_SECONDS)["result"]

    def do(self, what: str, **values: Any) -> Any:
        """Measure and return the result. `what` is a method of `meter.Client`."""
        self.begin(what, **values)
        return self.result()

    def close(self) -> None:
        self._worker.close()


class Bench:
    """A measuring server at the hub and a client at each given member; a context manager."""

    def __init__(self, emulation: Emulation, members: Sequence[int] = (0,)) -> None:
        self.server = MeasuringEnd(emulation.hub_attachment(), "server")
        self.clients: list[MeasuringEnd] = []
        try:
            for member in members:
                self.clients.append(MeasuringEnd(emulation.attachment(member), "client"))
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> MeasuringEnd:
        return self.clients[0]

    def close(self) -> None:
        for end in (*self.clients, self.server):
            end.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class OneWay:
    """Numbered datagrams in one direction. `sent_ns` are the times of those that arrived."""

    sent: int
    arrived: int
    sent_ns: tuple[int, ...]
    delays_ms: tuple[float, ...]
    in_order: bool

    @property
    def lost_percent(self) -> float:
        return 100 * (1 - self.arrived / self.sent)

    @property
    def deviation_ms(self) -> float:
        return statistics.pstdev(self.delays_ms)


def one_way(bench: Bench, count: int, gap_s: float, size: int = 64) -> OneWay:
    """Send datagrams from the first client to the hub, timed at both ends."""
    bench.client.do("datagrams", count=count, gap_s=gap_s, size=size)
    bench.client.do("echoes", count=1, gap_s=0.01)  # meanwhile, datagrams in flight arrive
    seen = bench.server.do("arrivals")
    numbers = [number for number, _, _ in seen]
    sent = tuple(sent for _, sent, _ in seen)
    delays = tuple((arrived - sent) / 1e6 for _, sent, arrived in seen)
    return OneWay(count, len(seen), sent, delays, numbers == sorted(numbers))


def line_mbit(seen: Sequence[Sequence[int]], skip: float = 0.4, windows: int = 10) -> float:
    """Return the payload Mbit/s of a busy line: the median over windows.

    `seen` is [(ns, bytes so far)]; `skip` is the share of its time to leave out (slow start).
    A lost segment holds back bytes that have arrived and then releases them at once. That changes
    the mean of a short transfer, but not the median.
    """
    first, last = seen[0][0], seen[-1][0]
    rest = [each for each in seen if each[0] >= first + skip * (last - first)]
    size = max(len(rest) // windows, 1)
    marks = rest[::size]
    rates = [
        (right[1] - left[1]) * 8000 / (right[0] - left[0])
        for left, right in itertools.pairwise(marks)
        if right[0] > left[0]
    ]
    return statistics.median(rates) if rates else 0.0
