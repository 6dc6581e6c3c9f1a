"""SSH host keys of devices: which texts are one, who may set one, and what known_hosts gets."""

from __future__ import annotations

import base64
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.gate import Gate, enrolled
from edgetrain.exchange.keys.host_keys import (
    LONGEST,
    fingerprint,
    known_hosts_line,
    read_host_key,
)
from edgetrain.exchange.keys.keyring import Keyring, read_token
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.zeromq.curve import new_pair, pair_of


def made_up(fill: int = 7) -> str:
    """A key of the right form."""
    blob = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes([fill]) * 32
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


def test_the_comment_is_dropped():
    assert read_host_key(f"{made_up()} root@pi-0\n") == made_up() == read_host_key(made_up())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not an SSH public key"),
        ("ssh-ed25519", "is not an SSH public key"),
        ("ssh-ed25519 AAAA", "is not an SSH public key"),
        (made_up().replace("ssh-ed25519 ", "ssh-rsa "), "is not an SSH public key"),
        (made_up() + "\nssh-ed25519 AAAA", "is not an SSH public key"),
        (made_up() + " " + "x" * LONGEST, "is not an SSH public key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n", "the host key is a private key"),
    ],
    ids=lambda v: v[:16],
)
def test_what_is_no_host_key_costs_one_line_that_does_not_repeat_it(text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_host_key(text, "the host key")
    assert "b3Bl" not in str(caught.value)


@given(st.text())
def test_any_text_is_a_key_or_an_error(text):
    for each in (text, f"ssh-ed25519 {text}"):
        try:
            found = read_host_key(each)
        except ConfigError:
            continue
        assert read_host_key(found) == found
        assert "\n" not in found


@pytest.mark.real
@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="package openssh-client is missing")
@pytest.mark.parametrize(
    "kind", [["ed25519"], ["ecdsa"], ["rsa", "-b", "4096"]], ids=lambda k: k[0]
)
def test_fingerprints_and_known_hosts_are_those_of_openssh(tmp_path, kind):
    private = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", *kind, "-f", str(private)], check=True)
    key = read_host_key(private.with_suffix(".pub").read_text())
    words = ["ssh-keygen", "-l", "-f", str(private)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert shown.split()[1] == fingerprint(key)
    known = tmp_path / "known_hosts"
    known.write_text(known_hosts_line(["pi-0", "pi-0.local"], key))
    words = ["ssh-keygen", "-F", "pi-0.local", "-f", str(known)]
    assert key in subprocess.run(words, capture_output=True, text=True, check=True).stdout


# -- at the hub -----------------------------------------------------------------------------------


@pytest.fixture
def ring(tmp_path):
    found = Keyring(tmp_path / "keys")
    found.init(new_pair)
    return found


def issued(ring: Keyring, name: str) -> str:
    """The identity of a connection that holds a new token."""
    secret = read_token(ring.issue_token(name, new_pair, 0.0))[1]
    return f"token {spell(pair_of(secret).public)}"


def test_a_device_sends_its_host_key_once_and_whoever_finds_the_token_later_changes_none(ring):
    gate = Gate(ring, lambda: 0.0, lambda: 0.0)
    identity, device = issued(ring, "pi-0"), new_pair().public
    answer, _ = gate.enrol(identity, [b"E", device, made_up(1).encode()])
    assert enrolled(answer) == "pi-0"
    assert ring.hosts() == {"pi-0": made_up(1)}
    answer, _ = gate.enrol(identity, [b"E", device, made_up(2).encode()])
    assert enrolled(answer) == "pi-0"
    assert ring.hosts() == {"pi-0": made_up(1)}
    ring.revoke("pi-0")
    assert ring.hosts() == {}


def test_an_enrolment_without_a_host_key_has_none_and_keeps_no_old_one(ring):
    gate = Gate(ring, lambda: 0.0, lambda: 0.0)
    gate.enrol(issued(ring, "pi-0"), [b"E", new_pair().public])
    assert ring.hosts() == {}
    assert not (ring.path / "hosts").exists()


@pytest.mark.parametrize(
    "sent", [b"", b"\xff" * 40, b"x" * 100_000, made_up().encode() + b"\n" + made_up().encode()]
)
def test_a_wrong_host_key_enrols_nobody_and_leaves_the_token_open(ring, sent):
    gate = Gate(ring, lambda: 0.0, lambda: 0.0)
    identity, device = issued(ring, "pi-0"), new_pair().public
    answer, said = gate.enrol(identity, [b"E", device, sent])
    assert answer[1] == b"no"
    assert "the host key is not an SSH public key" in said
    assert gate.enrol(identity, [b"E", device, made_up().encode(), b""])[0][1] == b"no"
    assert ring.members() == {}
    assert [name for name, _ in ring.open_tokens(0.0)] == ["pi-0"]


def test_a_damaged_file_names_itself(ring):
    (ring.path / "hosts").write_text("pi-0 ssh-ed25519 AAAA\n")
    with pytest.raises(ConfigError, match=r"a host key in .*hosts is not an SSH public key"):
        ring.hosts()
