"""Connections of a real hub's socket that the watching thread ends."""

from __future__ import annotations

import contextlib
import socket

import pytest

from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.zeromq.arrivals import NEWCOMER_BYTES
from edgetrain.exchange.zeromq.hub_socket import HubSocket

pytestmark = pytest.mark.real

HELLO = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL".ljust(64, b"\0")


def is_ended(end: socket.socket) -> bool:
    """Whether the hub ends a connection; it would wait a minute for what a newcomer has to say."""
    end.settimeout(10)
    try:
        while end.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:  # reset
        pass
    return True


def test_an_address_that_sends_without_end_gets_no_other_connection_for_a_while():
    with contextlib.closing(
        HubSocket("tcp://127.0.0.1:0", max_message_bytes=2 << 20, handshake_ms=60_000)
    ) as hub:
        lines: list[str] = []
        hub.refusals.report = lines.append
        place = split_address(hub.address)
        with socket.create_connection(place) as first:
            with contextlib.suppress(OSError):
                first.sendall(HELLO + b"\6" + (2 << 20).to_bytes(8, "big") + bytes(NEWCOMER_BYTES))
            assert is_ended(first)
        with socket.create_connection(place) as second:
            assert is_ended(second)
        list(hub.poll(0.0))
    assert len(lines) == 1
    assert "no other is taken from there" in lines[0]
