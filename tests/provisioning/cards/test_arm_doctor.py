"""What `edgetrain doctor` says in a worker archive for a Raspberry Pi: `make test-arm-doctor`.

On demand: it fetches 120 MB of packages, and ARM's instructions are emulated. Python is Debian's
for arm64, unpacked and not installed; qemu-user runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pi_worker
import pytest

pytestmark = [pytest.mark.arm_doctor, pytest.mark.timeout(1800)]
PYTHON_PACKAGES = (
    "python3.11,libpython3.11-stdlib,libgomp1,libstdc++6,zlib1g,libssl3,libffi8,libsqlite3-0,"
    "libbz2-1.0,liblzma5,libexpat1,libuuid1"
)
TOOLS = {
    "qemu-aarch64-static": "qemu-user-static",
    "mmdebstrap": "mmdebstrap",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
}
LACKING = [package for tool, package in TOOLS.items() if not shutil.which(tool)]


def python_for_arm(folder: Path) -> list[str]:
    """A command that is Python 3.11 for aarch64."""
    root = folder / "root"
    words = ["--mode=root", "--variant=extract", "--architectures=arm64"]
    words += [f"--include={PYTHON_PACKAGES}", "bookworm", str(root)]
    subprocess.run(["mmdebstrap", *words], check=True, capture_output=True, timeout=600)
    return [
        "qemu-aarch64-static",
        "-cpu",
        "cortex-a72",
        "-L",
        str(root),
        f"{root}/usr/bin/python3.11",
    ]


def unpacked_worker(folder: Path) -> Path:
    """The worker for Raspberry Pi OS 12, as it lies on a device."""
    out, site = folder / "worker.tar", folder / "site"
    pi_worker.make(out)
    with tarfile.open(out) as archive:
        payload = archive.extractfile("payload.tar.gz")
        with tarfile.open(fileobj=payload, mode="r:gz") as inner:
            inner.extractall(site, filter="data")
    return site


@pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mmdebstrap --mode=root")
def test_the_kernels_of_a_worker_for_a_pi_4_are_c_and_its_torch_is_loaded(tmp_path):
    python, site = python_for_arm(tmp_path), unpacked_worker(tmp_path)
    # What doctor starts by sys.executable is a program of this machine that starts the emulator.
    again = tmp_path / "python"
    again.write_text(f'#!/bin/sh\nexec {" ".join(python)} "$@"\n')
    again.chmod(0o755)
    code = (
        f"import sys; sys.executable = {str(again)!r}; from edgetrain.__main__ import main; main()"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(tmp_path)}
    done = subprocess.run(
        [*python, "-c", code, "doctor", "--for", "member", "--json"],
        env=env, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["codecs"]["verdict"] == "yes", checks["codecs"]
    assert checks["codecs"]["said"].startswith("C with NEON: built with the package")
    # Doctor gives torch two minutes to load, which are few for an emulator on a busy machine.
    code = "import torch; print(torch.__version__, torch.ones(3).sum().item())"
    done = subprocess.run([*python, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "2.9.1+cpu 3.0\n", done.stderr
