"""Machines with a real sshd as the devices of a cluster file, and the keys of their hub."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import ssh_fleet

from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.messages import PROTOCOL
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.fleet import cluster as clusters
from edgetrain.fleet.interpreters import PACKAGE_PARENT
from edgetrain.fleet.ssh import SshClient
from edgetrain.provisioning import sets
from edgetrain.provisioning.cards import archive
from edgetrain.provisioning.cards.flashing import Archives, Settings
from edgetrain.provisioning.provision import Provisioner
from edgetrain.provisioning.reaching import hosts_of

MARK_BYTES = 4 << 20
STAND_IN = """
import base64, pathlib, secrets, sys
if sys.argv[1:3] == ["keys", "init"]:
    folder = pathlib.Path(sys.argv[sys.argv.index("--keys") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    (folder / "key").write_text(f"public {key}\\nsecret {key}\\n")
    (folder / "key").chmod(0o600)
if sys.argv[1] == "member":
    import os, socket, time
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        said = b"READY=1\\nSTATUS=training: 3 of 9 steps"
        while True:
            to.sendto(said, os.environ["NOTIFY_SOCKET"])
            time.sleep(5)
"""

FINISHING = '"""After the last reply: the model is the fleet\'s, and is evaluated as such."""'
SAY_BASE = 'print("base", self._member.half.applied, self._member.half.checksum, flush=True)'
"""Added to a member in these machines: the base that it ends with."""


def stand_in_site(site: Path) -> None:
    """A worker that makes keys, and a member that is READY and trains nothing."""
    for name in ("torch.py", "edgetrain/__init__.py", "edgetrain/training/member/train.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("")
    (site / "edgetrain/exchange").mkdir()
    (site / "edgetrain/exchange/messages.py").write_text(f"PROTOCOL = {PROTOCOL}\n")
    (site / "edgetrain/__main__.py").write_text(STAND_IN)
    (site / "weights.bin").write_bytes(os.urandom(MARK_BYTES))


def real_site(site: Path) -> None:
    """edgetrain itself; what it imports is in each machine already."""
    left_out = shutil.ignore_patterns("__pycache__")
    for name in ("edgetrain", "devices", "netem"):
        shutil.copytree(PACKAGE_PARENT / name, site / name, ignore=left_out)
    loop = site / "edgetrain/training/member/loop.py"
    before = loop.read_text()
    loop.write_text(before.replace(FINISHING, f"{FINISHING}\n        {SAY_BASE}"))
    assert loop.read_text() != before


class RealTown:
    """A fleet, the keys of its hub, and a cluster file."""

    def __init__(
        self,
        fleet: ssh_fleet.SshFleet,
        names: list[str],
        make_site: Callable[[Path], None] = stand_in_site,
        job: str = "",
        hub: str = "",
        gateway: str = "",
        site: Sequence[str] = (),
    ) -> None:
        """hub: the name of one more machine, which has the hub; "": it is on the bridge. gateway:
        that of one more, which has the gateway of the machines in `site`."""
        self.fleet, self.folder = fleet, fleet.folder
        make_site(self.folder / "site")
        self.pack("worker.tar")
        (self.folder / "job.toml").write_text(job)
        devices = "".join(
            f'[[device]]\nname = "{name}"\nprofile = "raspberry-pi-4b"\n'
            f'address = "{fleet.add(name).address}/24"\n'
            + ('site = "barn"\n' if name in (*site, gateway) else "")
            + ('role = "gateway"\n' if name == gateway else "")
            for name in [*names, gateway]
            if name
        )
        here = '[hub]\naddresses = ["tcp://10.77.0.254:5555"]\n'
        if hub:
            here = ""
            devices += (
                f'[[device]]\nname = "{hub}"\nprofile = "raspberry-pi-4b"\nrole = "hub"\n'
                f'address = "{fleet.add(hub).address}/24"\n'
            )
        (self.folder / "cluster.toml").write_text(
            f'{here}[ssh]\nuser = "{ssh_fleet.USER}"\n'
            f'keys = ["id.pub"]\n[job]\nfile = "job.toml"\n{devices}'
        )
        self.cluster = clusters.load(self.folder / "cluster.toml")
        self.ring = Keyring(self.folder / "keys")
        self.ring.init(new_pair)
        lines = [f"{m.name} {m.host_key}\n" for m in fleet.machines.values()]
        self.ring.write("hosts", "".join(lines), 0o644)
        self.hosts = hosts_of(self.cluster, self.cluster.devices)

    def pack(self, name: str) -> None:
        """Make a worker archive of what lies in `site`."""
        packages = {"torch": "2.9.1", "edgetrain": "0.1.0"}
        manifest = archive.Manifest("debian-12", "3.11", platform.machine(), packages)
        archive.pack(self.folder / "site", manifest, self.folder / name)

    def client(self, password: str = "") -> SshClient:
        return SshClient(self.ring.hosts(), password=password)

    def provision(self, *, check=False, password=""):
        settings = Settings((self.fleet.public,), sets.JobSet(b"steps = 1\n", {}), {}, 0.0)
        archives = Archives(archive.workers(), self.folder / "worker.tar", self.folder)
        devices = list(zip(self.cluster.devices, self.hosts, strict=True))
        with self.client(password) as client:
            work = Provisioner(self.cluster, settings, archives, self.ring, client)
            return {r.name: r for r in work.provision(devices, check=check)}

    def edgetrain(self, *words: str) -> list[str]:
        """The command line, on the hub's machine."""
        words = (sys.executable, "-m", "edgetrain", *words, "--keys", str(self.ring.path))
        return self.fleet.space.within(*words)

    def bases(self) -> dict[str, list[str]]:
        """What the last base of each machine's members is, job after job."""
        found = {}
        for name, machine in self.fleet.machines.items():
            log = machine.root / "var/log/journal/edgetrain-member.service.log"
            if not log.exists():  # it has the hub, or a gateway
                continue
            found[name] = [x for x in log.read_text().splitlines() if x.startswith("base ")]
        return found

    def state(self):
        return {name: machine.state() for name, machine in self.fleet.machines.items()}
