"""Environments for other tools, each beside edgetrain's own, from a list that is locked by hashes.

    python benchmarks/peers.py --install flower,torchft

An environment sees what edgetrain's own has, so that torch and numpy are the same for all; what the
other tool wants besides, in other versions too, is in `locks/NAME.txt`. Nothing here measures. To
lock other versions, from the folder benchmarks/:

    python environments.py 'flwr[simulation]==1.41.0' > locks/flower.txt
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from edgetrain.errors import ConfigError, did_you_mean

HERE = Path(__file__).resolve().parent
LOCKS = HERE / "locks"
HOME = HERE.parent / ".venv-peers"
SHARED = {
    "torch", "numpy", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy",
}  # fmt: skip
"""What is edgetrain's own: torch, what torch wants, and numpy."""
_NAMED: dict[str, str] = {}
"""Pythons that the command line named instead."""
LOCKED_FOR = "CPython 3.11 on Linux x86_64"


def known() -> list[str]:
    """The tools that have a list."""
    return sorted(path.stem for path in LOCKS.glob("*.txt"))


def use(name: str, python: str) -> None:
    """Take another Python for an environment. ConfigError for an unknown name, or for no Python."""
    if not python:
        raise ConfigError(
            f"--python {name}", "NAME=PYTHON is needed, as flower=~/flower/bin/python"
        )
    check([name], known(), "environment")
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ConfigError(f"--python {name}={python}", "there is no such program")
    _NAMED[name] = found


def is_there(name: str) -> bool:
    """Whether an environment has been made, or named."""
    return name in _NAMED or _python(name).exists()


def python_of(name: str) -> str:
    """The Python of an environment; "" is edgetrain's own. ConfigError if it is not there."""
    if not name:
        return sys.executable
    if not is_there(name):
        raise ConfigError(
            f"no environment for {name} in {HOME}", f"python benchmarks/peers.py --install {name}"
        )
    return _NAMED.get(name, str(_python(name)))


def _python(name: str) -> Path:
    return HOME / name / "bin" / "python"


def install_all(names: Sequence[str]) -> None:
    """Make these environments, or "all". ConfigError if one is unknown or cannot be made here."""
    if list(names) != ["all"]:
        check(names, known(), "environment")
    for name in known() if list(names) == ["all"] else names:
        install(name)
        print(f"{name}: {HOME / name}", flush=True)


def install(name: str) -> None:
    """Make an environment, or make it again. ConfigError if it cannot be done here."""
    here = (
        f"{platform.python_implementation()} {platform.python_version_tuple()[0]}."
        f"{platform.python_version_tuple()[1]} on {platform.system()} {platform.machine()}"
    )
    if here != LOCKED_FOR:
        raise ConfigError(f"{here}: the list of {name} is locked for {LOCKED_FOR}", "use that")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME / name)], check=True)
    python = _python(name)
    own = _said(str(python), "import site; print(site.getsitepackages()[0])")
    line = f"import site; site.addsitedir({site.getsitepackages()[0]!r})"
    Path(own, "edgetrain.pth").write_text(line + "\n")
    words = ["--quiet", "--no-deps", "--require-hashes", "--requirement", f"{LOCKS / name}.txt"]
    done = subprocess.run([python, "-m", "pip", "install", *words])
    if done.returncode:
        raise ConfigError(f"{name} could not be installed", "pip says above why")


def versions(environment: str, packages: tuple[str, ...]) -> str:
    """Packages of an environment with their versions, in a line."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    found = _said(python_of(environment), code, *packages).split()
    return ", ".join(f"{name} {version}" for name, version in zip(packages, found, strict=True))


def check(names: Sequence[str], known: Collection[str], what: str = "system") -> None:
    """ConfigError for a name that is not one of the known."""
    for name in names:
        if name not in known:
            raise ConfigError(f"no {what} '{name}'", did_you_mean(name, known))


def log_of(name: str) -> Path:
    """Where a process of this name says what it says; kept where it fails."""
    folder = Path(tempfile.gettempdir(), "edgetrain-peers")
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.log"


def lock(requirements: Sequence[str]) -> Iterator[str]:
    """The lines of a list: what pip would install for them here, beside torch and numpy."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        same = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "numpy")]
        words = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        pip = [sys.executable, "-m", "pip", "install", *words, *requirements, *same]
        subprocess.run(pip, check=True)
        found = json.loads(report.read_text())["install"]
    yield f"# {' '.join(requirements)}, locked for {LOCKED_FOR}: see environments.py"
    for each in sorted(found, key=lambda each: str(each["metadata"]["name"]).lower()):
        name, version = each["metadata"]["name"].lower(), each["metadata"]["version"]
        if name not in SHARED:
            digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
            yield f"{name}=={version} --hash=sha256:{digest}"


def _said(python: str, code: str, *words: str) -> str:
    done = subprocess.run([python, "-c", code, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    print("\n".join(lock(sys.argv[1:])))
