"""`edgetrain keys`, and a hub and members that use what it leaves, as people run them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from command_line import EDGETRAIN, edgetrain, hub, running, write_tiny

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.credentials import credentials
from edgetrain.exchange.keys.keyring import Keyring, read_token
from edgetrain.exchange.keys.pairs import Credentials, Pair, keys_folder, read_key, spell


def answer(capsys, *words):
    assert main(["keys", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    assert main(["keys", *words]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_a_pair_is_made_once(tmp_path, capsys):
    made = answer(capsys, "init", "--keys", str(tmp_path))
    assert Keyring(tmp_path).pair().public == read_key(made["public"])
    assert "already" in refused(capsys, "init", "--keys", str(tmp_path))
    again = answer(capsys, "init", "--replace", "--keys", str(tmp_path))
    assert again["public"] != made["public"]


@pytest.mark.parametrize("first", [0b111110_00, 0b111111_00], ids=["-", "_"])
def test_a_key_may_begin_with_any_letter_of_its_alphabet(tmp_path, capsys, first):
    key = spell(bytes([first]) + bytes(31))
    assert key[0] in "-_"
    at = ("--keys", str(tmp_path))
    answer(capsys, "init", *at)
    answer(capsys, "enroll", "kitchen", "--key", key, *at)
    assert answer(capsys, "list", *at)["members"] == {"kitchen": key}
    assert credentials("tcp://hub:1", key, tmp_path).hub == read_key(key)
    member = ["member", "none.toml", "--hub", "tcp://hub:1", "--index", "0"]
    assert main([*member, "--hub-key", key]) == 2  # the option was understood
    assert "none.toml" in capsys.readouterr().err


def test_the_list_by_hand(tmp_path, capsys):
    at = ("--keys", str(tmp_path))
    key = answer(capsys, "init", *at)["public"]
    assert answer(capsys, "enroll", "pi-3", "--key", key, *at) == {"name": "pi-3", "key": key}
    token = answer(capsys, "enroll", "pi-4", "--minutes", "5", *at)["token"]
    found = answer(capsys, "list", *at)
    assert found["members"] == {"pi-3": key}
    assert found["public"] == key
    ((open_token),) = found["tokens"]
    assert open_token["name"] == "pi-4"
    assert 290 <= open_token["seconds"] <= 300
    assert main(["keys", "list", *at]) == 0
    text = capsys.readouterr().out
    assert key in text
    secret = spell(read_token(token)[1])
    assert token not in text
    assert secret not in text
    assert answer(capsys, "revoke", "pi-3", *at) == {"name": "pi-3", "key": key, "tokens": 0}
    assert answer(capsys, "list", *at)["members"] == {}


def test_a_token_is_replaced_and_closed_by_name(tmp_path, capsys):
    at = ("--keys", str(tmp_path))
    answer(capsys, "init", *at)
    assert main(["keys", "enroll", "pi-4", *at]) == 0
    assert "older token" not in capsys.readouterr().out
    assert main(["keys", "enroll", "pi-4", *at]) == 0
    assert "(the older token for this name is closed)" in capsys.readouterr().out
    assert len(answer(capsys, "list", *at)["tokens"]) == 1
    assert answer(capsys, "revoke", "pi-4", *at) == {"name": "pi-4", "key": None, "tokens": 1}
    assert answer(capsys, "list", *at)["tokens"] == []
    answer(capsys, "enroll", "pi-4", *at)
    assert main(["keys", "revoke", "pi-4", *at]) == 0
    assert capsys.readouterr().out == "the open enrolment token for pi-4 is closed\n"


def test_known_hosts_have_every_name_of_a_device(tmp_path, capsys):
    at = ("--keys", str(tmp_path))
    answer(capsys, "init", *at)
    assert main(["keys", "known-hosts", *at]) == 0
    assert "no device has sent a host key" in capsys.readouterr().err
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ5uJ5uJ5uJ5uJ5uJ5uJ5uJ5uJ5uJ5uJ5uJ5uJ5u"
    (tmp_path / "hosts").write_text(f"pi-0 {key}\npi-1 {key}\n")
    (tmp_path / "cluster.toml").write_text(
        '[[device]]\nname = "pi-0"\nprofile = "raspberry-pi-4b"\naddress = "10.0.0.7/24"\n'
    )
    assert main(["keys", "known-hosts", "--cluster", str(tmp_path / "cluster.toml"), *at]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"pi-0,pi-0.local,10.0.0.7 {key}",
        f"pi-1,pi-1.local {key}",
    ]
    assert answer(capsys, "list", *at)["hosts"]["pi-0"].startswith("SHA256:")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["enroll"], "who is to be enrolled"),
        (["enroll", "pi-1"], "this machine has no keys in"),
        (["enroll", "pi-1", "--minutes", "0"], "--minutes 0: allowed are"),
        (["enroll", "pi-1", "--key", "x"], "'x' is neither a public key nor a file"),
        (["enroll", "--hub", "tcp://localhost:1"], "--token is missing"),
        (["enroll", "--hub", "tcp://localhost:1", "--token", "x"], "is not an enrolment token"),
        (["enroll", "--hub", "tcp://localhost:1", "--token", "@none"], "cannot read the token in"),
        (["enroll", "--hub", "tcp://localhost:1", "--token", "@/dev/null"], "there is no token in"),
        (
            ["enroll", "--hub", "tcp://localhost:1", "--token", "x", "--ssh-host-key", "none"],
            "cannot read the host key in none",
        ),
        (["revoke", "pi-1"], "no device 'pi-1' on the list"),
    ],
)
def test_what_cannot_be_done_is_said(words, said, tmp_path, capsys):
    assert said in refused(capsys, *words, "--keys", str(tmp_path))


def test_with_what_a_hub_is_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    far, near = "tcp://192.0.2.1:5555", "tcp://localhost:5555"
    assert credentials(far, insecure=True) is None
    assert credentials(near) is None
    with pytest.raises(ConfigError, match=r"the hub at tcp://192\.0\.2\.1:5555 is not known"):
        credentials(far)
    with pytest.raises(ConfigError, match="not known"):
        credentials(near, chosen=tmp_path / "others")
    ring = Keyring(keys_folder())
    hub_key = spell(bytes(range(32)))
    with pytest.raises(ConfigError, match="edgetrain keys init"):
        credentials(far, hub_key)
    own = ring.init(lambda: Pair(b"p" * 32, b"s" * 32))
    assert credentials(far, hub_key) == Credentials(own, bytes(range(32)))
    ring.pin_hubs({near: b"h" * 32})
    assert credentials(near) == Credentials(own, b"h" * 32)


def test_enrolment_where_nobody_answers_may_be_tried_again(tmp_path, capsys):
    ring = Keyring(tmp_path)
    ring.init(lambda: Pair(bytes(range(32)), b"s" * 32))
    token = ring.issue_token("pi-1", lambda: Pair(b"p" * 32, b"t" * 32), time.time())
    words = ["keys", "enroll", "--hub", "tcp://127.0.0.1:1", "--token", token]
    assert main([*words, "--keys", str(tmp_path)]) == 75
    assert "nothing listens at" in capsys.readouterr().err
    assert ring.hubs() == {}


def everything_written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.real
def test_devices_enrol_and_train_encrypted_and_no_secret_is_left_anywhere(tmp_path, capsys):
    job = write_tiny(tmp_path, fleet={"members": 2}, train={"steps": 30})
    ours, theirs, strange = (str(tmp_path / name) for name in ("ours", "theirs", "strange"))
    answer(capsys, "init", "--keys", ours)
    answer(capsys, "init", "--keys", strange)
    tokens = [answer(capsys, "enroll", f"pi-{i}", "--keys", ours)["token"] for i in range(2)]
    said = []
    with hub(job, "--keys", ours, cwd=tmp_path) as (serving, address):
        public = serving.until("public key is").split()[-1]

        def enroll(token, at):
            return edgetrain("keys", "enroll", "--hub", address, "--token", token, "--keys", at,
                             cwd=tmp_path)  # fmt: skip

        (tmp_path / "token").write_text(f"{tokens[0]}\n(lets one device in)\n")
        done = enroll("@token", theirs)
        assert "enrolled as pi-0" in done.stdout, done.stderr
        again = enroll(tokens[0], theirs)
        assert "enrolled as pi-0" in again.stdout, again.stderr
        replayed = enroll(tokens[0], strange)
        assert replayed.returncode == 2
        assert "the enrolment token for 'pi-0' was used before" in replayed.stderr
        serving.until("the enrolment token for 'pi-0' was used before")
        member = ("member", job, "--hub", address)
        plain = edgetrain(*member, "--index", "0", cwd=tmp_path)
        assert "the hub encrypts, and this member was told not to" in plain.stderr
        wrong = edgetrain(*member, "--index", "0", "--keys", strange, "--hub-key", public,
                          cwd=tmp_path)  # fmt: skip
        assert "does not let this machine's key in" in wrong.stderr
        serving.until("is not on the list")
        answer(capsys, "enroll", "pi-9", "--key", f"{strange}/key", "--keys", ours)
        ends = (("--keys", theirs), ("--keys", strange, "--hub-key", public))
        with (
            running(*member, "--index", "0", *ends[0], cwd=tmp_path, program=EDGETRAIN) as one,
            running(*member, "--index", "1", *ends[1], cwd=tmp_path, program=EDGETRAIN) as two,
        ):
            said += [one, two]
            assert (one.finish(), two.finish()) == (0, 0), one.said + two.said
            assert ", encrypted" in one.said
        assert serving.finish() == 0
        said.append(serving)
    secrets = [read_token(token)[1] for token in tokens]
    secrets += [Keyring(Path(at)).pair().secret for at in (ours, theirs, strange)]
    written = everything_written(tmp_path / "runs") + "".join(each.said for each in said).encode()
    assert b"was used before" in written
    assert not any(token.encode() in written for token in tokens)
    for secret in secrets:
        assert secret not in written
        assert spell(secret).encode() not in written
