"""Provision, send and update over a real sshd, killed at random on either side: the next run ends
in the state of one that was not killed. `make test-kills`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time

import held
import pytest
import ssh_fleet
from real_town import RealTown

KILLS = int(os.environ.get("KILLS", "3"))
NAMES = ("pi-0", "pi-1")
WRITTEN = ("etc", "opt", "var", "home")
JOB = """\
[fleet]
members = 2
[train]
steps = {steps}
"""
ACTS = {
    "provision": ("devices", "provision", "cluster.toml", "--worker", "worker.tar"),
    "send": ("devices", "send", "next.toml", "cluster.toml"),
    "update": ("devices", "update", "cluster.toml", "--worker", "next.tar"),
}
BY_ITSELF = ("var/lib/private", "var/cache", "etc/edgetrain-", "var/lib/edgetrain-keys/key")
"""Changes by itself, or is drawn anew: what a member keeps, and a device's key."""


class Killing:
    """Two machines; what each act begins with, how long it takes, and what it ends in."""

    def __init__(self, fleet: ssh_fleet.SshFleet) -> None:
        self.fleet = fleet
        self.town = RealTown(fleet, list(NAMES), job=JOB.format(steps=10))
        (fleet.folder / "next.toml").write_text(JOB.format(steps=20))
        (fleet.folder / "site/weights.bin").write_bytes(os.urandom(1 << 20))
        self.town.pack("next.tar")
        self.begins, self.seconds, self.wanted = {}, {}, {}
        for act in ACTS:
            self.begins[act] = "provision" if act == "provision" else "others"
            if act != "update":
                self.save(self.begins[act])
            self.back(act)
            began = time.monotonic()
            self.finish(act)
            self.seconds[act] = time.monotonic() - began
            self.wanted[act] = self.state()
            if act == "send":
                self.back("send")

    def places(self):
        yield self.town.ring.path
        for machine in self.fleet.machines.values():
            yield from (machine.root / name for name in WRITTEN)

    def save(self, name: str) -> None:
        """Keep what the machines and the keys are now."""
        self.down()
        for path in self.places():
            kept = self.fleet.folder / "kept" / name / path.relative_to(self.fleet.folder)
            kept.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", str(path), str(kept)], check=True)

    def back(self, act: str) -> None:
        """Let the machines be as they are before an act."""
        self.down()
        for path in self.places():
            kept = self.fleet.folder / "kept" / self.begins[act]
            shutil.rmtree(path)
            kept = kept / path.relative_to(self.fleet.folder)
            subprocess.run(["cp", "-a", str(kept), str(path)], check=True)
        for machine in self.fleet.machines.values():
            self.fleet.start(machine)
        for machine in self.fleet.machines.values():
            self.fleet.wait_until_up(machine)

    def down(self) -> None:
        for machine in self.fleet.machines.values():
            self.fleet.stop(machine)

    def start(self, act: str) -> subprocess.Popen[str]:
        """Start an act; SIGKILL of the process ends all of it, its ssh as well."""
        words = held.held(self.town.edgetrain(*ACTS[act]))
        return subprocess.Popen(
            words, cwd=self.fleet.folder, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self, act: str) -> None:
        process = self.start(act)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, (act, said)

    def kill(self, act: str, rng: random.Random) -> str:
        """Kill an act on one side."""
        after_s = rng.uniform(0.2, 1.0) * self.seconds[act]
        process = self.start(act)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        side = rng.choice(["desk", *NAMES])
        if side == "desk":
            process.kill()
        else:
            self.fleet.start(self.fleet.machines[side])  # its power was off for a moment
            self.fleet.wait_until_up(self.fleet.machines[side])
        process.communicate(timeout=300)
        return f"{act} after {after_s:.1f} of {self.seconds[act]:.1f} s, {side}"

    def state(self):
        return {
            name: {k: v for k, v in machine.state().items() if not k.startswith(BY_ITSELF)}
            for name, machine in self.fleet.machines.items()
        }


@pytest.mark.skipif(bool(ssh_fleet.missing(make=True)), reason=ssh_fleet.missing(make=True) or "-")
@pytest.mark.fleet
@pytest.mark.timeout(7200)
def test_what_was_killed_is_finished_by_the_next(monkeypatch, tmp_path_factory, capsys):
    with ssh_fleet.fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        monkeypatch.setenv("PATH", f"{fleet.folder / 'bin'}:{os.environ['PATH']}")
        killing = Killing(fleet)
        for number in range(KILLS):
            rng = random.Random(number)
            act = list(ACTS)[number % len(ACTS)]
            killing.back(act)
            how = killing.kill(act, rng)
            killing.finish(act)
            assert killing.state() == killing.wanted[act], (number, how)
            assert sorted(killing.town.ring.members().values()) == list(NAMES), how
            with capsys.disabled():
                print(f"{number}: {how}: the same state", flush=True)
