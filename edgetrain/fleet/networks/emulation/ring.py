"""A port of the emulator: AF_PACKET with a receive ring in shared memory, for whole super-packets.

The ring (TPACKET_V2) is not limited by net.core.rmem_max, which an ordinary user cannot raise, and
needs no system call per packet. The kernel stamps each packet when it arrives, so that the time
until the emulator reads it does not add to the packet's delay.
"""

from __future__ import annotations

import mmap
import socket
import struct
import time
from collections.abc import Iterator

_SOL_PACKET = 263
_PACKET_RX_RING, _PACKET_STATISTICS, _PACKET_VERSION, _PACKET_VNET_HDR = 5, 6, 10, 15
_TPACKET_V2 = 1
_ETH_P_IP = 0x0800
_FRAME = 32_768
_BLOCK = 8 * _FRAME
_STATUS_USER = 1
_VNET = 10
# struct tpacket2_hdr: status, length, captured length, offset of the MAC and network header, time
_HEADER = struct.Struct("=IIIHHII")
_STATUS = struct.Struct("=I")


class Port(socket.socket):
    """The emulator's end of one host's veth."""

    def __init__(self, interface: str, frames: int) -> None:
        frames += -frames % 8
        super().__init__(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_IP))
        self.setblocking(False)
        self.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V2)
        self.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        request = struct.pack("IIII", _BLOCK, frames // 8, _FRAME, frames)
        self.setsockopt(_SOL_PACKET, _PACKET_RX_RING, request)
        self._memory = mmap.mmap(self.fileno(), frames * _FRAME)
        self.bind((interface, _ETH_P_IP))
        self._size = frames * _FRAME
        self._place = 0
        self._oversized = 0

    def take_packets(self, most: int) -> Iterator[tuple[int, bytes]]:
        """Yield up to `most` packets as (time of arrival on CLOCK_MONOTONIC in ns, packet)."""
        memory, unpack, release = self._memory, _HEADER.unpack_from, _STATUS.pack_into
        clock_offset = time.time_ns() - time.monotonic_ns()
        for _ in range(most):
            place = self._place
            status, length, captured, mac, _, seconds, nanoseconds = unpack(memory, place)
            if not status & _STATUS_USER:
                return
            start = place + mac
            packet = memory[start - _VNET : start + captured]
            release(memory, place, 0)
            self._place = (place + _FRAME) % self._size
            if length > captured:
                self._oversized += 1
                continue
            yield seconds * 1_000_000_000 + nanoseconds - clock_offset, packet

    def take_dropped(self) -> int:
        """Return how many packets were dropped since the last call: ring full, or too large."""
        packed = self.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        oversized, self._oversized = self._oversized, 0
        return int(struct.unpack("II", packed)[1]) + oversized
