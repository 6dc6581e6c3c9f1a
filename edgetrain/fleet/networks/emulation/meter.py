"""A measuring process: enters the emulated network; sends, receives and times real traffic.

`measure` runs this module through `worker`: one process is a server at the hub's address, others
are clients in the place of members. All read the same monotonic clock, so that one-way delays are
measured directly. UDP works only if the backend carries it.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from edgetrain.fleet.networks.emulation import linux
from edgetrain.fleet.networks.emulation.namespaces import Namespace
from edgetrain.fleet.networks.emulation.worker import Parent

_STAMP = struct.Struct("!Iqq")  # number, time sent, nanoseconds that the server held it
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("qq")
_ONE_WAY = 1 << 31  # a bit of the number: do not answer
_PROBE_BYTES = 64
_CHUNK = bytes(1 << 16)
_now = time.monotonic_ns
_VERBS = ("rtt", "push", "pull", "messages", "datagrams", "echoes")


def _receive(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = end.recv(count - len(data))
        if not piece:
            raise ConnectionError("the other end has closed")
        data += piece
    return data


def _drain(end: socket.socket, until_ns: int | None = None) -> list[tuple[int, int]]:
    """Read until the other end closes, or until a time; return [(time, bytes so far)] per 5 ms."""
    seen, total, last = [(_now(), 0)], 0, 0
    buffer = bytearray(1 << 20)
    while until_ns is None or _now() < until_ns:
        count = end.recv_into(buffer)
        if not count:
            break
        total += count
        if _now() - last > 5_000_000:
            last = _now()
            seen.append((last, total))
    seen.append((_now(), total))
    return seen


def _datagram_socket() -> socket.socket:
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    end.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return end


def _take_datagram(end: socket.socket) -> tuple[bytes, int, Any]:
    """Receive (data, time at which the kernel received it on our monotonic clock, sender)."""
    data, extra, _, sender = end.recvmsg(2048, 64)
    arrived = _now()
    for level, kind, value in extra:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack_from(value)
            arrived = seconds * 1_000_000_000 + nanoseconds - time.time_ns() + _now()
    return data, arrived, sender


class ProbeServer:
    """Answers probes at the hub's address. One thread per connection, one for UDP."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = socket.create_server((host, port), backlog=64)
        self._datagrams = _datagram_socket()
        self._datagrams.bind((host, port))
        self._arrivals: list[tuple[int, int, int]] = []

    def start(self) -> None:
        for action in (self._accept, self._listen):
            threading.Thread(target=action, daemon=True).start()

    def _accept(self) -> None:
        while True:
            end, _ = self._listener.accept()
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with end:
            try:
                while True:
                    self._command(end)
            except (ConnectionError, struct.error):
                return

    def _command(self, end: socket.socket) -> None:
        """Serve one request: a letter and a number n.

        e: echo n probes. m: receive n bytes and acknowledge them. p: send for n nanoseconds.
        t: receive until closed and report the times; with ordinary priority if n is 1.
        """
        letter, number = struct.unpack("!cq", _receive(end, 9))
        if letter == b"t" and number:
            linux.ordinary_priority()
        else:
            linux.raise_priority()
        if letter == b"e":
            for _ in range(number):
                end.sendall(_receive(end, _PROBE_BYTES))
        elif letter == b"m":
            left = number
            while left:
                left -= len(end.recv(min(left, 1 << 20)))
            end.sendall(b"k")
        elif letter == b"p":
            stop = _now() + number
            while _now() < stop:
                end.sendall(_CHUNK)
            end.shutdown(socket.SHUT_WR)
        elif letter == b"t":
            seen = json.dumps(_drain(end)).encode()
            end.sendall(struct.pack("!q", len(seen)) + seen)

    def _listen(self) -> None:
        """Record one-way datagrams; send others back with the time for which we held them."""
        linux.raise_priority()
        end = self._datagrams
        while True:
            data, arrived, sender = _take_datagram(end)
            number, sent, _ = _STAMP.unpack_from(data)
            if number & _ONE_WAY:
                self._arrivals.append((number & ~_ONE_WAY, sent, arrived))
            else:
                rest = data[_STAMP.size :]
                end.sendto(_STAMP.pack(number, sent, _now() - arrived) + rest, sender)

    def arrivals(self) -> list[tuple[int, int, int]]:
        """Return (number, sent, arrived) of one-way datagrams since the last call."""
        taken, self._arrivals = self._arrivals, []
        return taken


class Client:
    """Measures from the place of a member to the server."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)

    def _connect(self) -> socket.socket:
        end = socket.create_connection(self._to, timeout=30)
        end.settimeout(60)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end

    def rtt(self, count: int, gap_s: float) -> list[float]:
        seconds = []
        with self._connect() as end:
            end.sendall(struct.pack("!cq", b"e", count))
            for _ in range(count):
                probe = bytes(_PROBE_BYTES)
                sent = _now()
                end.sendall(probe)
                _receive(end, _PROBE_BYTES)
                seconds.append((_now() - sent) / 1e6)
                time.sleep(gap_s)
        return seconds

    def push(self, seconds: float, greedy: bool = False) -> list[tuple[int, int]]:
        """Send for `seconds`; return what had arrived at the server, and when.

        `greedy`: the processors limit the rate. Both ends then run with ordinary priority, because
        in real time they would take the processors from the emulator.
        """
        if greedy:
            linux.ordinary_priority()
        with self._connect() as end:
            end.sendall(struct.pack("!cq", b"t", greedy))
            stop = _now() + int(seconds * 1e9)
            while _now() < stop:
                end.sendall(_CHUNK)
            end.shutdown(socket.SHUT_WR)
            (size,) = struct.unpack("!q", _receive(end, 8))
            seen: list[tuple[int, int]] = json.loads(_receive(end, size))
            return seen

    def pull(self, seconds: float) -> list[tuple[int, int]]:
        """Let the server send for `seconds`; return what had arrived here, and when."""
        with self._connect() as end:
            end.sendall(struct.pack("!cq", b"p", int(seconds * 1e9)))
            return _drain(end)

    def messages(self, size: int, count: int, fresh: bool) -> list[float]:
        """Return the seconds of each message, from its first byte to its acknowledgement.

        `fresh` opens a connection for each message and includes its handshake.
        """
        seconds: list[float] = []
        body = bytes(size)
        end = None if fresh else self._connect()
        for _ in range(count):
            began = _now()
            link = end or self._connect()
            link.sendall(struct.pack("!cq", b"m", size) + body)
            _receive(link, 1)
            seconds.append((_now() - began) / 1e9)
            if end is None:
                link.close()
        if end is not None:
            end.close()
        return seconds

    def datagrams(self, count: int, gap_s: float, size: int) -> int:
        """Send one-way datagrams, numbered, at a steady pace. The server records their arrivals."""
        with _datagram_socket() as end:
            end.connect(self._to)
            began = time.monotonic()
            for number in range(count):
                stamp = _STAMP.pack(number | _ONE_WAY, _now(), 0)
                end.send(stamp.ljust(size, b"\0"))
                ahead = began + (number + 1) * gap_s - time.monotonic()
                if ahead > 0:
                    time.sleep(ahead)
        return count

    def echoes(self, count: int, gap_s: float) -> list[float]:
        """Return round trips in ms of datagrams sent at a steady pace, without lost ones.

        Measured by the kernel's stamps, which do not include the time of measuring processes.
        """
        seconds: list[float] = []
        with _datagram_socket() as end:
            end.connect(self._to)
            began = time.monotonic()
            for number in range(count):
                end.send(_STAMP.pack(number, _now(), 0).ljust(_PROBE_BYTES, b"\0"))
                self._collect(end, began + (number + 1) * gap_s, seconds)
            self._collect(end, time.monotonic() + 3, seconds, until=count)
        return seconds

    @staticmethod
    def _collect(end: socket.socket, until_s: float, seconds: list[float], until: int = -1) -> None:
        while len(seconds) != until:
            left = until_s - time.monotonic()
            if left <= 0 or not select.select([end], [], [], left)[0]:
                return
            data, arrived, _ = _take_datagram(end)
            _, sent, held = _STAMP.unpack_from(data)
            seconds.append((arrived - sent - held) / 1e6)


def _act(client: Client | None, server: ProbeServer | None, command: Mapping[str, Any]) -> Any:
    what, values = command["do"], command.get("with", {})
    if what == "arrivals" and server is not None:
        return server.arrivals()
    if what in _VERBS and client is not None:
        linux.raise_priority()
        return getattr(client, what)(**values)
    raise ValueError(f"a meter cannot do '{what}'")


def main() -> None:
    linux.fine_timers()
    parent = Parent()
    config = parent.config()
    server = client = None
    with parent.reporting("the measuring end"):
        if config["namespace"]:
            Namespace(**config["namespace"]).enter()
        if config["role"] == "server":
            server = ProbeServer(config["host"], config["port"])
            server.start()
        else:
            client = Client(config["host"], config["port"])
    parent.answer({})
    while not parent.gone():
        if select.select([parent.fd], [], [], 0.4)[0]:
            for line in parent.commands():
                try:
                    parent.answer({"result": _act(client, server, json.loads(line))})
                except (OSError, ValueError) as error:
                    parent.answer({"error": f"measuring failed: {error}"})


if __name__ == "__main__":
    main()
