"""Enrolment over sockets: repeated after a failure anywhere, it ends in the same state."""

from __future__ import annotations

import base64
import contextlib
import time

import pytest
from patience import patience
from wrong_hubs import FIRST, NOBODY, Plain, Serving, at_first

from edgetrain.errors import HubUnreachable, NetworkError, Refused
from edgetrain.exchange.addresses import first_route
from edgetrain.exchange.keys.host_keys import read_host_key
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.messages import Refuse, pack
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.enrolment import enrol
from edgetrain.exchange.zeromq.member_socket import MemberSocket, wait_for_message

pytestmark = pytest.mark.real


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
    device.pin_hubs({hub.address: hub.ring.pair().public})
    with pytest.raises(HubUnreachable, match="the hub whose key is pinned"):
        enrol(device, [hub.address, "tcp://127.0.0.1:2"], token)
    assert device.hubs() == {hub.address: hub.ring.pair().public}


@pytest.mark.parametrize("first", FIRST)
def test_a_device_enrols_whatever_is_at_the_first_address(first, hub, tmp_path):
    token = hub.ring.issue_token("pi-1", new_pair, time.time())
    device = Keyring(tmp_path / "pi")
    with at_first(first, tmp_path) as address:
        found = enrol(device, [address, hub.address], token, timeout_s=patience(1))
    assert (found.name, found.hub) == ("pi-1", hub.address)
    assert hub.ring.members() == {device.pair().public: "pi-1"}
    assert device.hubs() == dict.fromkeys([address, hub.address], hub.ring.pair().public)


def test_what_each_address_said_is_listed_and_a_device_tries_again_if_one_may_come(hub, tmp_path):
    token = hub.ring.issue_token("pi-1", new_pair, time.time())
    device = Keyring(tmp_path / "pi")
    with (
        at_first("other key", tmp_path) as wrong,
        at_first("plain", tmp_path) as plain,
        pytest.raises(HubUnreachable) as caught,
    ):
        enrol(device, [NOBODY, wrong, plain], token, timeout_s=patience(1))
    for said in (
        f"{NOBODY}: nothing listens",
        f"{wrong}: the hub breaks off",
        f"{plain}: th",
    ):
        assert said in caught.value.message
    assert caught.value.passing
    assert "\n" not in str(caught.value)
    assert device.hubs() == {}
    enrol(device, [hub.address], token)
    with pytest.raises(Refused, match="was used before"):  # its own hub's word is the last
        enrol(Keyring(tmp_path / "other pi"), [hub.address, NOBODY], token)


@pytest.fixture
def place(tmp_path):
    """A member's credentials, their hub, and one with the same key that does not let them in."""
    device = new_pair()
    hub = Serving(tmp_path / "one", device=device)
    twin = Serving(tmp_path / "twin", hub.ring.pair())
    yield Credentials(device, hub.ring.pair().public), hub, twin
    twin.close()
    hub.close()


def ask(end, hub=None, tries=100):
    """Ask as a link does: again where the question went elsewhere, or after a while of silence."""
    end.send([b"J", b"question"])
    for number in range(1, int(patience(tries))):
        assert end.receive(0.1) is None
        if hub is not None and hub.heard:
            return
        if end.connections == 0 and number % 20 == 0:
            end.reconnect()
        if end.connections < 0 or number % 20 == 0:
            assert end.received_bytes() == 0, "no sign of life of a hub"
            end.send([b"J", b"question"])


@pytest.mark.parametrize("first", ["revoked", *FIRST])
def test_a_member_speaks_with_its_hub_whatever_is_at_the_first_address(first, place, tmp_path):
    credentials, hub, twin = place
    with contextlib.ExitStack() as stack:
        revoked = first == "revoked"
        address = twin.address if revoked else stack.enter_context(at_first(first, tmp_path))
        end = MemberSocket([address, hub.address], credentials=credentials)
        stack.callback(end.close, 0)
        ask(end, hub)
    assert hub.heard[0] == [b"J", b"question"]
    assert twin.heard == []


def test_a_member_whose_addresses_are_all_wrong_is_told_of_each(place, tmp_path):
    credentials, hub, twin = place
    with contextlib.ExitStack() as stack:
        wrong = stack.enter_context(at_first("other key", tmp_path))
        end = MemberSocket([wrong, twin.address], credentials=credentials)
        stack.callback(end.close, 0)
        with pytest.raises(HubUnreachable, match=r"breaks off.*; tcp.*does not let") as caught:
            ask(end, hub)
        assert caught.value.passing
        assert end.addresses[wrong].startswith("the hub breaks off")
        both = MemberSocket([twin.address, twin.address], credentials=credentials)
        stack.callback(both.close, 0)
        with pytest.raises(Refused, match="does not let this machine's key in") as refused:
            ask(both)
    assert (refused.value.code, refused.value.passing) == ("key", False)


@pytest.mark.parametrize("code", ["job", "model", "session"])
def test_without_encryption_a_hub_of_another_job_gives_way_too(code):
    with contextlib.ExitStack() as stack:
        other, hub = (stack.enter_context(contextlib.closing(Plain(c))) for c in (code, ""))
        end = MemberSocket([other.address, hub.address])
        stack.callback(end.close, 0)
        ask(end, hub)
        assert hub.heard[0] == [b"J", b"question"]
        alone = MemberSocket(other.address)
        stack.callback(alone.close, 0)
        alone.send([b"J", b"question"])
        assert wait_for_message(alone, 5.0) == [bytes(each) for each in pack(Refuse(code, "why"))]
        hub.code = code
        hub.heard.clear()
        both = MemberSocket([other.address, hub.address])
        stack.callback(both.close, 0)
        with pytest.raises(Refused, match=rf"refused: {code}: why; tcp.*refused: {code}: why"):
            ask(both)


def test_none_of_several_addresses_answers():
    with pytest.raises(HubUnreachable, match="nothing listens at") as caught:
        first_route([NOBODY], 1.0)
    assert caught.value.passing
    several = ["tcp://no-such-name.invalid:5", NOBODY]
    with pytest.raises(HubUnreachable, match=r"none of .*cannot be resolved.*nothing listens"):
        first_route(several, 1.0)
