"""The device's half of each command: one file of a few modules, which is sent along with each call,
so that desk and device are always of one version.

It runs by the device's own Python, as root, without a file on its disk.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

from edgetrain.fleet.interpreters import PACKAGE_PARENT
from edgetrain.fleet.ssh import Remote, SshAnswer, SshHost

KEEPER, ONSITE = "keeper", "onsite"
"""The modules that have verbs."""
_MODULES = ("edgetrain/provisioning/keeper.py", "edgetrain/provisioning/onsite.py",
            "edgetrain/provisioning/cards/first_boot.py")  # fmt: skip
_MAIN = """\
import sys
from edgetrain.provisioning.keeper import main
sys.exit(main(sys.argv[1:]))
"""
_CALL = """\
import importlib, os, sys
file = os.memfd_create("edgetrain")
with open(file, "wb", closefd=False) as out:
    out.write(sys.stdin.buffer.read())
sys.path.insert(0, f"/proc/self/fd/{file}")
sys.exit(importlib.import_module(f"edgetrain.provisioning.{sys.argv[1]}").main(sys.argv[2:]))
"""
"""Runs a module of a program that comes as its input."""


@cache
def program() -> bytes:
    """keeper.pyz: what runs on a device. Alone it has the verbs of `keeper`."""
    files = {"__main__.py": _MAIN.encode()}
    for name in _MODULES:
        files[name] = (PACKAGE_PARENT / name).read_bytes()
        files |= {f"{folder}/__init__.py": b"" for folder in list(Path(name).parents)[:-1]}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in sorted(files.items()):
            packed.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def call(
    remote: Remote, host: SshHost, root: str, module: str, *words: str, seconds: float
) -> SshAnswer:
    """Call a verb of a module on a device. root: the device's root, as the other side sees it."""
    # Without site: it imports what other packages of the device have put there.
    argv = ["python3", "-I", "-S", "-c", _CALL, module, "--root", root, *words]
    return remote.run(host, argv, program(), seconds=seconds, root=True)
