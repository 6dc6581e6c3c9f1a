"""What a test changes in how later tests import."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Set
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[2]
_OURS = _ROOT / "edgetrain", _ROOT / "tests"
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
_LIBRARIES += [Path(path) for path in sys.path if path.endswith("-packages")]
_INSTALLED = tuple(f"{path}/" for path in _LIBRARIES)
_KNOWN = tuple(f"{p}/" for path in (*_OURS, *_LIBRARIES) for p in {path, path.resolve()})


class Imports:
    """`sys.path` and `sys.modules` at one moment."""

    def __init__(self) -> None:
        self._path, self._modules = [*sys.path], {**sys.modules}

    def restore(self, allowed: Set[str] = frozenset()) -> list[str]:
        """Put both back, and return what was different. A folder of `allowed` may be added, and one
        of a library, as onnxruntime does when it is imported. Modules that came from a library, the
        package or the tests stay: any test would find the same."""
        return self._restore_path(allowed) + self._restore_modules()

    def _restore_path(self, allowed: Set[str]) -> list[str]:
        allowed = allowed | {
            p for p in sys.path if p.startswith(_INSTALLED) and p not in self._path
        }
        added = [path for path in sys.path if path in allowed]
        own = [path for path in self._path if path not in allowed]
        now = [path for path in sys.path if path not in allowed]
        if now == own:
            return []
        sys.path[:] = added + own
        found = [f"{path!r} on sys.path" for path in now if path not in own]
        return found or ["sys.path without an entry, or in another order"]

    def _restore_modules(self) -> list[str]:
        if sys.modules == self._modules:
            return []
        found = []
        for name, module in [*sys.modules.items()]:
            if name not in self._modules:
                if _is_foreign(module):
                    found.append(f"the module {name!r}")
                    del sys.modules[name]
            elif module is not self._modules[name]:
                found.append(f"another module {name!r}")
        found += [f"no module {name!r}" for name in self._modules if name not in sys.modules]
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
        return found


def _is_foreign(module: ModuleType | None) -> bool:
    """True for a module whose name another file may have: from a temporary folder, or a program
    beside the package."""
    if module is sys.modules["__main__"]:  # multiprocessing's second name for it
        return False
    file = getattr(module, "__file__", None) or ""
    return module is None or (Path(file).is_absolute() and not file.startswith(_KNOWN))
