"""A flashed card boots, enrols, joins and trains; and what it is worth when things go wrong.

Boots Debian under user-mode-linux: `make test-boot`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boot_card
import pytest
import sklearn

from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.fleet.cards import bootfiles, looking

WHY_NOT = boot_card.missing()
pytestmark = [
    pytest.mark.boot,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
STEPS = 60
CLUSTER = f"""
[hub]
addresses = ["tcp://{boot_card.HUB}:5555"]
[image]
file = "os.img"
[ssh]
user = "fleet"
keys = ["id.pub"]
[job]
file = "job.toml"
data = "digits"
[[device]]
name = "pi-0"
profile = "raspberry-pi-4b"
address = "{boot_card.GUEST}/24"
"""
JOB = f"""
name = "boot"
[fleet]
members = 1
[train]
steps = {STEPS}
[strategy]
name = "fedavg"
every = 5
[checkpoint]
every_s = 1
share = 1
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    return boot_card.build(tmp_path_factory.mktemp("built"))


@pytest.fixture
def folder(tmp_path, built) -> Path:
    """A cluster of one device."""
    (tmp_path / "os.img").symlink_to(built[0])
    (tmp_path / "id.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ5u me@host\n")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "digits").mkdir()
    data = Path(sklearn.__file__).parent / "datasets/data/digits.csv.gz"
    shutil.copy(data, tmp_path / "digits")
    return tmp_path


def edgetrain(folder: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "edgetrain", *words]
    env = {**os.environ, "PYTHONPATH": str(boot_card.CHECKOUT)}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def beginning(card: Path, size: int) -> bytes:
    with card.open("rb") as file:
        return file.read(size)


def flashed(folder: Path, worker: Path) -> tuple[Path, str, str]:
    """The card, what the firmware hands to the kernel, and the token that was on it."""
    edgetrain(folder, "keys", "init", "--keys", "keys")
    edgetrain(folder, "devices", "flash", "cluster.toml", "--keys", "keys", "--image-out", ".",
              "--worker", str(worker))  # fmt: skip
    card = folder / "pi-0.img"
    head = beginning(card, 1 << 20)
    boot = bootfiles.BootFiles(str(card), looking.look(str(card), head, card.stat().st_size).boot)
    line = boot.read("cmdline.txt").decode().split()
    token = boot.read("edgetrain/token").decode()
    words = " ".join(w for w in line if w.startswith(("ds=", "cgroup_")))
    return card, words, token


@pytest.fixture
def space() -> Iterator[str]:
    with boot_card.network(f"edgetrain-{os.getpid()}") as name:
        yield name


class Hub:
    """`edgetrain hub` in the namespace of the guest."""

    def __init__(self, folder: Path, space: str, *words: str) -> None:
        boot_card.wait_for_carrier(space, 240)
        self._log = (folder / "hub.log").open("ab")
        bind = ["--bind", f"tcp://{boot_card.HUB}:5555", "--keys", "keys"]
        argv = [sys.executable, "-m", "edgetrain", "hub", *(words or ("job.toml",)), *bind]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", space, *argv], cwd=folder, stdout=self._log,
            stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(boot_card.CHECKOUT)},
        )  # fmt: skip

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


def watched(said: str) -> list[dict[str, str]]:
    """What the guest said of its member, in order."""
    found = []
    for line in said.splitlines():
        if "WATCH up=" in line:
            words = line[line.index("WATCH") + 6 :].split()
            found.append(dict(w.split("=", 1) for w in words if "=" in w))
    return found


def test_a_flashed_card_boots_enrols_and_trains_to_the_end(folder, built, space):
    card, words, token = flashed(folder, built[1])
    with (
        boot_card.Guest(card, space, folder / "console", words) as guest,
        Hub(folder, space) as hub,
    ):
        assert hub.process.wait(600) == 0, (folder / "hub.log").read_text() + guest.said[-3000:]
        guest.until("StatusText=done", 60)
    states = watched(guest.said)
    ready = next(i for i, s in enumerate(states) if s["ActiveState"] == "active")
    before = {s.get("StatusText", "") for s in states[:ready]}
    assert not any("training" in text for text in before), "not ready before the welcome"
    assert states[ready]["MemoryMax"] != "infinity"
    assert list(Keyring(folder / "keys").members().values()) == ["pi-0"]
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["rounds"] == STEPS // 5
    content = beginning(card, (8 + boot_card.BOOT_MB) << 20)
    assert token.encode() not in content
    assert token.encode()[-43:] not in content


def steps_in(said: str) -> list[int]:
    """The steps that the member said it had behind it, in order."""
    texts = [state.get("StatusText", "") for state in watched(said)]
    return [int(t.split("_")[1]) for t in texts if t.startswith("training:_")]


def test_a_member_that_loses_power_goes_on_from_its_checkpoint(folder, built, space):
    long = JOB.replace(f"steps = {STEPS}", "steps = 100000")
    (folder / "job.toml").write_text(long)
    card, words, _ = flashed(folder, built[1])
    with contextlib.ExitStack() as stack:
        with boot_card.Guest(card, space, folder / "first", words) as guest:
            stack.enter_context(Hub(folder, space))
            guest.until("StatusText=training:_", 600)
            for _ in range(60):
                if steps_in(guest.said)[-1] > 30:
                    break
                time.sleep(2)
        before = steps_in(guest.said)[-1]
        assert before > 30
        with boot_card.Guest(card, space, folder / "second", words) as guest:
            guest.until("StatusText=training:_", 400)
            assert steps_in(guest.said)[0] > 20, "it began anew"
            ring = Keyring(folder / "keys")
            assert list(ring.members().values()) == ["pi-0"]
            assert not ring.open_tokens(0)
