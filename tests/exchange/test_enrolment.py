"""Enrolment over sockets: repeated after a failure anywhere, it ends in the same state."""

from __future__ import annotations

import base64
import threading
import time

import pytest

from edgetrain.errors import HubUnreachable, NetworkError, Refused
from edgetrain.exchange.addresses import first_route
from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.host_keys import read_host_key
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.enrolment import enrol
from edgetrain.exchange.zeromq.hub_socket import HubSocket

pytestmark = pytest.mark.real

NOBODY = "tcp://127.0.0.1:1"


class Serving:
    """A hub's socket with keys, served by a thread, that can lose its answers."""

    def __init__(self, folder):
        self.ring = Keyring(folder / "hub")
        self.ring.init(new_pair)
        self.socket = HubSocket("tcp://127.0.0.1:0", gate=Gate(self.ring))
        self.address = self.socket.address
        self.loses = 0
        self._send, self.socket.send = self.socket.send, self._answer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _answer(self, to, frames):
        if self.loses:
            self.loses -= 1
            return True
        return self._send(to, frames)

    def _serve(self):
        while not self._over.is_set():
            for _ in self.socket.poll(0.02):
                pass

    def close(self):
        self._over.set()
        self._thread.join()
        self.socket.close()


@pytest.fixture
def hub(tmp_path):
    found = Serving(tmp_path)
    yield found
    found.close()


def test_an_enrolment_brings_the_devices_host_key(hub, tmp_path):
    token = hub.ring.issue_token("pi-1", new_pair, time.time())
    kind = "ssh-ed25519"
    blob = len(kind).to_bytes(4, "big") + kind.encode() + bytes(36)
    host_key = read_host_key(f"{kind} {base64.b64encode(blob).decode()} root@pi-1")
    enrol(Keyring(tmp_path / "device"), [hub.address], token, host_key=host_key)
    assert hub.ring.hosts() == {"pi-1": host_key}


def test_an_enrolment_whose_answer_was_lost_is_repeated_by_the_same_device(hub, tmp_path):
    token = hub.ring.issue_token("pi-1", new_pair, time.time())
    device, other = Keyring(tmp_path / "pi"), Keyring(tmp_path / "other")
    hub.loses = 1
    with pytest.raises(NetworkError, match="did not answer the enrolment") as caught:
        enrol(device, [hub.address], token, timeout_s=0.5)
    assert caught.value.passing
    assert hub.ring.members() == {device.pair().public: "pi-1"}
    assert device.hub_key(hub.address) == hub.ring.pair().public, "pinned before it was sent"
    found = enrol(device, [hub.address], token)
    assert (found.name, found.hub) == ("pi-1", hub.address)
    with pytest.raises(Refused, match="was used before") as refused:
        enrol(other, [hub.address], token)
    assert not refused.value.passing
    assert hub.ring.members() == {device.pair().public: "pi-1"}


def test_the_power_may_fail_at_every_write_of_the_device(hub, tmp_path, monkeypatch):
    """After each the device is started again with the same token; the end is the same."""
    token = hub.ring.issue_token("pi-1", new_pair, time.time())
    device = Keyring(tmp_path / "pi")
    write, left = Keyring.write, [0]

    def fails(ring, name, text, mode):
        if ring.path == device.path:
            if not left[0]:
                raise KeyboardInterrupt  # the end of the process
            left[0] -= 1
        write(ring, name, text, mode)

    monkeypatch.setattr(Keyring, "write", fails)
    for writes in range(5):
        left[0] = writes
        try:
            assert enrol(device, [hub.address], token).name == "pi-1"
            break
        except KeyboardInterrupt:
            continue
    assert writes >= 1
    assert hub.ring.members() == {device.pair().public: "pi-1"}
    assert device.hubs() == {hub.address: hub.ring.pair().public}


def test_all_addresses_of_a_hub_have_one_pin_and_the_first_that_answers_is_used(hub, tmp_path):
    token = hub.ring.issue_token("pi-1", new_pair, time.time())
    device = Keyring(tmp_path / "pi")
    found = enrol(device, [NOBODY, hub.address], token)
    assert found.hub == hub.address
    key = hub.ring.pair().public
    assert device.hubs() == {NOBODY: key, hub.address: key}


def test_a_hub_that_is_another_than_the_tokens_changes_no_pin(hub, tmp_path):
    elsewhere = Keyring(tmp_path / "elsewhere")
    elsewhere.init(new_pair)
    token = elsewhere.issue_token("pi-1", new_pair, time.time())
    device = Keyring(tmp_path / "pi")
    device.pin_hub(hub.address, hub.ring.pair().public)
    with pytest.raises(HubUnreachable, match="the hub whose key is pinned"):
        enrol(device, [hub.address, "tcp://127.0.0.1:2"], token)
    assert device.hubs() == {hub.address: hub.ring.pair().public}


def test_none_of_several_addresses_answers():
    with pytest.raises(HubUnreachable, match="nothing listens at") as caught:
        first_route([NOBODY], 1.0)
    assert caught.value.passing
    several = ["tcp://no-such-name.invalid:5", NOBODY]
    with pytest.raises(HubUnreachable, match=r"none of .*cannot be resolved.*nothing listens"):
        first_route(several, 1.0)
