"""The wheel's build hook: compile the codec kernels if a C compiler is there.

The library has no Python ABI, so one wheel serves every Python 3 on an architecture. Without a
compiler, or with EDGETRAIN_PURE set, the wheel is pure Python and the kernels are compiled on first
use instead, or NumPy does their work. An editable install takes that way too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import tempfile
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
        compiler = _load(Path(self.root) / "edgetrain" / "codecs" / "kernels" / "compiler.py")
        self._folder = tempfile.mkdtemp(prefix="edgetrain-kernels-")
        library = Path(self._folder) / "_kernels.so"
        try:
            compiler.compile_kernels(library)
        except compiler.CannotCompile as error:
            self.app.display_warning(f"building a pure wheel: {error}")
            return
        build_data["force_include"][str(library)] = "edgetrain/codecs/kernels/_kernels.so"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _load(path: Path) -> ModuleType:
    """A module by its path: the package itself cannot be imported where it is only built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
