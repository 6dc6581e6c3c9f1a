"""Cutting super-packets: no payload is lost, and a kernel accepts all checksums."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.fleet.networks.emulation import gso


def super_packet(payload: bytes, size: int, options: int = 3, flags: int = 0x99) -> bytes:
    """Build a packet as from AF_PACKET: vnet header, Ethernet, IPv4, TCP with options."""
    tcp_bytes = 20 + 4 * options
    total = 20 + tcp_bytes + len(payload)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, total, 65_530, 0x4000, 64, 6, 0)
    ip += bytes([10, 77, 0, 1, 10, 77, 0, 2])
    tcp = struct.pack(
        "!HHIIBBHHH", 5555, 40_000, 2**32 - 3000, 7, (tcp_bytes // 4) << 4, flags, 9, 0, 0
    )
    many = len(payload) > size
    vnet = struct.pack("=BBHHHH", 1, int(many), 34 + tcp_bytes, size if many else 0, 34, 16)
    return vnet + bytes(12) + b"\x08\x00" + ip + tcp + bytes(4 * options) + payload


def folded(total: int) -> int:
    """Add the carries to a sum of 16-bit words (RFC 1071)."""
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def fields(packet: bytes) -> tuple[int, int, int, int, bytes]:
    """Check the checksums; return (IP identification, sequence, TCP flags, size, payload)."""
    ip = packet[gso.IP : gso.IP + 20]
    words = sum(struct.unpack("!10H", ip))
    assert folded(words) == 0xFFFF
    assert int.from_bytes(ip[2:4], "big") == len(packet) - gso.IP
    tcp = gso.IP + 20
    length = len(packet) - tcp
    pseudo = folded(sum(struct.unpack("!4H", ip[12:20])) + 6 + length)
    assert int.from_bytes(packet[tcp + 16 : tcp + 18], "big") == pseudo
    start = tcp + (packet[tcp + 12] >> 4) * 4
    assert struct.unpack_from("=HHH", packet, 4)[1:] == (34, 16)
    identity, sequence = (
        int.from_bytes(ip[4:6], "big"),
        int.from_bytes(packet[tcp + 4 : tcp + 8], "big"),
    )
    return identity, sequence, packet[tcp + 13], packet[4] | packet[5] << 8, packet[start:]


@given(
    length=st.integers(2, 20_000),
    size=st.integers(200, 1448),
    most=st.integers(1, 12),
    data=st.data(),
)
def test_pieces_carry_what_was_kept(length: int, size: int, most: int, data: st.DataObject) -> None:
    payload = bytes(i * 31 % 251 for i in range(length + size))
    packet = super_packet(payload, size)
    count, found_size, headers = gso.segments(packet)
    assert (count, found_size, headers) == (-(-len(payload) // size), size, 52)
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    ranges = gso.runs(kept, most)
    pieces = gso.cut(packet, ranges)
    wanted = b"".join(payload[i * size : (i + 1) * size] for i, keep in enumerate(kept) if keep)
    assert b"".join(fields(piece)[4] for piece in pieces) == wanted
    for piece, (first, last) in zip(pieces, ranges, strict=True):
        identity, sequence, flags, segment, body = fields(piece)
        assert identity == (65_530 + first) & 0xFFFF
        assert sequence == (2**32 - 3000 + first * size) & 0xFFFFFFFF
        assert segment == (size if len(body) > size else 0)
        assert last - first <= most
        assert bool(flags & 0x09) == (last == count)  # FIN and PSH stay with the end
        assert bool(flags & 0x80) == (first == 0)  # CWR stays with the beginning


def test_a_plain_packet_is_one_segment() -> None:
    assert gso.segments(super_packet(b"abc", 1448))[0] == 1


@given(bit=st.integers(0, 8 * 1400), size=st.integers(10, 1400))
def test_a_corrupted_packet_fails_its_checksum(bit: int, size: int) -> None:
    packet = super_packet(bytes(range(256)) * 6, 1448)[: gso.IP + 52 + size]
    head = bytearray(packet)
    head[gso.IP + 2 : gso.IP + 4] = (len(packet) - gso.IP).to_bytes(2, "big")
    tcp = gso.IP + 20
    pseudo = folded(sum(struct.unpack_from("!4H", head, gso.IP + 12)) + 6 + len(head) - tcp)
    head[tcp + 16 : tcp + 18] = pseudo.to_bytes(2, "big")
    broken = gso.corrupt(bytes(head), bit)
    assert broken[: gso.VNET] == bytes(gso.VNET)  # its checksum is complete
    body = broken[tcp:] + bytes((len(broken) - tcp) % 2)
    total = sum(struct.unpack_from("!4H", broken, gso.IP + 12)) + 6 + len(broken) - tcp
    total += sum(struct.unpack(f"!{len(body) // 2}H", body))
    assert folded(total) != 0xFFFF
