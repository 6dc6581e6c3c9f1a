"""How `edgetrain member` ends: what a service manager learns from its exit status."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket

import pytest
from command_line import hub, write_tiny

import edgetrain.training.member.train as training
from edgetrain.__main__ import main
from edgetrain.errors import (
    ConfigError,
    Diverged,
    HubUnreachable,
    NetworkError,
    Refused,
    TaskError,
)
from edgetrain.exchange.keys.credentials import credentials
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Pair
from edgetrain.exchange.messages import CODES
from edgetrain.runs import folder as run_folders
from edgetrain.runs.folder import check_room, read_metrics

pytestmark = pytest.mark.usefixtures("own_imports")

NOBODY = "tcp://127.0.0.1:1"
LATER = {"name", "full", "started", "unknown", "session", "again", "few"}


@pytest.fixture
def listening():
    """The address of something that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def member(tmp_path, hub, *words):
    job = write_tiny(tmp_path, fleet={"members": 2}, train={"steps": 30})
    return main(
        ["member", str(tmp_path / job), "--hub", hub, "--index", "0", "--runs",
         str(tmp_path / "runs"), *words]
    )  # fmt: skip


def raises(monkeypatch, error):
    def train(*args, **kwargs):
        raise error

    monkeypatch.setattr(training, "train", train)


def test_the_way_to_the_hub_is_printed_once(listening, tmp_path, monkeypatch, capsys, caplog):
    """The library logs it for loops of one's own; the verb shows the library's log, too."""
    caplog.set_level(logging.INFO)
    raises(monkeypatch, Refused("ended", "the job is over"))
    assert member(tmp_path, listening) == 0
    said = capsys.readouterr()
    assert (said.out + said.err + caplog.text).count(f"joining {listening} over ") == 1


@pytest.mark.parametrize("code", CODES)
def test_a_refusal_ends_with_2_or_75_or_0_and_leaves_no_folder(
    code, listening, tmp_path, monkeypatch, capsys
):
    raises(monkeypatch, Refused(code, f"the hub refused: {code}: of course"))
    wanted = 0 if code == "ended" else 75 if code in LATER else 2
    assert member(tmp_path, listening) == wanted
    said = capsys.readouterr()
    assert f"the hub refused: {code}" in (said.err if wanted else said.out)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (HubUnreachable("the hub has been silent for 600 s"), 75),
        (HubUnreachable("the hub encrypts, and this member was told not to", passing=False), 2),
        (NetworkError("'x' is not an address"), 2),
        (Refused("key", "the hub does not let this machine's key in"), 2),
        (Refused("token", "unknown token"), 2),
        (Diverged("not finite"), 2),
        (ConfigError("no such codec"), 2),
        (TaskError("no data"), 2),
    ],
    ids=lambda value: getattr(value, "message", value),
)
def test_other_errors(error, status, listening, tmp_path, monkeypatch, capsys):
    raises(monkeypatch, error)
    assert member(tmp_path, listening) == status
    assert capsys.readouterr().err.startswith("edgetrain: ")


@pytest.mark.parametrize(
    ("hub", "status", "said"),
    [
        (NOBODY, 75, "nothing listens at"),
        ("tcp://no-such-name.invalid:5555", 75, "cannot be resolved"),
        ("5555", 2, "is not an address"),
    ],
)
def test_a_hub_that_cannot_be_reached(hub, status, said, tmp_path, capsys):
    assert member(tmp_path, hub, "--insecure") == status
    assert said in capsys.readouterr().err


def test_no_route(listening, tmp_path, monkeypatch, capsys):
    def unreachable(*args, **kwargs):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", unreachable)
    states = {"lo": True, "wlan0": False}
    monkeypatch.setattr("edgetrain.exchange.addresses.interface_states", lambda: states)
    assert member(tmp_path, listening) == 75
    assert "Network is unreachable (these interfaces are down: wlan0)" in capsys.readouterr().err


@pytest.mark.real
def test_other_verbs_end_with_2_whatever_it_is(capsys):
    assert main(["hub", "--bind", "tcp://no-such-name.invalid:1"]) == 75
    assert main(["run", "network=none", "no_such_key=1"]) == 2


@pytest.mark.parametrize(("words", "said"), [
    (("--metrics-mb", "0.001"), "--metrics-mb 0.001: allowed are 0.01 to 1e6"),
    (("--metrics-mb", "nan"), "--metrics-mb nan: allowed are"),
    (("--index", "2"), "--index 2: allowed are 0 to 1"),
])  # fmt: skip
def test_numbers_out_of_range(words, said, listening, tmp_path, capsys):
    assert member(tmp_path, listening, *words) == 2
    assert said in capsys.readouterr().err


def test_the_first_address_that_answers_is_joined_and_one_pin_does_for_all(
    listening, tmp_path, monkeypatch
):
    joined = {}

    def train(job, place, hub, open_log, **options):
        joined.update(hub=hub, credentials=options["credentials"])

    monkeypatch.setattr(training, "train", train)
    ring = Keyring(tmp_path / "keys")
    ring.init(lambda: Pair(b"p" * 32, b"s" * 32))
    ring.pin_hubs({NOBODY: b"h" * 32})
    assert member(tmp_path, NOBODY, "--hub", listening, "--keys", str(ring.path)) == 0
    assert joined["hub"] == [listening, NOBODY]
    assert [own.hub for own in joined["credentials"]] == [b"h" * 32]
    ring.pin_hubs({listening: b"i" * 32})
    with pytest.raises(ConfigError, match="these addresses have different keys here"):
        credentials([NOBODY, listening], chosen=ring.path)


# -- the run folder -------------------------------------------------------------------------------


def test_a_full_disk_is_said_before_anyone_is_asked(tmp_path, monkeypatch, capsys):
    usage = run_folders.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(run_folders.shutil, "disk_usage", lambda path: usage._replace(free=5))
    assert member(tmp_path, NOBODY) == 2
    assert "only 5 bytes are left on its disk (free some space" in capsys.readouterr().err


@pytest.mark.parametrize(("made", "said"), [("a file", "is a file"), ("", "")])
def test_room_is_looked_for_without_making_anything(made, said, tmp_path):
    root = tmp_path / "runs" / "mine"
    if made:
        (tmp_path / "runs").write_text(made)
        with pytest.raises(ConfigError, match=said):
            check_room(root)
    else:
        check_room(root)
        check_room("runs-of-nobody")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_a_disk_that_is_full_at_the_end_does_not_undo_the_training(tmp_path, monkeypatch, capsys):
    def train(job, place, hub, open_log, **options):
        with open_log("m0", 0.0) as log:
            log.event("finished", "30 steps")
        monkeypatch.setattr(run_folders, "write_text", full)

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training, "train", train)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert member(tmp_path, address) == 0
    said = capsys.readouterr()
    assert said.out.endswith("done\n")
    assert "the run has no summary: cannot write" in said.err


@pytest.mark.real
def test_a_member_alone_is_refused_at_its_hub_and_then_trains_with_few_metrics(tmp_path, capsys):
    """A real hub: it refuses another job, then takes the member."""
    job = write_tiny(tmp_path, fleet={"members": 1}, train={"steps": 400, "evaluate_every": 40})
    with hub(job, cwd=tmp_path) as (serving, address):
        words = ["member", str(tmp_path / job), "--hub", address, "--index", "0", "--runs",
                 str(tmp_path / "of members")]  # fmt: skip
        assert main([*words, "steps=401"]) == 2
        assert "the hub refused: job" in capsys.readouterr().err
        assert not (tmp_path / "of members").exists()
        assert main([*words, "--metrics-mb", "0.02"]) == 0
        assert serving.finish() == 0
    (folder,) = (tmp_path / "of members").iterdir()
    assert (folder / "metrics.jsonl").stat().st_size < 20_000
    steps = list(read_metrics(folder, "step"))
    assert sum(line.get("steps", 1) for line in steps) == 400
    assert 20 < len(steps) < 80
    assert not list(read_metrics(folder, "exchange")), "they would take the room of steps"
    assert len(list(read_metrics(folder, "eval"))) == 11
    assert json.loads((folder / "summary.json").read_text())["steps"] == 400
