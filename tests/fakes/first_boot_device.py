"""A device's root in a folder, with a card's boot partition in it; and a first boot that is killed.

As a program: `first_boot_device.py ROOT LINES` runs first_boot.py on ROOT and kills itself with
SIGKILL at its LINES-th line (0: never). Prints how many lines there were. In place of `edgetrain`
it has stand-ins for `keys init` and `keys enroll`, whose hub is a file beside ROOT.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import os
import signal
import sys
import tarfile
import uuid
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

PROGRAM = Path(__file__).parents[2] / "edgetrain/provisioning/cards/first_boot.py"
TOKEN = "edgetrain-" + "t" * 86
PSK = "f42c6fc52df0ebef9ebb4b90b38a5f90"
FSTAB = "PARTUUID=1-01 /boot/firmware vfat defaults 0 2\nPARTUUID=1-02 / ext4 defaults 0 1\n"


@functools.cache
def program() -> ModuleType:
    """first_boot.py, loaded as on a device: by its path, and once."""
    spec = importlib.util.spec_from_file_location("first_boot", PROGRAM)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["first_boot"] = module
    spec.loader.exec_module(module)
    return module


def prepare(root: Path, archive: Path, config: dict[str, Any], token: str = TOKEN) -> None:
    """Make a root as it is when the first boot begins."""
    ours = root / "boot/firmware/edgetrain"
    for folder in (ours, root / "proc", root / "etc", root / "etc/ssh"):
        folder.mkdir(parents=True)
    (root / "proc/mounts").write_text("/dev/mmcblk0p2 / ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n")
    (root / "etc/fstab").write_text(FSTAB)
    (ours / "worker.tar").write_bytes(archive.read_bytes())
    (ours / "config.json").write_text(json.dumps(config))
    (ours / "token").write_text(token)
    (ours / "job.toml").write_text('name = "x"\n')
    (ours / "edgetrain-member.service").write_text("threads @THREADS@\n")
    (root / "boot/firmware/network-config").write_text(f"password: {PSK}\n")
    with tarfile.open(ours / "data.tar", "w") as tar:
        entry = tarfile.TarInfo("digits.csv")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"data"))


def stand_in(root: Path, words: list[str]) -> int:
    """What `edgetrain …` and the other commands do here."""
    if words[:1] == ["ssh-keygen"]:
        Path(words[-1]).write_text("host key")
        Path(f"{words[-1]}.pub").write_text("ssh-ed25519 AAAA")
        return 0
    if words[:1] == ["systemctl"]:
        with (root / "systemctl").open("a") as file:
            file.write(" ".join(words[1:2]) + "\n")
        return 0
    folder = Path(words[words.index("--keys") + 1])
    if words[3:5] == ["keys", "init"]:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / ".key"
        draft.write_text(uuid.uuid4().hex)
        draft.replace(folder / "key")
        return 0
    if words[3:5] == ["keys", "enroll"]:
        token = Path(words[words.index("--token") + 1].removeprefix("@")).read_text()
        (folder / "hubs").write_text("pinned")
        if "--ssh-host-key" in words:
            sent = Path(words[words.index("--ssh-host-key") + 1]).read_text()
            (root.parent / "hub-host-keys").write_text(sent)
        hub = root.parent / "hub-list"
        known = hub.read_text().splitlines() if hub.exists() else []
        own = (folder / "key").read_text()
        if token != TOKEN or (known and own not in known):
            return 2
        hub.write_text("\n".join(sorted({*known, own})) + "\n")
        return 0
    return 0


def main() -> None:
    """Run the first boot, and die at a line."""
    root, last = Path(sys.argv[1]), int(sys.argv[2])
    module, lines = program(), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != str(PROGRAM):
            return None
        if event == "line":
            lines += 1
            if lines == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    boot = module.FirstBoot(root, "/boot/firmware", "python3", lambda w, e: stand_in(root, w))
    os.sync = lambda: None  # of the whole machine: slow, and no power is lost here
    sys.settrace(trace)
    boot.go()
    sys.settrace(None)
    print(lines)


if __name__ == "__main__":
    main()
