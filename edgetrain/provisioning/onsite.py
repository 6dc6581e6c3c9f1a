"""A device that is set up over ssh: a look at it, what is missing, and all of it gone again.

Runs on the device as root, by the system's Python, beside first_boot.py, whose steps it takes: only
the standard library. `provision` decides what is due. Each verb prints one line of JSON, and may be
cut off at any moment: the next call ends in the same state.

    look USER     changes nothing
    set-up PARTS  makes these parts from STAGE/edgetrain, where the files of a card lie
    start         the unit of its member or hub, now and at each boot
    remove        everything that edgetrain has put on the device
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgetrain.provisioning.cards import first_boot
from edgetrain.provisioning.cards.first_boot import (
    HUB_UNIT,
    KEYS,
    MEMBERS,
    UNIT,
    UNITS,
    Failed,
    FirstBoot,
    release_in,
    unit_in,
)
from edgetrain.provisioning.keeper import with_pins

STAGE = "var/lib/edgetrain-setup/stage"
_TUNED = ("etc/systemd/journald.conf.d/10-edgetrain.conf", "etc/sysctl.d/10-edgetrain.conf")
_FEATURES = {"atomics": "lse"}
"""Names of processor features: the kernel's, and those of workers.toml."""
_OURS = (
    "opt/edgetrain", "etc/edgetrain", KEYS, "var/lib/edgetrain-setup", "var/lib/private/edgetrain",
    "var/lib/edgetrain", "var/cache/private/edgetrain", "var/cache/edgetrain",
    "boot/firmware/edgetrain", *_TUNED,
)  # fmt: skip
_OUR_UNITS = (UNIT, HUB_UNIT, "edgetrain-trial.service", "edgetrain-first-boot.service")


def look(root: Path, user: str) -> dict[str, Any]:
    """All that `provision` wants to know."""
    usage = shutil.disk_usage(root)
    wants = root / UNITS / "multi-user.target.wants" / unit_in(root)
    boot, account = os.statvfs(root), _account(root, user)
    return {
        "release": release_in(
            _text(root / "etc/os-release"), is_pi=(root / "etc/rpi-issue").exists()
        ),
        "python": list(sys.version_info[:2]),
        "machine": platform.machine(),
        "features": _features(root),
        "cores": os.cpu_count() or 1,
        "free_bytes": usage.free,
        "clock": time.time(),
        "read_only": bool(boot.f_flag & os.ST_RDONLY),
        "filesystem": first_boot.filesystem_of(root, "/var/lib"),
        "systemctl": shutil.which("systemctl") is not None,
        "slot": (root / "opt/edgetrain/current/edgetrain").is_dir(),
        "set": (root / "etc/edgetrain/current/job.toml").is_file(),
        "key": _public(root),
        "bundles": (root / KEYS / "bundles").exists(),
        "hubs": _text(root / KEYS / "hubs"),
        "list": _text(root / MEMBERS),
        "unit": _text(root / UNITS / unit_in(root)),
        "enabled": wants.is_symlink(),
        "staged": (root / STAGE).exists(),
        "tuned": all((root / name).exists() for name in _TUNED),
        "users_keys": _text(account[2] / ".ssh/authorized_keys") if account else "",
    }


def set_up(root: Path, user: str, parts: Sequence[str]) -> dict[str, Any]:
    """Make these parts. Raises Failed, Later, OSError."""
    # What commands print is not for the desk, which reads one line of JSON here.
    run = functools.partial(first_boot.run, output=sys.stderr)
    steps = FirstBoot(root, STAGE, sys.executable, run)
    ours = root / STAGE / "edgetrain"
    steps.survives()
    for part, step in (
        ("worker", steps.unpack),
        ("job", steps.copy_settings),
        ("keys", steps.make_keys),
        ("tune", steps.tune),
    ):
        if part in parts:
            step()
    if "hub" in parts:
        pins = with_pins(_text(root / KEYS / "hubs"), (ours / "hubs").read_text("utf-8"))
        first_boot.write(root / KEYS / "hubs", pins.encode(), 0o644)
    if "unit" in parts:
        steps.write_unit()
    if "user" in parts:
        # Add what is missing; nothing is taken away: it might be the way in
        wanted = (ours / "users_keys").read_text("utf-8")
        account = _account(root, user)
        if account is None:
            raise Failed(f"there is no user {user}")
        uid, gid, home = account
        path = home / ".ssh/authorized_keys"
        lines = _text(path).splitlines()
        lines += [line for line in wanted.splitlines() if line not in lines]
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700)
            os.chown(path.parent, uid, gid)
        first_boot.write(path, "".join(f"{line}\n" for line in lines).encode(), 0o600)
        os.chown(path, uid, gid)
    return {"key": _public(root)}


def start(root: Path) -> dict[str, Any]:
    """Start the member or hub, and let go of what was copied here to set it up."""
    unit = unit_in(root)
    for words in (["daemon-reload"], ["enable", unit], ["restart", "--no-block", unit]):
        if _systemctl(*words):
            raise Failed(f"systemctl {' '.join(words)} failed")
    shutil.rmtree(root / STAGE, ignore_errors=True)
    return {}


def remove(root: Path) -> dict[str, Any]:
    """Stop all units, and delete all files."""
    for unit in _OUR_UNITS:
        if (root / UNITS / unit).exists():
            _systemctl("disable", "--now", unit)
            (root / UNITS / unit).unlink()
        (root / UNITS / "multi-user.target.wants" / unit).unlink(missing_ok=True)
    _systemctl("daemon-reload")
    for name in _OURS:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name in ("etc/systemd/journald.conf.d", "etc/systemd/system/multi-user.target.wants"):
        with contextlib.suppress(OSError):  # something else is in it
            (root / name).rmdir()
    first_boot.sync_folder(root / "var/lib")
    return {}


def _systemctl(*words: str) -> int:
    done = subprocess.run(["systemctl", *words], check=False, stdout=subprocess.DEVNULL)
    return done.returncode


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _public(root: Path) -> str:
    words = _text(root / KEYS / "key").split()
    return words[1] if words[:1] == ["public"] else ""


def _features(root: Path) -> list[str]:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith(("Features", "flags")):
            return [_FEATURES[word] for word in line.split() if word in _FEATURES]
    return []


def _account(root: Path, user: str) -> tuple[int, int, Path] | None:
    """The ids and the home of a user of the device."""
    for line in _text(root / "etc/passwd").splitlines():
        name, _, uid, gid, _, home, *_ = [*line.split(":"), *[""] * 6]
        if name == user:
            return int(uid), int(gid), root / home.lstrip("/")
    return None


def main(argv: Sequence[str]) -> int:
    """`[--root FOLDER] look USER | set-up USER PART… | start | remove`; see the module."""
    words, root = list(argv), Path("/")
    if words[:1] == ["--root"]:
        root, words = Path(words[1]), words[2:]
    verb, rest = words[0], words[1:]
    try:
        if verb == "look":
            said = look(root, rest[0])
        elif verb == "set-up":
            said = set_up(root, rest[0], rest[1:])
        else:
            said = {"start": start, "remove": remove}[verb](root)
    except (Failed, first_boot.Later, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return first_boot.BAD
    print(json.dumps(said))
    return 0
