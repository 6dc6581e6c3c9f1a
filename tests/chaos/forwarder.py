"""A TCP forwarder to the hub that can hold, slow down, cut and damage connections, in real time.

It does not interpret the bytes. Its threads belong to the process that made it. Delays and rates of
a network profile are emulated behind it, by `fleet.networks`.

    `hold(seconds)`            no byte passes meanwhile
    `slow(seconds, bytes_s)`   each direction of a connection is limited meanwhile
    `cut()`                    open connections break, with the bytes on their way; new ones work
    `damage(upwards)`          one bit of the next message in that direction is flipped
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

_RESET = struct.pack("ii", 1, 0)
_CHUNK = 65536
_SLOW_CHUNK = 1024
GREETING_BYTES = 100
"""Shorter data is not a message but a handshake, and is not damaged."""


class Forwarder:
    """Forwards connections from `port` of this machine to `to`, (host, port), until closed."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._held_until = self._slow_until = 0.0
        self._slow_bytes_s = 1.0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._damage: set[bool] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, seconds: float) -> None:
        """Let nothing pass for `seconds`. If several calls overlap, the longest counts."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)

    def slow(self, seconds: float, bytes_s: float) -> None:
        """For `seconds`, limit each direction of a connection to `bytes_s`."""
        self._slow_bytes_s = bytes_s
        self._slow_until = max(self._slow_until, time.monotonic() + seconds)

    def damage(self, *, upwards: bool) -> None:
        """Flip a bit of the next message to the hub (`upwards`) or from it."""
        with self._lock:
            self._damage.add(upwards)

    def cut(self) -> None:
        """Reset all open connections at both ends. Bytes on their way are lost."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for each in (end for pair in pairs for end in pair):
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)  # so that recv returns
            each.close()

    def close(self) -> None:
        """Close all connections and end all threads; works twice."""
        self._closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # so that accept returns
        self._listening.close()
        self.cut()

    # -- threads ------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(self._to, 1.0)
            except OSError:
                here.close()
                continue
            there.settimeout(None)
            pair = (here, there)
            with self._lock:
                self._pairs.add(pair)
            if self._closed.is_set():
                self.cut()
            for source, sink, up in ((here, there, True), (there, here, False)):
                threading.Thread(
                    target=self._pump, args=(pair, source, sink, up), daemon=True
                ).start()

    def _pump(
        self,
        pair: tuple[socket.socket, socket.socket],
        source: socket.socket,
        sink: socket.socket,
        up: bool,
    ) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(_CHUNK)):
                self._wait_while_held()
                if self._closed.is_set():
                    break
                self._damage_once(data, up)
                for piece in self._paced(data):
                    sink.sendall(piece)
        for each in pair:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            whole = pair in self._pairs
            self._pairs.discard(pair)
        if whole:  # otherwise `cut` or the other direction's thread closes it
            for each in pair:
                each.close()

    def _wait_while_held(self) -> None:
        while not self._closed.is_set() and (left := self._held_until - time.monotonic()) > 0:
            self._closed.wait(left)

    def _paced(self, data: bytearray) -> Iterator[bytearray]:
        """Yield all of `data`, in small pieces with pauses while the link is slow."""
        while data and time.monotonic() < self._slow_until and not self._closed.is_set():
            piece, data = data[:_SLOW_CHUNK], data[_SLOW_CHUNK:]
            self._closed.wait(len(piece) / self._slow_bytes_s)
            yield piece
        yield data

    def _damage_once(self, data: bytearray, up: bool) -> None:
        with self._lock:
            if up in self._damage and len(data) > GREETING_BYTES:
                self._damage.discard(up)
                data[len(data) // 2] ^= 1
