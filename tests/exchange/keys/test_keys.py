"""Keys: files that only their owner reads, a list that changes, tokens that count once."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError, NetworkError, Refused
from edgetrain.exchange.keys.gate import Gate, enrolled
from edgetrain.exchange.keys.keyring import LOOK_S, Keyring, Revoked, read_token
from edgetrain.exchange.keys.pairs import (
    Credentials,
    Pair,
    keys_folder,
    public_key,
    read_key,
    spell,
)
from edgetrain.exchange.zeromq.curve import new_pair, pair_of

NUMBERS = itertools.count(1)


def made_up() -> Pair:
    """Distinct keys, without the cryptography."""
    number = next(NUMBERS)
    return Pair(number.to_bytes(32, "big"), (1 << 200 | number).to_bytes(32, "big"))


@pytest.fixture
def ring(tmp_path):
    return Keyring(tmp_path / "hub keys")


@given(st.binary(min_size=32, max_size=32))
def test_a_key_can_be_spelled_and_read(key):
    assert len(spell(key)) == 43
    assert read_key(f" {spell(key)}\n") == key


@pytest.mark.parametrize("text", ["", "x", "a" * 42, "a" * 44, "a" * 42 + "!", "ä" * 43, "a" * 86])
def test_what_is_no_key_is_refused_and_not_repeated(text):
    with pytest.raises(ConfigError, match="is not a key: a key has 43 letters") as caught:
        read_key(text)
    assert not text or text not in str(caught.value) or len(text) < 2


def test_a_real_pair_belongs_together():
    pair = new_pair()
    assert (len(pair.public), len(pair.secret)) == (32, 32)
    assert pair_of(pair.secret) == pair
    assert new_pair() != pair


def test_a_pair_is_written_for_its_owner_only_and_read_back(ring):
    assert not ring.exists
    with pytest.raises(ConfigError, match=r"no keys in .*edgetrain keys init"):
        ring.pair()
    old = os.umask(0)
    try:
        pair = ring.init(new_pair)
    finally:
        os.umask(old)
    assert ring.exists
    assert ring.pair() == pair
    assert stat.S_IMODE((ring.path / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(ring.path.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match=r"has keys .* already.*--replace"):
        ring.init(new_pair)
    assert ring.init(new_pair, replace=True) != pair


def test_what_a_crash_left_behind_opens_no_key_to_others(ring):
    ring.path.mkdir()
    draft = ring.path / f".key.{os.getpid()}"
    draft.touch()
    draft.chmod(0o666)
    ring.init(made_up)
    assert stat.S_IMODE((ring.path / "key").stat().st_mode) == 0o600
    assert not draft.exists()


def test_a_key_that_others_can_read_is_not_used(ring):
    ring.init(made_up)
    (ring.path / "key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by others \(chmod 600"):
        ring.pair()


@pytest.mark.parametrize("text", ["", "public x", "public {p}\nsecret x\n", "secret {p}\n"])
def test_a_damaged_key_file_is_named(ring, text):
    pair = ring.init(made_up)
    (ring.path / "key").write_text(text.format(p=spell(pair.public)))
    with pytest.raises(ConfigError, match="key"):
        ring.pair()


def test_secrets_are_in_no_repr_and_in_no_error(ring):
    pair = ring.init(new_pair)
    secret = spell(pair.secret)
    assert secret not in repr(pair)
    assert repr(pair.secret) not in repr(Credentials(pair, pair.public))
    token = ring.issue_token("pi-1", new_pair, 0.0)
    for bad in (token[:-1], token + "x", token.removeprefix("edgetrain-")):
        with pytest.raises(ConfigError) as caught:
            read_token(bad)
        assert token[20:40] not in str(caught.value)
    (ring.path / "key").write_text(f"public {spell(pair.public)}\nsecret {secret}x\n")
    with pytest.raises(ConfigError) as caught:
        ring.pair()
    assert secret not in str(caught.value)


# -- the list -------------------------------------------------------------------------------------


def test_the_list_is_added_to_and_taken_from(ring):
    a, b = made_up().public, made_up().public
    ring.allow(a, "pi-1")
    ring.allow(b, "pi-2")
    ring.allow(a, "pi-1")
    assert ring.members() == {a: "pi-1", b: "pi-2"}
    with pytest.raises(ConfigError, match=r"'pi-1' is on the list already, with key .*revoke pi-1"):
        ring.allow(made_up().public, "pi-1")
    assert ring.revoke("pi-1") == Revoked("pi-1", (a,), 0)
    assert ring.revoke(spell(b)) == Revoked("pi-2", (b,), 0)
    assert ring.members() == {}
    ring.allow(a, "pi-1")
    with pytest.raises(ConfigError, match=r"no device 'pi1' on the list, .* \(did you mean 'pi-1'"):
        ring.revoke("pi1")


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 65, "a\nb", "#", "ä"])
def test_names_that_would_not_fit_a_line_are_refused(ring, name):
    for put in (
        lambda: ring.allow(made_up().public, name),
        lambda: ring.issue_token(name, made_up, 0),
    ):
        with pytest.raises(ConfigError, match="cannot be a device's name"):
            put()


def test_a_list_may_be_edited_by_hand_and_damage_is_named(ring):
    key = made_up().public
    ring.allow(key, "pi-1")
    path = ring.path / "members"
    path.write_text(f"# my fleet\n\n{spell(key)} pi-9   # in the cellar\n")
    assert ring.members() == {key: "pi-9"}
    path.write_text(f"{spell(key)} pi-9 too many\n")
    with pytest.raises(ConfigError, match="members, line 1: 2 words are needed, not 4"):
        ring.members()
    path.write_text("short pi-9\n")
    with pytest.raises(ConfigError, match=r"the public key in .*members is not a key"):
        ring.members()


def test_hubs_are_pinned_by_address(ring):
    a, b = made_up().public, made_up().public
    assert ring.hub_key("tcp://h:1") is None
    ring.pin_hubs({"tcp://h:1": a})
    ring.pin_hubs({"tcp://h:2": b})
    ring.pin_hubs({"tcp://h:1": b})
    assert (ring.hub_key("tcp://h:1"), ring.hub_key("tcp://h:2"), ring.hub_key("tcp://h:3")) == (
        b,
        b,
        None,
    )


def test_a_public_key_is_taken_as_text_or_from_a_file(ring, tmp_path):
    pair = ring.init(made_up)
    (tmp_path / "one").write_text(f"# the hub\n{spell(pair.public)}\n")
    for text in (spell(pair.public), str(tmp_path / "one"), str(ring.path / "key")):
        assert public_key(text) == pair.public
    for text in ("nowhere", str(tmp_path), spell(pair.public) + "x"):
        with pytest.raises(ConfigError, match="neither a public key nor a file"):
            public_key(text)
    for first in "-_09":
        assert public_key(first + spell(pair.public)[1:]) is not None
    (tmp_path / "none").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="no public key in"):
        public_key(str(tmp_path / "none"))


# -- tokens ---------------------------------------------------------------------------------------


def issued(ring, name="pi-1", now=1000.0, minutes=1):
    pairs = []

    def make():
        pairs.append(made_up())
        return pairs[-1]

    text = ring.issue_token(name, make, now, minutes)
    hub, secret = read_token(text)
    assert hub == ring.pair().public
    assert secret == pairs[0].secret
    return pairs[0].public


def test_a_token_counts_once(ring):
    ring.init(made_up)
    token, device = issued(ring), made_up().public
    assert stat.S_IMODE((ring.path / "tokens").stat().st_mode) == 0o600
    assert ring.open_tokens(1001.0) == [("pi-1", 59.0)]
    assert ring.redeem_token(token, device, 1030.0) == "pi-1"
    assert ring.members() == {device: "pi-1"}
    assert ring.open_tokens(1031.0) == []
    with pytest.raises(ConfigError, match="token for 'pi-1' was used before"):
        ring.redeem_token(token, made_up().public, 1031.0)
    assert ring.members() == {device: "pi-1"}


def test_the_device_that_used_a_token_may_repeat_it_until_it_is_revoked(ring):
    """The hub's answer may be lost, or the device's power."""
    ring.init(made_up)
    token, device = issued(ring), made_up().public
    for now in (1001.0, 1002.0, 1059.0):
        assert ring.redeem_token(token, device, now) == "pi-1"
        assert ring.why_no_token(token, now) == ""
    assert ring.members() == {device: "pi-1"}
    with pytest.raises(ConfigError, match="has expired"):
        ring.redeem_token(token, device, 1060.0)
    assert "has expired" in ring.why_no_token(token, 1060.0)
    ring.revoke("pi-1")
    with pytest.raises(ConfigError, match="was revoked"):
        ring.redeem_token(token, device, 1031.0)
    assert "was revoked" in ring.why_no_token(token, 1031.0)
    ring.allow(device, "pi-1")  # on the list, and not by this token
    with pytest.raises(ConfigError, match="was revoked"):
        ring.redeem_token(token, device, 1031.0)


def test_revoking_a_name_closes_tokens_that_a_folder_has_from_before(ring):
    """Older versions left every token open that was issued for a name."""
    ring.init(made_up)
    first, second, other = issued(ring), issued(ring), issued(ring, "pi-2")
    path = ring.path / "tokens"
    path.write_text(path.read_text().replace("closed", "open"))
    device = made_up().public
    assert ring.redeem_token(first, device, 1001.0) == "pi-1"
    assert ring.revoke(spell(device)) == Revoked("pi-1", (device,), 1)
    with pytest.raises(ConfigError, match="was revoked, or replaced by a newer one"):
        ring.redeem_token(second, made_up().public, 1002.0)
    assert ring.redeem_token(other, made_up().public, 1002.0) == "pi-2"


def test_a_lost_cards_token_can_be_closed_before_anyone_has_used_it(ring):
    ring.init(made_up)
    lost = issued(ring)
    with pytest.raises(ConfigError, match=r"and no open token for it \(did you mean 'pi-1'"):
        ring.revoke("pi1")
    assert ring.revoke("pi-1") == Revoked("pi-1", (), 1)
    assert ring.open_tokens(1001.0) == []
    with pytest.raises(ConfigError, match="was revoked"):
        ring.redeem_token(lost, made_up().public, 1001.0)
    with pytest.raises(ConfigError, match="no open token"):
        ring.revoke("pi-1")
    assert ring.redeem_token(issued(ring), made_up().public, 1002.0) == "pi-1"


def test_a_key_is_revoked_also_where_the_tokens_are_damaged(ring):
    ring.init(made_up)
    ring.allow(made_up().public, "pi-1")
    (ring.path / "tokens").write_text("what is this\n")
    with pytest.raises(ConfigError, match="line 1"):
        ring.revoke("pi-1")
    assert ring.members() == {}


def test_a_token_holds_if_the_power_fails_before_it_is_written_down_as_used(ring, monkeypatch):
    ring.init(made_up)
    token, device = issued(ring), made_up().public

    write = ring.write

    def until_the_tokens(name, text, mode):
        if name == "tokens":
            raise KeyboardInterrupt
        write(name, text, mode)

    with monkeypatch.context() as patched:
        patched.setattr(ring, "write", until_the_tokens)
        with pytest.raises(KeyboardInterrupt):
            ring.redeem_token(token, device, 1001.0)
    with pytest.raises(ConfigError, match="on the list already"):
        ring.redeem_token(token, made_up().public, 1002.0)
    assert ring.redeem_token(token, device, 1002.0) == "pi-1"
    assert ring.members() == {device: "pi-1"}


DEEDS = st.sampled_from(["issue", "redeem", "revoke"])


@given(st.lists(st.tuples(DEEDS, st.integers(0, 2), st.integers(0, 3)), max_size=40))
def test_only_the_newest_token_since_a_name_was_revoked_lets_a_device_in(tmp_path_factory, deeds):
    ring = Keyring(tmp_path_factory.mktemp("ring"))
    ring.init(made_up)
    keys, tokens, users, counts = [made_up().public for _ in range(3)], [], {}, None
    for deed, which, age in deeds:
        if deed == "issue":
            with contextlib.suppress(ConfigError):
                tokens.append(issued(ring))
                counts = tokens[-1]
        elif deed == "revoke":
            with contextlib.suppress(ConfigError):
                ring.revoke("pi-1")
                counts = None
        elif age < len(tokens):
            token = tokens[-1 - age]
            with contextlib.suppress(ConfigError):
                ring.redeem_token(token, keys[which], 1001.0)
                assert token == counts
                assert users.setdefault(token, keys[which]) == keys[which]
        assert set(ring.members().values()) <= {"pi-1"}
        assert len(ring.members()) <= 1


def test_a_token_expires_and_an_unknown_one_was_never_there(ring):
    ring.init(made_up)
    token = issued(ring)
    with pytest.raises(ConfigError, match="has expired"):
        ring.redeem_token(token, made_up().public, 1060.0)
    with pytest.raises(ConfigError, match="no such enrolment token"):
        ring.redeem_token(made_up().public, made_up().public, 1001.0)
    issued(ring, "pi-2", now=2000.0)  # what has expired is swept away
    assert len((ring.path / "tokens").read_text().splitlines()) == 1
    assert ring.members() == {}


def test_a_name_is_given_to_one_device(ring):
    ring.init(made_up)
    token = issued(ring)
    ring.allow(made_up().public, "pi-1")
    with pytest.raises(ConfigError, match="'pi-1' is on the list already"):
        ring.redeem_token(token, made_up().public, 1001.0)
    with pytest.raises(ConfigError, match="'pi-1' is on the list already"):
        ring.issue_token("pi-1", made_up, 1001.0)


def test_no_token_without_a_pair_of_the_hubs_own(ring):
    with pytest.raises(ConfigError, match="edgetrain keys init"):
        ring.issue_token("pi-1", made_up, 0.0)


# -- who else can change it ---------------------------------------------------------------------


def use_of(ring, name):
    """What a machine does with one of its files of keys."""
    return {
        "key": ring.pair,
        "members": ring.members,
        "tokens": lambda: ring.open_tokens(0.0),
        "hubs": ring.hubs,
        "hosts": ring.hosts,
    }[name]


def whole(ring):
    """A folder with all files."""
    ring.init(made_up)
    ring.allow(made_up().public, "pi-1")
    issued(ring, "pi-2")
    ring.pin_hubs({"tcp://hub:1": made_up().public})
    (ring.path / "hosts").write_text("")
    return ring


FILES = ("key", "members", "tokens", "hubs", "hosts")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o606, 0o646])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_others_can_write_is_not_used(ring, name, mode):
    whole(ring)
    (ring.path / name).chmod(mode)
    with pytest.raises(ConfigError, match=rf"{name} can be written by others .*chmod go-w"):
        use_of(ring, name)()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o733, 0o1777])
def test_a_folder_that_others_can_write_is_neither_used_nor_written(ring, mode):
    whole(ring)
    ring.path.chmod(mode)
    before = {path.name: path.read_bytes() for path in ring.path.iterdir()}
    for name in FILES:
        with pytest.raises(ConfigError, match="hub keys can be written by others"):
            use_of(ring, name)()
    for write in (
        lambda: ring.init(made_up, replace=True),
        lambda: ring.allow(made_up().public, "pi-9"),
        lambda: ring.pin_hubs({"tcp://hub:2": made_up().public}),
    ):
        with pytest.raises(ConfigError, match="hub keys can be written by others"):
            write()
    assert {path.name: path.read_bytes() for path in ring.path.iterdir()} == before


@pytest.mark.parametrize("place", ["the folder", *FILES])
def test_what_belongs_to_another_user_is_not_used(ring, place, monkeypatch):
    whole(ring)
    path = ring.path if place == "the folder" else ring.path / place
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 4321, -1)
    name = "key" if place == "the folder" else place
    if place != "the folder":  # root in a folder of its own
        with pytest.raises(ConfigError, match="belongs to another user"):
            use_of(ring, name)()
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(ConfigError, match="belongs to another user"):
        use_of(ring, name)()


def test_root_uses_the_folder_of_its_caller(ring):
    whole(ring)
    if os.geteuid():
        pytest.skip("only root can give a file away")
    for path in (ring.path, *ring.path.iterdir()):
        os.chown(path, 4321, -1)
    for name in FILES:
        use_of(ring, name)()


@pytest.mark.parametrize("kind", ["a FIFO", "/dev/zero", "a folder", "too large"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_not_a_file_is_refused_and_not_waited_for(ring, name, kind):
    whole(ring)
    path = ring.path / name
    path.unlink()
    if kind == "a FIFO":
        os.mkfifo(path, 0o600)
    elif kind == "/dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir(mode=0o700)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"regular file|Is a directory|is larger than"):
        use_of(ring, name)()


def test_a_fifo_as_lock_or_as_the_key_of_a_hub_is_not_waited_for(ring, tmp_path):
    ring.init(made_up)
    os.mkfifo(ring.path / ".lock")
    ring.allow(made_up().public, "pi-1")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(ConfigError, match="neither a public key nor a file"):
            public_key(str(path))


def test_a_running_hub_lets_nobody_new_in_by_a_list_that_others_can_write(ring):
    whole(ring)
    now = [0.0]
    gate = Gate(ring, clock=lambda: now[0])
    (known,) = ring.members()
    assert gate.admit(known)[0]
    (ring.path / "members").chmod(0o666)
    now[0] += 2 * LOOK_S
    identity, why = gate.admit(known)
    assert not identity
    assert "can be written by others" in why
    assert gate.knows(f"member {spell(known)}"), "those that are there stay"


# -- the gate -------------------------------------------------------------------------------------


@pytest.fixture
def gate(ring):
    ring.init(made_up)
    ring.now = 0.0
    return Gate(ring, clock=lambda: ring.now, wall=lambda: 1000.0 + ring.now)


def test_a_machine_may_join_its_own_hub_where_the_gate_says_so(ring, gate):
    own = ring.pair().public
    assert Gate(ring).admit(own)[0] == ""
    gate = Gate(ring, own_name="servers")
    assert gate.admit(own) == (f"member {spell(own)}", "")
    assert gate.allowed()[own] == "servers"
    assert gate.knows(f"member {spell(own)}")


def test_the_gate_admits_the_list_and_sees_it_change(ring, gate):
    a, b = made_up().public, made_up().public
    ring.allow(a, "pi-1")
    assert gate.admit(a)[0] == ""  # looked a moment ago
    ring.now += LOOK_S
    identity, refused = gate.admit(a)
    assert (identity, refused) == (f"member {spell(a)}", "")
    assert gate.knows(identity)
    assert gate.admit(b) == ("", f"key {spell(b)[:8]}… is not on the list")
    ring.revoke("pi-1")
    ring.now += LOOK_S
    assert not gate.knows(identity)
    assert gate.admit(a)[0] == ""
    assert not gate.knows("")
    assert not gate.knows("None")
    assert not gate.knows(f"stranger {spell(a)}")


def test_a_list_that_is_half_written_for_a_moment_revokes_nobody(ring, gate):
    a, b = made_up().public, made_up().public
    ring.allow(a, "pi-1")
    ring.allow(b, "pi-2")
    for _ in range(2):
        ring.now += LOOK_S
        before = gate.allowed()
    assert set(before) == {a, b}
    path = ring.path / "members"
    whole = path.read_text()
    for half in ("", whole[: len(whole) // 2]):
        path.write_text(half)
        ring.now += LOOK_S
        assert set(gate.allowed()) == {a, b}
        path.write_text(whole)
        ring.now += LOOK_S
        assert set(gate.allowed()) == {a, b}
    ring.revoke("pi-1")
    ring.now += LOOK_S
    assert not gate.knows(f"member {spell(a)}"), "what it says counts no more at once"
    ring.now += LOOK_S
    assert set(gate.allowed()) == {b}
    assert gate.allowed() is gate.allowed()


def test_a_damaged_list_lets_nobody_new_in_and_drops_nobody(ring, gate):
    a = made_up().public
    ring.allow(a, "pi-1")
    ring.now += LOOK_S
    identity, _ = gate.admit(a)
    (ring.path / "members").write_text("what is this\n")
    ring.now += LOOK_S
    assert gate.knows(identity)
    for _ in range(2):
        ring.now += LOOK_S
        assert gate.admit(a)[1].startswith("the list cannot be read: ")


def test_the_gate_enrols_whoever_holds_a_token_once(ring, gate):
    token, device = issued(ring), made_up().public
    identity, refused = gate.admit(token)
    assert (identity, refused) == (f"token {spell(token)}", "")
    assert gate.knows(identity)
    for frames in ([], [b"E"], [b"E", b"short"], [b"J", device], [b"E", device, b""]):
        assert gate.enrol(identity, frames)[0][1] == b"no"
    assert gate.enrol(f"member {spell(token)}", [b"E", device])[0][1] == b"no"
    answer, said = gate.enrol(identity, [b"E", device])
    assert (enrolled(answer), said) == ("pi-1", "")
    answer, said = gate.enrol(identity, [b"E", made_up().public])
    assert said == "the enrolment token for 'pi-1' was used before"
    with pytest.raises(Refused, match=r"the hub refused: the enrolment token .* was used before"):
        enrolled(answer)
    assert gate.admit(token) == (identity, ""), "its device may not have heard the answer"
    answer, _ = gate.enrol(identity, [b"E", device])
    assert enrolled(answer) == "pi-1"
    ring.revoke("pi-1")
    assert "was revoked" in gate.admit(token)[1]
    answer, said = gate.enrol(identity, [b"E", device])
    assert "was revoked" in said, "also over a connection from before"


@pytest.mark.parametrize("frames", [None, [], [b"E", b"ok"], [b"X", b"ok", b"n"], [b"E"] * 4])
def test_answers_that_are_none_are_named(frames):
    with pytest.raises(NetworkError):
        enrolled(frames)


def test_the_folder_is_where_people_expect_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert keys_folder() == tmp_path / "edgetrain"
    assert keys_folder(tmp_path / "x") == tmp_path / "x"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys_folder() == tmp_path / ".config/edgetrain"
