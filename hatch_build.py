"""The wheel's build hook: compile the codec kernels if a C compiler is there.

The library has no Python ABI, so one wheel serves every Python 3 on an architecture. Without a
compiler, or with EDGETRAIN_PURE set, the wheel is pure Python and the kernels are compiled on first
use instead, or NumPy does their work. An editable install takes that way too.

EDGETRAIN_TARGET=aarch64 (or x86_64) builds for that machine with its cross-compiler, which then
must be there. The tag says which machine, and the oldest glibc that has what the library asks for
(2.17 where it asks for less); without glibc it is this platform's. A library of another machine
than the tag's is never put into a wheel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds edgetrain/codecs/kernels/_kernels.so to a wheel and names the platform in its tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder: str | None = None
        if version == "editable" or os.environ.get("EDGETRAIN_PURE"):
            return
        target = os.environ.get("EDGETRAIN_TARGET", "")
        if target and target not in _MACHINES:
            raise ValueError(f"EDGETRAIN_TARGET={target}: known are {', '.join(_MACHINES)}")
        machine = target or platform.machine()
        compiler = _load(Path(self.root) / "edgetrain" / "codecs" / "kernels" / "compiler.py")
        self._folder = tempfile.mkdtemp(prefix="edgetrain-kernels-")
        library = Path(self._folder) / "_kernels.so"
        try:
            with _cross_compiler(target):
                compiler.compile_kernels(library)
        except compiler.CannotCompile as error:
            if target:
                raise
            self.app.display_warning(f"building a pure wheel: {error}")
            return
        found = machine_of(library)
        if found != machine:
            raise ValueError(
                f"the C compiler made a library for {found}, and the wheel is for {machine}: "
                f"EDGETRAIN_TARGET={found} makes one for {found}"
            )
        build_data["force_include"][str(library)] = "edgetrain/codecs/kernels/_kernels.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(library)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


_MACHINES = {"aarch64": 0xB7, "x86_64": 0x3E}
"""Numbers of machines in ELF files."""


def machine_of(library: Path) -> str:
    """The machine that an ELF file is for, as uname calls it; "an unknown machine" for others."""
    header = library.read_bytes()[:20]
    if header[:4] != b"\x7fELF":
        return platform.machine() if sys.platform != "linux" else "an unknown machine"
    number = int.from_bytes(header[18:20], "little" if header[5] == 1 else "big")
    known = {number: name for name, number in _MACHINES.items()}
    return known.get(number, f"machine {number:#x}")


def platform_of(library: Path) -> str:
    """The platform of a wheel with this library: those whose glibc has the versions of symbols that
    it names; this one's, if it names none."""
    asked = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes())]
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"manylinux_2_{max(17, *asked)}_{machine_of(library)}" if asked else here


@contextlib.contextmanager
def _cross_compiler(target: str) -> Iterator[None]:
    """Let CC be the compiler for a target; the user's own CC is kept if there is one."""
    if not target or os.environ.get("CC") or target == platform.machine():
        yield
        return
    os.environ["CC"] = f"{target}-linux-gnu-gcc"
    try:
        yield
    finally:
        del os.environ["CC"]


def _load(path: Path) -> ModuleType:
    """A module by its path: the package itself cannot be imported where it is only built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
