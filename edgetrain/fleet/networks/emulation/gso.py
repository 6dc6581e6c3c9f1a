"""Cut super-packets: buffers that hold many TCP segments of the same size. Pure.

A packet has the format of AF_PACKET with PACKET_VNET_HDR: struct virtio_net_hdr (10 bytes),
Ethernet header (14), IPv4, TCP. The kernel segments and checksums such a packet only if it must;
the emulator keeps it whole and cuts it only if loss or rate requires it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

VNET = 10  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
IP = VNET + 14
_HEADER = struct.Struct("=BBHHHH")
_LENGTH, _PAIR = struct.Struct("!HHH"), struct.Struct("!HH")
_WORD, _SEQUENCE = struct.Struct("!H"), struct.Struct("!I")
_NEEDS_CHECKSUM = 1
_GSO_NONE, _GSO_TCPV4, _GSO_ECN = 0, 1, 0x80
_FIN_PSH, _CWR = 0x09, 0x80
_TCP, _SYN, _SYN_ACK = 6, 0x02, 0x12
_TCP_CHECKSUM = 16


def segments(packet: bytes) -> tuple[int, int, int]:
    """Return (segments, payload bytes of a segment, bytes of IP and TCP headers).

    (1, 0, 0) for a packet that is not a super-packet.
    """
    if packet[1] & ~_GSO_ECN != _GSO_TCPV4:
        return 1, 0, 0
    size = packet[4] | packet[5] << 8
    tcp = IP + (packet[IP] & 15) * 4
    headers = tcp - IP + (packet[tcp + 12] >> 4) * 4
    return -(-(len(packet) - IP - headers) // size), size, headers


def opens_connection(packet: bytes) -> bool:
    """Return whether this is the first segment of a TCP connection: SYN without ACK."""
    tcp = IP + (packet[IP] & 15) * 4
    return packet[IP + 9] == _TCP and packet[tcp + 13] & _SYN_ACK == _SYN


def cut(packet: bytes, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return each range [first, last) of a super-packet's segments as one packet."""
    count, size, headers = segments(packet)
    start = IP + headers
    head = bytearray(packet[:start])
    ip_bytes = (head[IP] & 15) * 4
    tcp = IP + ip_bytes
    flags = head[tcp + 13]
    _, total, number = _LENGTH.unpack_from(head, IP)
    (sequence,) = _SEQUENCE.unpack_from(head, tcp + 4)
    # Checksums over the fields that are the same in all packets.
    ip_sum = sum(struct.unpack_from(f"!{ip_bytes // 2}H", head, IP)) - total - number
    ip_sum -= head[IP + 10] << 8 | head[IP + 11]
    pseudo = sum(struct.unpack_from("!4H", head, IP + 12)) + 6 + headers - ip_bytes
    pieces: list[bytes] = []
    for first, last in ranges:
        payload = packet[start + first * size : start + last * size]
        length, identity = headers + len(payload), (number + first) & 0xFFFF
        _PAIR.pack_into(head, IP + 2, length, identity)
        _WORD.pack_into(head, IP + 10, ~_fold(ip_sum + length + identity) & 0xFFFF)
        _SEQUENCE.pack_into(head, tcp + 4, (sequence + first * size) & 0xFFFFFFFF)
        keep = 0xFF & ~(_FIN_PSH if last < count else 0) & ~(_CWR if first else 0)
        head[tcp + 13] = flags & keep
        # The kernel completes the checksum from the sum of the pseudo header.
        _WORD.pack_into(head, tcp + _TCP_CHECKSUM, _fold(pseudo + len(payload)))
        kind, gso = (packet[1], size) if len(payload) > size else (_GSO_NONE, 0)
        _HEADER.pack_into(
            head, 0, _NEEDS_CHECKSUM, kind, headers + 14, gso, tcp - VNET, _TCP_CHECKSUM
        )
        pieces.append(bytes(head) + payload)
    return pieces


def _fold(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def runs(kept: Sequence[bool], most: int) -> list[tuple[int, int]]:
    """Return ranges [first, last) of neighbouring kept segments, each of at most `most`."""
    ranges: list[tuple[int, int]] = []
    start = -1
    for number, keep in enumerate([*kept, False]):
        if keep and start < 0:
            start = number
        elif not keep and start >= 0:
            ranges += [(low, min(low + most, number)) for low in range(start, number, most)]
            start = -1
    return ranges


def corrupt(packet: bytes, bit: int) -> bytes:
    """Complete the packet's checksum, then flip one bit after the IP header; return the packet.

    As in netem, a receiver that verifies the checksum detects it.
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
