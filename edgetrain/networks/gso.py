"""Surgery on super-packets: one buffer that stands for many TCP segments of the same size. Pure.

A packet is as AF_PACKET with PACKET_VNET_HDR gives it: struct virtio_net_hdr (10 bytes), Ethernet
header (14), IPv4, TCP. The kernel segments and checksums such a packet only where it must, so the
emulator keeps it whole and cuts it only where loss or rate asks for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

VNET = 10  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
IP = VNET + 14
_HEADER = struct.Struct("=BBHHHH")
_NEEDS_CHECKSUM = 1
_GSO_NONE, _GSO_TCPV4, _GSO_ECN = 0, 1, 0x80
_FIN_PSH, _CWR = 0x09, 0x80
_TCP_CHECKSUM = 16


def segments(packet: bytes) -> tuple[int, int, int]:
    """(segments, payload bytes of a segment, bytes of IP and TCP headers); (1, 0, 0) if plain."""
    if packet[1] & ~_GSO_ECN != _GSO_TCPV4:
        return 1, 0, 0
    size = packet[4] | packet[5] << 8
    tcp = IP + (packet[IP] & 15) * 4
    headers = tcp - IP + (packet[tcp + 12] >> 4) * 4
    return -(-(len(packet) - IP - headers) // size), size, headers


def cut(packet: bytes, first: int, last: int) -> bytes:
    """Segments [first, last) of a super-packet, again as one packet."""
    count, size, headers = segments(packet)
    start = IP + headers
    payload = packet[start + first * size : start + min(last, count) * size]
    head = bytearray(packet[:start])
    tcp = IP + (head[IP] & 15) * 4
    _rewrite_ip(head, headers + len(payload), first)
    sequence = int.from_bytes(head[tcp + 4 : tcp + 8], "big") + first * size
    head[tcp + 4 : tcp + 8] = (sequence & 0xFFFFFFFF).to_bytes(4, "big")
    if last < count:
        head[tcp + 13] &= ~_FIN_PSH
    if first > 0:
        head[tcp + 13] &= ~_CWR
    # The kernel completes the checksum from the sum of the pseudo header.
    pseudo = sum(struct.unpack("!4H", head[IP + 12 : IP + 20])) + 6
    pseudo += headers + len(payload) - (tcp - IP)
    head[tcp + _TCP_CHECKSUM : tcp + _TCP_CHECKSUM + 2] = _fold(pseudo).to_bytes(2, "big")
    kind, gso = (packet[1], size) if len(payload) > size else (_GSO_NONE, 0)
    _HEADER.pack_into(head, 0, _NEEDS_CHECKSUM, kind, headers + 14, gso, tcp - VNET, _TCP_CHECKSUM)
    return bytes(head) + payload


def _rewrite_ip(head: bytearray, length: int, skipped: int) -> None:
    """Total length, identification and header checksum of an IPv4 header."""
    head[IP + 2 : IP + 4] = length.to_bytes(2, "big")
    number = int.from_bytes(head[IP + 4 : IP + 6], "big") + skipped
    head[IP + 4 : IP + 6] = (number & 0xFFFF).to_bytes(2, "big")
    head[IP + 10 : IP + 12] = b"\0\0"
    words = struct.unpack(f"!{(head[IP] & 15) * 2}H", head[IP : IP + (head[IP] & 15) * 4])
    head[IP + 10 : IP + 12] = (~_fold(sum(words)) & 0xFFFF).to_bytes(2, "big")


def _fold(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def runs(kept: Sequence[bool], most: int) -> list[tuple[int, int]]:
    """Ranges [first, last) of neighbouring segments that are kept, each of at most `most`."""
    found: list[tuple[int, int]] = []
    start = -1
    for number, keep in enumerate([*kept, False]):
        if keep and start < 0:
            start = number
        elif not keep and start >= 0:
            found += [(low, min(low + most, number)) for low in range(start, number, most)]
            start = -1
    return found


def corrupt(packet: bytes, bit: int) -> bytes:
    """The packet with one bit of what follows the IP header flipped, its checksum done before.

    As netem does it: a receiver that checks will find out.
    """
    copy = bytearray(packet)
    if copy[0] & _NEEDS_CHECKSUM:
        start = VNET + (copy[6] | copy[7] << 8)
        field = start + (copy[8] | copy[9] << 8)
        rest = bytes(copy[start:]) + bytes((len(copy) - start) % 2)
        total = _fold(sum(struct.unpack(f"!{len(rest) // 2}H", rest)))
        copy[field : field + 2] = (~total & 0xFFFF).to_bytes(2, "big")
        copy[:VNET] = bytes(VNET)
    body = IP + (copy[IP] & 15) * 4
    place = body + (bit >> 3) % max(len(copy) - body, 1)
    if place < len(copy):
        copy[place] ^= 1 << (bit & 7)
    return bytes(copy)
