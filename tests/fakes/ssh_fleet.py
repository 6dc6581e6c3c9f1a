"""Machines with a real sshd: roots of one Debian, each in a network namespace, on one bridge.

The root file system comes from mmdebstrap and is kept in the folder EDGETRAIN_FLEET_CACHE (default:
~/.cache/edgetrain/fleet). A machine's files are links to it, or copies where it writes. Its
`systemctl` is `unit_runner`, which follows the unit files; its Python finds this one's packages, so
that a member can train there. Needs root. What a machine is made of, and its end, are those of
`held`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import held
import numpy
import unit_runner

PACKAGES = "openssh-server,sudo,python3,iproute2,procps"
USER, NETWORK = "fleet", "10.77.0"
PACKAGES_FOLDER = Path(numpy.__file__).resolve().parents[1]
_COPIED = ("etc", "var", "home", "root", "tmp", "usr/local")
"""Folders in which a machine writes: not shared with the others."""
_SYSTEMCTL = """\
#!/bin/sh
[ "$1" = show ] && [ -e "/run/systemctl/$2.shown" ] && exec cat "/run/systemctl/$2.shown"
exec /usr/local/bin/unit_runner "$@"
"""
_START = """\
set -e
root=$1 number=$2 bridge=$3 network=$4 packages=$5 how=$6
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs dev "$root/dev"
for name in null zero random urandom; do
  touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"
done
mount -t tmpfs run "$root/run"
mount --bind "$packages" "$root/srv/packages"
mount -o remount,bind,ro "$root/srv/packages"
mkdir "$root/run/sshd"
ip link set lo up
there="nsenter --net=/proc/$bridge/ns/net ip link"
mac=02:00:00:00:00:$(printf %02x "$number")  # a machine that is off for a moment keeps its own
$there del "v$number" 2> /dev/null || :  # of a machine whose power was cut just now
$there add "v$number" type veth peer name eth0 address "$mac" netns $$
$there set "v$number" master bridge0 up
ip address add "$network.$number/24" dev eth0
ip link set eth0 up
case $how in
  closed) exec sleep infinity;;
  hangs) exec chroot "$root" python3 -c "
import socket, threading
server = socket.create_server(('', 22))
kept = []
while True:
    kept.append(server.accept()[0])
    kept[-1].sendall(b'SSH-2.0-OpenSSH_9.2\\r\\n')
";;
  full) mount -t tmpfs -o size=64k small "$root/opt";;
  read-only) mount -o remount,bind,ro "$root";;
  other) exec setarch i686 chroot "$root" /usr/sbin/sshd -D -e;;
esac
[ "$how" = read-only ] || chroot "$root" systemctl boot
exec chroot "$root" /usr/sbin/sshd -D -e
"""


def cache() -> Path:
    """Where the root file system is kept."""
    kept = os.environ.get("EDGETRAIN_FLEET_CACHE") or "~/.cache/edgetrain/fleet"
    return Path(kept).expanduser()


def missing(*, make: bool) -> str:
    """Why there can be no such machines here; "" if there can. make: the root may be made."""
    if os.geteuid():
        return "needs root: network namespaces and roots of their own"
    lacking = [p for p in ("ip", "ssh", "ssh-keygen", "setarch") if not shutil.which(p)]
    if not _tar().exists():
        if not make:
            return f"no root file system in {cache()}: `make test-fleet` makes it"
        lacking += [p for p in ("mmdebstrap",) if not shutil.which(p)]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    return held.why_not()


def _tar() -> Path:
    return cache() / f"root-{hashlib.sha256(PACKAGES.encode()).hexdigest()[:12]}.tar"


def make_root(into: Path) -> None:
    """Unpack the root file system; make it, if it is not kept."""
    tar = _tar()
    if not tar.exists():
        tar.parent.mkdir(parents=True, exist_ok=True)
        words = [
            "mmdebstrap", "--mode=root", "--variant=minbase", f"--include={PACKAGES}",
            '--aptopt=APT::Install-Recommends "false"', "--dpkgopt=path-exclude=/usr/share/man/*",
            "--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=force-unsafe-io",
            "bookworm", f"{tar}.part.tar",
        ]  # fmt: skip
        env = {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        subprocess.run(words, check=True, capture_output=True, timeout=3600, env=env)
        Path(f"{tar}.part.tar").rename(tar)
    into.mkdir()
    subprocess.run(["tar", "xf", str(tar), "-C", str(into)], check=True, timeout=300)
    for path in (into / "etc/ssh").glob("ssh_host_*"):
        path.unlink()
    words = ["useradd", "-m", "-s", "/bin/sh", "-p", "*", USER]
    subprocess.run(["chroot", str(into), *words], check=True)
    (into / "etc/sudoers.d/fleet").write_text(f"{USER} ALL=(ALL) NOPASSWD: ALL\n")
    shutil.copyfile(Path(unit_runner.__file__), into / "usr/local/bin/unit_runner")
    (into / "usr/local/bin/systemctl").write_text(_SYSTEMCTL)
    for name in ("systemctl", "unit_runner"):
        (into / "usr/local/bin" / name).chmod(0o755)
    (into / "srv/packages").mkdir()
    (into / "usr/local/lib/python3.11/dist-packages/packages.pth").write_text("/srv/packages\n")


@dataclass
class SshMachine:
    """One of the machines."""

    name: str
    number: int
    root: Path
    host_key: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def state(self) -> dict[str, str]:
        """Digests of its files, without what changes by itself."""
        found = {}
        for folder in ("etc", "opt", "var/lib", "var/cache", "home", "root", "boot", "usr/local"):
            for path in sorted((self.root / folder).rglob("*")):
                name = path.relative_to(self.root).as_posix()
                if path.is_symlink():
                    found[name] = str(path.readlink())
                elif path.is_file() and not name.startswith("var/lib/sudo"):
                    found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def in_root(self, *words: str, given: str = "") -> None:
        """Run a command in its root, before it starts."""
        subprocess.run(["chroot", str(self.root), *words], check=True, input=given, text=True)


class SshFleet:
    """The machines, and an `ssh` in `bin` that reaches them: put it first on PATH."""

    def __init__(self, folder: Path, space: held.Space) -> None:
        self.folder, self.space, self.machines = folder, space, dict[str, SshMachine]()
        self.base = folder / "base"
        make_root(self.base)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id"], check=True
        )
        self.public = (folder / "id.pub").read_text().strip()
        (folder / "config").write_text(
            f"IdentityFile {folder / 'id'}\nIdentitiesOnly yes\nIdentityAgent none\n"
            f"UserKnownHostsFile {folder / 'known'}\nGlobalKnownHostsFile /dev/null\n"
        )
        program = folder / "bin/ssh"
        program.parent.mkdir()
        inside = " ".join(space.within("/usr/bin/ssh", "-F", str(folder / "config")))
        program.write_text(f'#!/bin/sh\nexec {inside} "$@"\n')
        program.chmod(0o755)
        for line in ("link set lo up", "link add bridge0 type bridge", "link set bridge0 up",
                     f"address add {NETWORK}.254/24 dev bridge0"):  # fmt: skip
            subprocess.run(space.within("ip", *line.split()), check=True)

    def add(self, name: str) -> SshMachine:
        """Make a machine that is not started yet; its user lets the fleet's key in."""
        number = len(self.machines) + 1
        root = self.folder / name
        subprocess.run(["cp", "-al", str(self.base), str(root)], check=True)
        for folder in _COPIED:
            shutil.rmtree(root / folder)
            subprocess.run(["cp", "-a", str(self.base / folder), str(root / folder)], check=True)
        key = root / "etc/ssh/ssh_host_ed25519_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        (root / "etc/hostname").write_text(f"{name}\n")
        (root / f"home/{USER}/.ssh").mkdir(mode=0o700)
        (root / f"home/{USER}/.ssh/authorized_keys").write_text(self.public + "\n")
        public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
        self.machines[name] = SshMachine(name, number, root, public)
        self.machines[name].in_root("chown", "-R", f"{USER}:", f"/home/{USER}/.ssh")
        return self.machines[name]

    def start(self, machine: SshMachine, how: str = "") -> None:
        """Switch a machine on; how: see `_START`."""
        self.stop(machine)
        words = ["unshare", "--mount", "--net", "sh", "-c", _START, "sh", str(machine.root)]
        words += [str(machine.number), str(self.space.process), NETWORK, str(PACKAGES_FOLDER), how]
        with (self.folder / f"{machine.name}.log").open("ab") as log:
            machine.process = subprocess.Popen(
                held.held(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self, machine: SshMachine) -> None:
        """Cut a machine's power."""
        if machine.process is not None:
            machine.process.kill()
            machine.process.wait()
            machine.process = None

    def wait_until_up(self, machine: SshMachine, seconds: float = 20.0) -> None:
        """Wait until something listens on its port."""
        script = f"import socket; socket.create_connection(('{machine.address}', 22), 1)"
        until = time.monotonic() + seconds
        while subprocess.run(self.space.within("python3", "-c", script), stderr=-3).returncode:
            log = (self.folder / f"{machine.name}.log").read_text(errors="replace")
            assert time.monotonic() < until, f"{machine.name} is not up: {log[-2000:]}"
            time.sleep(0.1)


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[SshFleet]:
    """A fleet without machines; those that are added end with it."""
    with held.network() as space:
        made = SshFleet(folder, space)
        try:
            yield made
        finally:
            for machine in made.machines.values():
                made.stop(machine)
            for path in (made.base, *(m.root for m in made.machines.values())):
                shutil.rmtree(path, ignore_errors=True)
