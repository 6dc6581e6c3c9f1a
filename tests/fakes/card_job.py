"""A cluster of one device that boots from a card: its files, its hub, what it says of itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import boot_card
import held

from edgetrain import tasks
from edgetrain.provisioning.cards import bootfiles, looking

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@host"
PSK = "f42c6fc52df0ebef9ebb4b90b38a5f90e83fe1b135a70e23aed762e9710a12e5"
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
WIFI = """
[wifi]
ssid = "lab"
country = "DE"
secret = "env:BOOT_PSK"
"""


def job(steps: int) -> str:
    """A job that one device trains to its end."""
    return f"""
name = "boot"
[fleet]
members = 1
[train]
steps = {steps}
[strategy]
name = "fedavg"
local_steps = 5
[checkpoint]
every_s = 1
share = 1
"""


def make_folder(folder: Path, image: Path, steps: int, more: str = "") -> None:
    """A cluster of one device; `more` is added to the cluster file."""
    (folder / "os.img").symlink_to(image)
    (folder / "id.pub").write_text(f"{KEY}\n")
    (folder / "cluster.toml").write_text(more + CLUSTER)
    (folder / "job.toml").write_text(job(steps))
    (folder / "digits").mkdir()
    shutil.copy(Path(tasks.__file__).with_name("digits.csv.gz"), folder / "digits")


def edgetrain(folder: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "edgetrain", *words]
    env = {**os.environ, "PYTHONPATH": str(boot_card.CHECKOUT), "BOOT_PSK": PSK}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def flashed(folder: Path, worker: Path) -> tuple[Path, str, str]:
    """The card, what the firmware hands to the kernel, and the token that was on it."""
    edgetrain(folder, "keys", "init", "--keys", "keys")
    edgetrain(folder, "devices", "flash", "cluster.toml", "--keys", "keys", "--image-out", ".",
              "--worker", str(worker))  # fmt: skip
    card = folder / "pi-0.img"
    boot = boot_files(card)
    token = boot.read("edgetrain/token").decode()
    if (settings := boot.read("network-config")) is not None:
        # There is no wireless network here; where its key would stand is blanked all the same.
        boot.write({"network-config": settings + f"# psk {PSK}\n".encode()})
    return card, words_of(card), token


def boot_files(card: Path) -> bootfiles.BootFiles:
    with card.open("rb") as file:
        head = file.read(1 << 20)
    return bootfiles.BootFiles(str(card), looking.look(str(card), head, card.stat().st_size).boot)


def words_of(card: Path) -> str:
    """What the firmware hands to the kernel, as far as it is ours."""
    line = boot_files(card).read("cmdline.txt").decode().split()
    return " ".join(w for w in line if w.startswith(("ds=", "cgroup_", "systemd.")))


class Hub:
    """`edgetrain hub` in the namespace of the guest."""

    def __init__(self, folder: Path, space: held.Space, *words: str) -> None:
        boot_card.wait_for_carrier(space, 240)
        self._log = (folder / "hub.log").open("ab")
        bind = ["--bind", f"tcp://{boot_card.HUB}:5555", "--keys", "keys"]
        argv = [sys.executable, "-m", "edgetrain", "hub", *(words or ("job.toml",)), *bind]
        self.process = subprocess.Popen(
            held.held(space.within(*argv)), cwd=folder, stdout=self._log,
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


def steps_in(said: str) -> list[int]:
    """The steps that the member said it had behind it, in order."""
    texts = [state.get("StatusText", "") for state in watched(said)]
    return [int(t.split("_")[1]) for t in texts if t.startswith("training:_")]
