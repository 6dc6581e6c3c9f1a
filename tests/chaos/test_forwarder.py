"""Forwarders: what passes, and what is held, slowed down, cut and damaged."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from chaos.forwarder import GREETING_BYTES, Forwarder

pytestmark = pytest.mark.real

TEXT = bytes(range(250))


@pytest.fixture
def way():
    """Forwards to an echo."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo():
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=repeat, args=(peer,), daemon=True).start()

        def repeat(peer):
            with peer:
                try:
                    while data := peer.recv(65536):
                        peer.sendall(data)
                except OSError:
                    return

        threading.Thread(target=echo, daemon=True).start()
        with closing(Forwarder(server.getsockname()[:2])) as forwarder:
            yield forwarder
        server.shutdown(socket.SHUT_RDWR)


def connect(way):
    return socket.create_connection(("127.0.0.1", way.port), 10)


def there_and_back(connection, data):
    connection.sendall(data)
    found = b""
    while len(found) < len(data) and (more := connection.recv(65536)):
        found += more
    return found


def is_broken(connection):
    """Whether the other end has gone, within ten seconds."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_everything_passes(way):
    with connect(way) as one, connect(way) as other:
        assert there_and_back(one, TEXT * 4000) == TEXT * 4000
        assert there_and_back(other, b"x") == b"x"


def test_what_is_held_comes_later_and_whole_and_the_longest_hold_counts(way):
    with connect(way) as connection:
        there_and_back(connection, b"x")
        began = time.monotonic()
        way.hold(0.3)
        way.hold(0.05)
        assert there_and_back(connection, TEXT) == TEXT
        assert time.monotonic() - began >= 0.3


def test_a_slow_link_has_its_rate_for_a_while(way):
    with connect(way) as connection:
        there_and_back(connection, b"x")
        began = time.monotonic()
        way.slow(0.4, 5000.0)
        assert there_and_back(connection, TEXT * 12) == TEXT * 12
        assert time.monotonic() - began >= 0.4  # 3000 bytes, there and back, take more


def test_connections_that_are_cut_break_and_new_ones_stand(way):
    with connect(way) as connection:
        there_and_back(connection, b"x")
        way.cut()
        assert is_broken(connection)
        with connect(way) as other:
            assert there_and_back(other, TEXT) == TEXT


@pytest.mark.parametrize("upwards", [True, False])
def test_one_bit_of_one_message_is_damaged_and_no_greeting(way, upwards):
    with connect(way) as connection:
        way.damage(upwards=upwards)
        short = b"x" * GREETING_BYTES
        assert there_and_back(connection, short) == short
        hurt = there_and_back(connection, TEXT)
        assert [a ^ b for a, b in zip(hurt, TEXT, strict=True) if a != b] == [1]
        assert there_and_back(connection, TEXT) == TEXT


def test_one_that_is_closed_lets_go_of_who_waits_in_it(way):
    with connect(way) as connection:
        there_and_back(connection, b"x")
        way.hold(1000)
        connection.sendall(TEXT)
        way.close()
        way.close()
        assert is_broken(connection)
