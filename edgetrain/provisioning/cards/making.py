"""Put a worker archive together with pip: locked wheels, and edgetrain's own wheel."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.fleet.interpreters import PACKAGE_PARENT
from edgetrain.provisioning.cards import archive
from edgetrain.provisioning.cards.archive import Manifest, Workers

_GLIBC = range(17, 36)
"""Minor versions of glibc 2 that a device's system has at least: Debian 12 has 2.36."""
_NO_NETWORK = ("connection", "name resolution", "unreachable", "timed out", "proxy")
"""Words of pip that mean that nothing was reached."""


def make(
    workers: Workers,
    release: str,
    out: Path,
    wheel: Path | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Make the worker archive for an operating system. Needs a network; returns its manifest.

    wheel: edgetrain's, for the machine of that system; None: it is built from this checkout.
    Raises ConfigError with what pip said last.
    """
    lock = workers.lock(release)
    python, machine = workers.releases[release]
    with tempfile.TemporaryDirectory(prefix="edgetrain-make-") as scratch:
        folder = Path(scratch) / "worker"
        if wheel is None:
            told("building edgetrain's wheel")
            wheel = build_wheel(Path(scratch), machine)
        check_wheel(wheel, machine)
        told(f"fetching the packages of {lock}")
        install(folder, python, machine, "--require-hashes", "--requirement", str(lock))
        install(folder, python, machine, "--no-index", str(wheel))
        packages = archive.installed(folder)
        if "torch" not in packages:
            raise ConfigError(f"{lock} has no torch")
        needs = workers.torch_needs(packages["torch"], machine)
        told("packing")
        return archive.pack(folder, Manifest(release, python, machine, packages, needs), out)


def build_wheel(folder: Path, machine: str, source: Path = PACKAGE_PARENT) -> Path:
    """Build edgetrain's wheel for a machine, with its kernels compiled. Raises ConfigError."""
    if not (source / "hatch_build.py").is_file():
        raise ConfigError(
            "this edgetrain is installed, and not a checkout that a wheel can be built from",
            "--wheel FILE: EDGETRAIN_TARGET=aarch64 pip wheel --no-deps . in a checkout",
        )
    compiler = os.environ.get("CC") or f"{machine}-linux-gnu-gcc"
    if machine != platform.machine() and not shutil.which(compiler.split()[0]):
        raise ConfigError(
            f"{compiler} is not installed: it compiles edgetrain's kernels for the devices",
            f"apt install gcc-{machine.replace('_', '-')}-linux-gnu",
        )
    words = ["wheel", "--no-deps", "--wheel-dir", str(folder), str(source)]
    _pip(words, env={**os.environ, "EDGETRAIN_TARGET": machine})
    (wheel,) = folder.glob("edgetrain-*.whl")
    return wheel


def check_wheel(wheel: Path, machine: str) -> None:
    """Raises ConfigError for a wheel whose kernels are compiled for another machine, or not."""
    if not wheel.is_file():
        raise ConfigError(f"no wheel {wheel}")
    tag = wheel.stem.rpartition("-")[2]
    if not tag.endswith(f"_{machine}"):
        what = "has no compiled kernels" if tag == "any" else f"is for {tag}"
        raise ConfigError(f"{wheel.name} {what}, and the worker is for {machine}")


def install(folder: Path, python: str, machine: str, *what: str) -> None:
    """Let pip install `what` (its last arguments) into a folder, for another machine."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    words = ["install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:"]
    words += ["--target", str(folder), "--upgrade", "--implementation", "cp"]
    # pip compares Requires-Python with the Python that runs it; the list was made for `python`.
    words += ["--python-version", python, "--ignore-requires-python", "--disable-pip-version-check"]
    words += [word for platform in platforms for word in ("--platform", platform)]
    _pip([*words, *what])


def _pip(words: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False, env=env
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in said if line.startswith("ERROR")] or said or ["no reason"]
        away = any(word in "\n".join(said).lower() for word in _NO_NETWORK)
        raise ConfigError(f"pip failed: {errors[-1]}", "is there a network?" if away else "")
