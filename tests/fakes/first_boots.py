"""Lets each format's own first boot run on flashed cards, on real FAT and ext4, and nothing else.

One kernel of Debian's user-mode-linux for all cards: each card's root file system is mounted, gets
this machine's /usr and what the scripts ask for, and has its boot partition at /boot/firmware.
Then runs what the firmware's and the system's first boot would run: the program of `systemd.run=`,
or the early command of rpi-preseed; cloud-init runs nothing of ours on the boot partition. Then
edgetrain's first_boot.py. Package: user-mode-linux.

As a program, inside: `first_boots.py CARDS`, a JSON file of how each card is set up.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

MODULES = ("fat/fat", "fat/vfat", "nls/nls_cp437", "nls/nls_ascii", "nls/nls_iso8859-1")
_INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /run
mount -t tmpfs tmp /mnt
/usr/bin/python3 {here} {cards} 2>&1
echo ENDED $?
sync
/usr/bin/python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'
"""


def why_not() -> str:
    """Why they cannot boot here; "" if they can."""
    if shutil.which("linux.uml") is None:
        return "package user-mode-linux is not installed"
    if os.geteuid():
        return "needs root: other users' files are not to be seen from inside"
    if not Path("/usr/bin/python3").exists():
        return "no /usr/bin/python3"
    return ""


def run(cards: dict[Path, str], secrets: list[str], folder: Path) -> dict[str, dict[str, object]]:
    """Boot cards for the first time: `cards` says how each is set up, as `Look.first_boot`.

    Returns what was seen of each, by the card's name: "scripts" (their statuses), "said", and
    "left": those of the secrets that were on the boot partition when the format's own script, or
    cloud-init, was done; edgetrain's had not begun.
    """
    import pytest  # not there inside

    init, table, answer = folder / "init.sh", folder / "cards.json", folder / "answer.json"
    init.write_text(_INIT.format(here=Path(__file__).resolve(), cards=table))
    init.chmod(0o755)
    names = [path.name for path in cards]
    table.write_text(json.dumps({"cards": dict(zip(names, cards.values(), strict=True)),
                                 "secrets": secrets}))  # fmt: skip
    disks = [f"ubd{letter}={path}" for letter, path in zip("abcdefgh", cards, strict=False)]
    command = ["linux.uml", "mem=256M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
               "quiet", "con=null", "con0=null,fd:1", f"init={init}", *disks]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=280, check=False, cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)},
    )  # fmt: skip
    text = done.stdout.decode(errors="replace").replace("\r", "")
    _, begun, rest = text.partition("ANSWER ")
    if "ptrace set fp regs failed" in text:
        pytest.skip("user-mode-linux does not run on this processor: ptrace set fp regs failed")
    if not begun or "ENDED 0" not in rest:
        raise RuntimeError(f"user-mode-linux did not finish:\n{text[-3000:]}")
    answer.write_text(rest.partition("\n")[0])
    found: dict[str, dict[str, object]] = json.loads(answer.read_text())
    return found


# -- inside ---------------------------------------------------------------------------------------

# What scripts ask of a system that runs, and the services that are not there.
_STAND_INS = ("systemctl", "rfkill", "raspi-config")
_FOLDERS = (
    "boot/firmware", "dev", "proc", "home", "etc/ssh", "etc/sudoers.d", "stand-ins", "var/lib",
    "etc/systemd/system/multi-user.target.wants", "opt", "tmp", "run",
)  # fmt: skip
_ACCOUNTS = {
    "passwd": "root:x:0:0::/root:/bin/sh\n",
    "group": "root:x:0:\nusers:x:100:\nsudo:x:27:\nvideo:x:44:\n",
    "shadow": "root:*:1::::::\n",
    "gshadow": "root:*::\n",
    "hosts": "127.0.1.1\traspberrypi\n",
    "login.defs": "",
}


def _boot(letter: str, first_boot: str, secrets: list[str]) -> dict[str, object]:
    """The first boot of one card."""
    root = Path("/mnt") / letter
    root.mkdir()
    _mount(f"/dev/ubd{letter}2", root)
    _furnish(root)
    boot = root / "boot/firmware"
    _mount(f"/dev/ubd{letter}1", boot, "-t", "vfat")
    statuses, said = [], ""
    for words in (_own_script(boot, first_boot), None):
        if words is None:
            subprocess.run(["umount", boot], check=True)
            raw = Path(f"/dev/ubd{letter}1").read_bytes()
            left = [secret for secret in secrets if secret.encode() in raw]
            _mount(f"/dev/ubd{letter}1", boot, "-t", "vfat")
            words = ["/usr/bin/python3", "/boot/firmware/edgetrain/first_boot.py"]
        elif not words:
            continue
        env = {"PATH": "/stand-ins:/usr/sbin:/usr/bin:/sbin:/bin"}
        done = subprocess.run(["chroot", root, *words], capture_output=True, text=True, env=env)
        statuses.append(done.returncode)
        said += done.stdout + done.stderr
    line = (boot / "cmdline.txt").read_text()
    for place in ("boot/firmware", "dev", "proc", "usr", ""):
        subprocess.run(["umount", root / place], check=True)
    return {"scripts": statuses, "said": said, "left": left, "line": line}


def _own_script(boot: Path, first_boot: str) -> list[str]:
    if first_boot == "rpi-preseed":
        (command,) = tomllib.loads((boot / "rpi-preseed.toml").read_text())["runcmd"]["early"]
        return ["sh", "-c", command]
    words = (boot / "cmdline.txt").read_text().split()
    return [word.partition("=")[2] for word in words if word.startswith("systemd.run=")]


def _furnish(root: Path) -> None:
    """What Raspberry Pi OS has, as far as the scripts see."""
    for name in _FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in _ACCOUNTS.items():
        (root / "etc" / name).write_text(text)
    for name in _STAND_INS:
        (root / "stand-ins" / name).write_text("#!/bin/sh\nexit 0\n")
        (root / "stand-ins" / name).chmod(0o755)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    _mount("/usr", root / "usr", "--bind")
    _mount("/dev", root / "dev", "--bind")
    _mount("proc", root / "proc", "-t", "proc")


def _mount(what: str, where: Path, *options: str) -> None:
    subprocess.run(["mount", *options, what, where], check=True)


def _insert_modules() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    (kernel,) = Path("/usr/lib/uml/modules").glob("*/kernel/fs")
    for name in MODULES:
        file = os.open(kernel / f"{name}.ko", os.O_RDONLY)
        if libc.syscall(313, file, b"", 0):
            raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")
        os.close(file)


def _main() -> None:
    table = json.loads(Path(sys.argv[1]).read_text())
    for link, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0")):
        if not Path("/dev", link).exists():
            Path("/dev", link).symlink_to(target)
    _insert_modules()
    found = {
        name: _boot(letter, first_boot, table["secrets"])
        for letter, (name, first_boot) in zip("abcdefgh", table["cards"].items(), strict=False)
    }
    print("ANSWER", json.dumps(found), flush=True)


if __name__ == "__main__":
    _main()
