"""What a device answers to a glance: made-up devices, and answers that are anything."""

from __future__ import annotations

import json
import platform

import pytest
from folder_remote import FolderRemote
from hypothesis import given
from hypothesis import strategies as st
from running_devices import flashed, stand_ins

from edgetrain.fleet.ssh import SshAnswer, SshHost, SshTrouble
from edgetrain.provisioning.desk import judged
from edgetrain.provisioning.glance import look

HOST = SshHost("pi", "pi")
BOARD = {
    "sys/class/thermal/thermal_zone0/temp": "100000\n",
    "sys/class/thermal/thermal_zone0/type": "PMIC-Die\n",
    "sys/class/thermal/thermal_zone1/temp": "61500\n",
    "sys/class/thermal/thermal_zone1/type": "cpu-thermal\n",
    "sys/devices/platform/soc/soc:firmware/get_throttled": "50005\n",
    "opt/edgetrain/a/edgetrain/exchange/messages.py": "# one\nPROTOCOL = 12\n",
    "opt/edgetrain/outcome.json": '{"ended": "back"}\n',
}


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A device that was flashed, and trains; a way to it."""
    monkeypatch.setenv("PATH", stand_ins(tmp_path / "stand-ins"))
    root = flashed(tmp_path / "devices/pi")
    for name, text in BOARD.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return FolderRemote(tmp_path / "devices"), root


def test_a_glance_finds_what_a_device_has_and_how_it_is(device):
    remote, root = device
    found = look(remote, HOST, "", 20.0)
    assert {key: found[key] for key in ("slot", "version", "protocol", "set", "trial")} == {
        "slot": "a", "version": {"edgetrain": "0.1.0"}, "protocol": 12,
        "set": {"digest": "first", "number": 1}, "trial": None,
    }  # fmt: skip
    assert (found["outcome"], found["enrolled"]) == ({"ended": "back"}, True)
    assert (found["celsius"], found["throttled"], found["under_voltage"]) == (61.5, True, True)
    assert (found["machine"], found["python"][:2]) == (platform.machine(), "3.")
    assert found["unit"]["text"] == "training: 3 of 9 steps"
    assert found["disk_free_bytes"] > 0
    (root / "var/lib/edgetrain-keys/hubs").unlink()
    assert not look(remote, HOST, "", 20.0)["enrolled"]
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    (wants / "edgetrain-member.service").symlink_to("/etc/systemd/system/edgetrain-member.service")
    assert look(remote, HOST, "", 20.0)["enrolled"], "a user who is not root does not see the keys"
    (root / "opt/edgetrain/a.json").write_text('{"digest": "x", "edgetrain": "0.2"}\n')
    (root / "opt/edgetrain/trial.json").write_text('{"old": "a", "phase": "trying"}\n')
    found = look(remote, HOST, "", 20.0)
    assert found["version"] == {"digest": "x", "edgetrain": "0.2"}
    assert found["trial"] == {"old": "a", "phase": "trying", "strict": False}


def test_a_machine_that_is_no_device_yet_is_seen(device, tmp_path):
    found = look(FolderRemote(tmp_path / "others"), HOST, "", 20.0)
    assert (found["slot"], found["version"], found["protocol"]) == ("", {}, None)
    assert judged("pi", found, found["clock"], "1").state == "not enrolled"


class Saying:
    """A device that answers anything."""

    def __init__(self, text):
        self.text = text

    def run(self, host, words, stdin=b"", *, seconds=60.0, root=False, heard=None):
        return SshAnswer(0, self.text.encode(errors="replace"))


WORDS = ("slot", "version", "set", "trial", "outcome", "zone", "kind", "flags", "clock", "machine",
         "python", "PROTOCOL =", "ActiveState=", "ExecMainStatus=", "dist", "enrolled")  # fmt: skip
VALUES = st.one_of(
    st.text(max_size=20),
    st.integers().map(str),
    st.sampled_from(["[" * 10_000, "9" * 5000, "{}", "[]", "1e400", "0x5", "null"]),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=3).map(json.dumps),
)


@given(st.lists(st.tuples(st.sampled_from(WORDS), VALUES), max_size=30), st.booleans())
def test_whatever_a_device_answers_is_a_state_or_no_answer(lines, whole):
    text = "".join(f"{word} {value}\n" for word, value in lines)
    if whole:
        text += "machine x\nclock 5000\n/dev/vda 10 5 5 50% /\n"
    found = look(Saying(text), HOST, "/", 1.0)
    state = judged("pi", found, 5.0, "1")
    assert (state.state == "unreachable") == isinstance(found, SshAnswer)
    assert not whole or found["disk_free_bytes"] == 5 << 10


def test_a_device_that_does_not_answer_says_why(device):
    remote, _ = device
    remote.troubles["pi"] = SshTrouble.REFUSED
    assert look(remote, HOST, "", 1.0).trouble is SshTrouble.REFUSED
    assert "something else" in look(Saying("hello\n"), HOST, "", 1.0).why
