"""Devices that run, as folders: slots, sets and a stand-in for systemctl; for `FolderRemote`.

The member in a slot is as the slot's file `as` says: good, refused, hangs, or waits (for a hub).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from pathlib import Path

from edgetrain.provisioning.cards import archive
from edgetrain.provisioning.keeper import DeviceKeeper

_SYSTEMCTL = """#!/bin/sh
case "$1" in
start|restart) case "$*" in *edgetrain-trial*) ;; *) cat opt/edgetrain/current/as > unit ;; esac ;;
stop) echo stopped > unit ;;
show)
    case "$(cat unit)" in
    good) set -- active running success 0 "training: 3 of 9 steps" ;;
    refused) set -- failed failed exit-code 2 "the hub refused: protocol" ;;
    hangs) set -- activating start success 0 "joining tcp://hub:5555" ;;
    waits) set -- activating start success 0 "looking for the hub at tcp://hub:5555" ;;
    done) set -- inactive dead success 0 done ;;
    *) set -- inactive dead success 0 "" ;;
    esac
    printf 'ActiveState=%s\\nSubState=%s\\nResult=%s\\n' "$1" "$2" "$3"
    printf 'ExecMainStatus=%s\\nStatusText=%s\\n' "$4" "$5" ;;
esac
echo "$@" >> systemctl
"""


_WATCH = threading.Lock()
"""Each device has one watcher."""


def stand_ins(folder: Path) -> str:
    """A PATH in which systemctl is the stand-in."""
    folder.mkdir()
    (folder / "systemctl").write_text(_SYSTEMCTL)
    (folder / "systemctl").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def flashed(root: Path, how: str = "good") -> Path:
    """A device as its first boot leaves it, its member running."""
    slots = root / "opt/edgetrain"
    (slots / "a/edgetrain-0.1.0.dist-info").mkdir(parents=True)
    (slots / "a/as").write_text(how)
    (slots / "current").symlink_to("a")
    first = root / "etc/edgetrain/jobs/1"
    first.mkdir(parents=True)
    (first / "job.toml").write_text("name = 'first'\n")
    (first / "set.json").write_text('{"digest": "first", "number": 1}')
    (root / "etc/edgetrain/current").symlink_to("jobs/1")
    keys = root / "var/lib/edgetrain-keys"
    keys.mkdir(parents=True)
    (keys / "hubs").write_text("pinned")
    (keys / "bundles").write_text("")
    (root / "etc/systemd/system").mkdir(parents=True)
    (root / "unit").write_text(how)
    return root


def packed(folder: Path, how: str, protocol: int, python: str, machine: str) -> tuple[Path, str]:
    """A worker archive whose member is like this; and its digest."""
    site = folder / f"{how}-{protocol}"
    (site / "edgetrain/exchange").mkdir(parents=True)
    (site / "edgetrain/training/member").mkdir(parents=True)
    for name in ("torch.py", "edgetrain/training/member/train.py"):
        (site / name).write_text("")
    (site / "edgetrain/exchange/messages.py").write_text(f"PROTOCOL = {protocol}\n")
    (site / "as").write_text(how)
    manifest = archive.Manifest("raspberry-pi-os-13", python, machine, {"edgetrain": "0.1.0"})
    path = folder / f"{how}-{protocol}.tar"
    archive.pack(site, manifest, path)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def end_trials(folder: Path) -> None:
    """Let all devices that have an update on trial bring it to its end."""
    with _WATCH:
        for trial in sorted(folder.glob("*/opt/edgetrain/trial.json")):
            _end(trial)


def _end(trial: Path) -> None:
    if trial.exists():
        root = trial.parents[2]

        def run(words, environment, root=root):
            done = subprocess.run(
                list(words), cwd=root, capture_output=True, text=True, check=False,
                env={**os.environ, **environment},
            )  # fmt: skip
            return done.returncode, done.stdout

        DeviceKeeper(root, run).watch(lambda seconds: None)


def state(root: Path) -> dict[str, str]:
    """What a device keeps: files and links, but not what its stand-in was called with."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if (
            name == "systemctl"
            or name.startswith("run/")
            or "incoming" in name
            or name.endswith(".part")
        ):
            continue
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def facts(path: Path) -> dict:
    return json.loads(path.read_text())
