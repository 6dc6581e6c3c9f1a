"""A card that boots on this machine: Debian 12, emulated, from power-on to training.

The root file system comes from mmdebstrap and gets what Raspberry Pi OS has and Debian has not:
cloud-init that reads /boot/firmware. It and the image are kept in the folder EDGETRAIN_BOOT_CACHE
if that is set. The worker for amd64 is made of the packages that run the tests, that for arm64 by
`edgetrain devices worker`. A guest has a tap in a network namespace of its own; the hub runs at the
other end. Needs root, and the packages in `missing`. user-mode-linux is here, QEMU in `boot_qemu`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import held
import pi_worker
import twin_root

from edgetrain.provisioning.cards import archive

MB = 1 << 20
BOOT_MB, ROOT_MB = 448, 2600
HUB, GUEST = "10.0.2.1", "10.0.2.15"
CHECKOUT = Path(__file__).parents[2]
UML = Path("/usr/lib/uml/modules")
PACKAGES = (
    "systemd-sysv,udev,dbus,kmod,cloud-init,netplan.io,openssh-server,sudo,iproute2,python3,procps"
)
WORKER = (
    "torch", "numpy", "pyzmq", "msgpack", "psutil", "rich", "filelock", "typing_extensions",
    "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "markdown-it-py", "mdurl",
    "pygments", "safetensors", "tomli-w",
)  # fmt: skip
_SKIPPED = ("torch/include", "torch/test/", "/tests/", "torch/share", "__pycache__")

_WATCH = """\
[Unit]
Description=says what the member is doing
[Service]
ExecStart=/usr/local/bin/watch-member
[Install]
WantedBy=multi-user.target
"""
# What the guest says of itself on its console, every few seconds; when its job is done, what
# `doctor` finds.
_SCRIPT = """\
#!/bin/sh
what=MainPID,ActiveState,SubState,StatusText,MemoryMax,Result,ExecMainStatus
export PYTHONPATH=/opt/edgetrain/current
while sleep @PAUSE@; do
  shown="$(systemctl show edgetrain-member -p $what | tr ' \\n' '_ ') "
  pid=${shown#*MainPID=}
  read up rest < /proc/uptime
  sectors=$(awk '$3 ~ /^(ubda|vda|mmcblk0)$/ { print $10 }' /proc/diskstats)
  echo "WATCH up=${up%%.*} $shown" \\
    "torch=$(grep -c libtorch /proc/${pid%% *}/maps 2> /dev/null) sectors=$sectors" > /dev/console
  case $shown in
    *ActiveState=active\\ *)
      [ "$analysed" ] || systemd-analyze security --no-pager edgetrain-member | tail -n 1 \\
        > /dev/console
      analysed=yes
      ;;
    *StatusText=done\\ *)
      python3 -m edgetrain doctor --for member > /dev/console 2>&1
      python3 -c 'import torch; print("TORCH", torch.__version__)' > /dev/console 2>&1
      exit
      ;;
  esac
  case $shown in
    *ExecMainStatus=0\\ *) ;;
    *) journalctl -u edgetrain-member -n 12 -o cat > /dev/console ;;
  esac
done
"""


@dataclass(frozen=True)
class System:
    """What boots: its Debian packages, and a kernel that is none of them."""

    name: str
    root: str
    """The root file system, as the kernel and fstab name it."""
    packages: str = PACKAGES
    architecture: str = "amd64"
    modules: Path | None = None
    """A folder of the kernel's modules, of a kernel of this machine."""
    pause_s: int = 2
    """Between two lines on what the member is doing."""
    firstrun: bool = False
    """Whether firstrun.sh sets it up, as in Raspberry Pi OS 12, and not cloud-init."""

    @property
    def is_foreign(self) -> bool:
        """Whether its programs are for another processor than this machine's."""
        return self.architecture != "amd64"

    def files(self) -> dict[str, str]:
        """What Raspberry Pi OS has and Debian has not."""
        found = {
            **_FILES,
            **(_PI_FILES if self.is_foreign else {}),
            **(_FIRSTRUN_FILES if self.firstrun else {}),
        }
        changes = {"@ROOT@": self.root, "@PAUSE@": str(self.pause_s)}
        for old, new in changes.items():
            found = {name: text.replace(old, new) for name, text in found.items()}
        return found


_FILES = {
    # A device may take longer to be found than systemd's 90 s on an emulated and busy machine.
    "etc/fstab": "LABEL=BOOTFS /boot/firmware vfat defaults,x-systemd.device-timeout=1h 0 2\n"
    "@ROOT@ / ext4 defaults 0 1\n",
    "etc/cloud/cloud.cfg.d/99-boot.cfg": "datasource_list: [NoCloud, None]\n"
    "datasource: {NoCloud: {fs_label: bootfs}}\n",
    "etc/systemd/system/cloud-init-local.service.d/boot.conf": "[Unit]\n"
    "RequiresMountsFor=/boot/firmware\n",
    "etc/systemd/network/10-card.link": "[Match]\nOriginalName=vec* usb*\n[Link]\nName=eth0\n",
    "etc/systemd/system/watch.service": _WATCH,
    "usr/local/bin/watch-member": _SCRIPT,
    "etc/modules-load.d/fat.conf": "vfat\nnls_cp437\nnls_ascii\nnls_iso8859-1\n",
}
_PI_FILES = {
    # By which an image is taken for Raspberry Pi OS, whose worker this Debian can run.
    "etc/rpi-issue": "Raspberry Pi reference 2025-11-24\n",
    # The same, for services.
    "etc/systemd/system.conf.d/slow.conf": "[Manager]\nDefaultTimeoutStartSec=1h\n",
}


_FIRSTRUN_FILES = {
    "etc/rpi-issue": "Raspberry Pi reference 2024-11-19\n",
    "etc/cloud/cloud-init.disabled": "\n",
    # Its NetworkManager, whose files the card has, is not there.
    "etc/systemd/network/20-cable.network": f"[Match]\nName=eth0\n[Network]\nAddress={GUEST}/24\n",
}


def missing() -> str:
    """Why no card can be booted here; "" if it can."""
    path = "/usr/sbin:/sbin:/usr/bin:/bin"
    packages = {
        "mmdebstrap": "mmdebstrap",
        "linux.uml": "user-mode-linux",
        "mformat": "mtools",
        "mke2fs": "e2fsprogs",
        "ip": "iproute2",
    }
    lacking = [p for tool, p in packages.items() if not shutil.which(tool, path=path)]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    if os.geteuid():
        return "needs root: a network namespace, and the owners of files in an image"
    if why_not := held.why_not():
        return why_not
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    if sys.version_info[:2] != (3, 11):
        return "the guest is Debian 12, whose Python is 3.11"
    return ""


# -- building -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """What a test begins with. The image and the root file system are only read."""

    image: Path
    worker: Path
    root: Path
    """A tar file, for amd64."""
    early: Path
    """A folder of what firmware reads: kernel, initramfs."""


def user_mode_linux(*, firstrun: bool = False) -> System:
    """Debian 12 with the kernel of this machine's package."""
    (modules,) = UML.iterdir()
    name = "firstrun" if firstrun else "os"
    return System(name, "/dev/ubda2", modules=modules, firstrun=firstrun)


def build(folder: Path, system: System | None = None) -> Built:
    """Make all of it in `folder`, unless it is kept."""
    system = system or user_mode_linux()
    folder.mkdir(exist_ok=True)
    kept = os.environ.get("EDGETRAIN_BOOT_CACHE")
    cache = Path(kept) if kept else folder
    cache.mkdir(parents=True, exist_ok=True)
    program = Path(__file__).read_bytes() + Path(twin_root.__file__).read_bytes()
    made_by = hashlib.sha256(program + repr(system).encode()).hexdigest()[:12]
    content = hashlib.sha256(system.packages.encode()).hexdigest()[:12]
    tar = cache / f"rootfs-{content}.tar"
    foreign = cache / f"packages-{system.architecture}-{content}.tar"
    image = cache / f"{system.name}-{made_by}.img"
    early = image.with_suffix(".early")
    if not tar.exists():
        _debootstrap(tar, system.packages)
    if system.is_foreign and not foreign.exists():
        twin_root.fetch_packages(tar, foreign)
    if not image.exists():
        root = folder / "root"
        extract(tar, root)
        if system.is_foreign:
            twin_root.overlay(root, foreign)
        early.mkdir(exist_ok=True)
        _copy_early_files(root, early, system)
        draft = cache / f"os-{os.getpid()}.part"
        _image(root, draft, system)
        draft.rename(image)
    worker = folder / "worker.tar"
    if system.is_foreign:
        pi_worker.make(worker)
    else:
        release = "raspberry-pi-os-12" if system.firstrun else "debian-12"
        _worker(worker, folder / "site", release)
    return Built(image, worker, tar, early)


def extract(tar: Path, root: Path) -> None:
    """Unpack a root file system."""
    root.mkdir()
    subprocess.run(["tar", "xf", str(tar), "-C", str(root)], check=True, timeout=300)


def _copy_early_files(root: Path, early: Path, system: System) -> None:
    if system.is_foreign:
        twin_root.early_files(root, early)
        return
    for path in (root / "boot").iterdir():
        if path.name.startswith(("vmlinuz", "initrd")):
            shutil.copy(path, early / path.name.partition("-")[0])


def _debootstrap(tar: Path, packages: str) -> None:
    words = [
        "mmdebstrap", "--mode=root", "--variant=minbase", f"--include={packages}",
        '--aptopt=APT::Install-Recommends "false"', "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=force-unsafe-io", "bookworm", f"{tar}.part.tar",
    ]  # fmt: skip
    # Debian's own Python for mmdebstrap's filter, which is started for each package.
    env = {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    subprocess.run(words, check=True, capture_output=True, timeout=3600, env=env)
    Path(f"{tar}.part.tar").rename(tar)


def _image(root: Path, image: Path, system: System) -> None:
    for name, text in system.files().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o755 if text.startswith("#!") else 0o644)
    (root / "boot/firmware").mkdir(exist_ok=True)
    if kernel := system.modules:
        modules = root / "lib/modules" / kernel.name
        for kind in ("fs/fat", "fs/nls"):
            shutil.copytree(kernel / "kernel" / kind, modules / "kernel" / kind)
        for table in kernel.glob("modules.*"):
            shutil.copy(table, modules)
    wants = root / "etc/systemd/system/multi-user.target.wants"
    (wants / "watch.service").symlink_to("/etc/systemd/system/watch.service")
    (wants / "systemd-networkd.service").symlink_to("/lib/systemd/system/systemd-networkd.service")
    start, behind = 8 * MB, (8 + BOOT_MB) * MB
    table = bytearray(512)
    for at, (kind, begin, size) in enumerate(((0x0C, start, BOOT_MB), (0x83, behind, ROOT_MB))):
        struct.pack_into("<4xB3xII", table, 446 + 16 * at, kind, begin // 512, size * MB // 512)
    table[510:] = b"\x55\xaa"
    with image.open("wb") as file:
        file.write(table)
        file.truncate(behind + ROOT_MB * MB)
    device, sectors = f"{image}@@{start}", str(BOOT_MB * MB // 512)
    env = {**os.environ, "MTOOLSRC": "/dev/null"}
    words = ["mformat", "-i", device, "-F", "-v", "bootfs", "-T", sectors, "-h", "64", "-s", "32"]
    subprocess.run([*words, "::"], check=True, env=env)
    line = f"console=tty1 root={system.root} rootfstype=ext4 rw\n".encode()
    subprocess.run(["mcopy", "-i", device, "-", "::cmdline.txt"], input=line, check=True, env=env)
    words = ["mke2fs", "-q", "-t", "ext4", "-L", "rootfs", "-d", str(root)]
    options = f"offset={behind},lazy_itable_init=1"
    subprocess.run([*words, "-E", options, str(image), f"{ROOT_MB}m"], check=True, timeout=300)
    shutil.rmtree(root)


def _worker(out: Path, site: Path, release: str) -> None:
    """A worker archive of the packages that run this test."""
    packages = {"edgetrain": "0.1.0"}
    for name in WORKER:
        found = importlib.metadata.distribution(name)
        packages[name] = found.version
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if ".." in file.parts or any(s in str(file) for s in _SKIPPED) or not source.is_file():
                continue
            place = site / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
    shutil.copytree(
        CHECKOUT / "edgetrain", site / "edgetrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    archive.pack(site, archive.Manifest(release, "3.11", "x86_64", packages), out)
    shutil.rmtree(site)


# -- running --------------------------------------------------------------------------------------


def run_uml(card: Path, words: str) -> list[str]:
    """The command that boots a card under user-mode-linux."""
    return [
        "linux.uml", "mem=1400M", f"ubda={card}", "root=/dev/ubda2", "rootfstype=ext4", "rw",
        "vec0:transport=tap,ifname=tap0,depth=64", "con=null", "con0=null,fd:1",
        "systemd.log_color=0", "net.ifnames=1", words,
    ]  # fmt: skip


class Guest:
    """A card that boots; its console is in `log`. It ends with this process at the latest."""

    def __init__(
        self,
        card: Path,
        space: held.Space,
        log: Path,
        words: str,
        run: Callable[[Path, str], list[str]] = run_uml,
    ) -> None:
        """words: what the firmware hands to the kernel, from cmdline.txt."""
        self.log = log
        self._file = log.open("ab")
        self._process = subprocess.Popen(
            held.held(space.within(*run(card, words))),
            stdin=subprocess.DEVNULL, stdout=self._file, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=log.parent,
            env={"PATH": os.environ["PATH"], "HOME": str(log.parent), "TMPDIR": str(log.parent)},
        )  # fmt: skip

    @property
    def said(self) -> str:
        """All of its console so far."""
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all of its processes so far."""
        own = Path(f"/proc/{self._process.pid}/ns/pid_for_children").readlink()
        ticks = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "ns/pid").readlink() == own:
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self, seconds: float) -> None:
        """Wait until it has switched itself off. AssertionError if it never does."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"on after {seconds} s:\n{self.said[-3000:]}") from None

    def until(self, text: str, seconds: float) -> None:
        """Wait until its console has this text. AssertionError if it never has."""
        self.wait(lambda: text in self.said, f"'{text}'", seconds)

    def wait(self, met: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until a condition is met. AssertionError, which names `what`, if it never is."""
        until = time.monotonic() + seconds
        while not met():
            assert self.running, f"it ended without {what}:\n{self.said[-3000:]}"
            assert time.monotonic() < until, f"no {what} after {seconds} s:\n{self.said[-3000:]}"
            time.sleep(0.5)

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """As if the power were gone. Takes all of its processes along."""
        self._process.kill()
        self._process.wait()
        self._file.close()


def wait_for_carrier(space: held.Space, seconds: float) -> None:
    """Wait until a guest has its end of the tap: before, the interface is down."""
    until = time.monotonic() + seconds
    words = space.within("ip", "link", "show", "tap0")
    while "LOWER_UP" not in subprocess.run(words, capture_output=True, text=True).stdout:
        assert time.monotonic() < until, "no guest has come to the network"
        time.sleep(0.2)


@contextlib.contextmanager
def network() -> Iterator[held.Space]:
    """A network namespace with a tap; the hub's address is on it."""
    lines = [
        "link set lo up",
        "tuntap add tap0 mode tap",
        f"address add {HUB}/24 dev tap0",
        "link set tap0 up",
    ]
    with held.network() as space:
        for line in lines:
            subprocess.run(space.within("ip", *line.split()), check=True)
        yield space
