"""Sockets that nobody closed are closed when they are collected, whatever the collector's order."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket

LOOP = """
import gc, sys, tempfile, pathlib
from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket

def member():
    end = MemberSocket("tcp://127.0.0.1:9")
    end.send([b"J", b"never sent"])
    return end

def renewed():
    end = member()
    end.reconnect()
    return end

def encrypted():
    return MemberSocket("tcp://127.0.0.1:9", credentials=Credentials(new_pair(), new_pair().public))

def hub():
    return HubSocket("tcp://127.0.0.1:0")

def gated():
    ring = Keyring(pathlib.Path(sys.argv[2]))
    ring.init(new_pair)
    return HubSocket("tcp://127.0.0.1:0", gate=Gate(ring))

def train(make):
    end = make()
    raise ValueError("the loop has a bug")

try:
    train(globals()[sys.argv[1]])
except ValueError as error:
    kept = error
kept.notebook = [kept]  # as what keeps an exception to show it later
del kept
gc.collect()
print("collected")
"""


@pytest.mark.real
@pytest.mark.parametrize("kind", ["member", "renewed", "encrypted", "hub", "gated"])
def test_a_loop_that_raised_and_kept_its_traceback_does_not_hang_when_it_is_collected(
    kind, tmp_path
):
    command = [sys.executable, "-W", "default", "-c", LOOP, kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout == "collected\n"
    assert "Socket was not closed" in done.stderr
    assert done.returncode == 0


def test_a_dropped_hub_lets_go_of_its_port_and_says_so():
    hub = HubSocket("tcp://127.0.0.1:0")
    address, gone = hub.address, weakref.ref(hub)
    hub.itself = hub
    del hub
    with pytest.warns(ResourceWarning, match="a HubSocket was not closed"):
        gc.collect()
    assert gone() is None
    HubSocket(address).close()


def test_closed_ends_are_collected_without_a_word():
    for end in (HubSocket("tcp://127.0.0.1:0"), MemberSocket("tcp://127.0.0.1:9")):
        end.itself = end
        end.close()
    del end
    gc.collect()


@pytest.mark.real
def test_a_fleet_that_connects_at_once_waits_in_the_kernels_queue():
    hub = HubSocket("tcp://127.0.0.1:0")
    try:
        found = []
        for name in (each.name for each in Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
                if each.getsockname()[1:2] == (hub.port,):
                    # struct tcp_info of a socket that listens has the room in tcpi_sacked.
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
                    found.append(struct.unpack_from("=I", info, 28)[0])
        assert found == [min(4096, int(Path("/proc/sys/net/core/somaxconn").read_text()))]
    finally:
        hub.close()
