"""From kernels.c to a shared library: the compiler, its flags, the user's cache.

Only the standard library: the package's own build loads this file by its path (hatch_build.py).
Why there is a cache, and what is trusted in it: docs/decisions/ on the codec kernels.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")

# No -ffast-math, ever: it lets the compiler reorder sums, and older gccs then flip the whole
# process to flushing denormals. No contraction: a fused multiply-add rounds once where NumPy
# rounds twice.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-semantic-interposition",
    "-fPIC",
    "-shared",
    # Names like `select` are the library's own: another library's must not answer to them.
    *(["-Wl,-Bsymbolic"] if sys.platform == "linux" else []),
]


class CannotCompile(Exception):
    """No compiler, or it failed. Kept inside this package: NumPy takes over."""


def find_compiler() -> list[str]:
    """The C compiler's argv: $CC, else cc, gcc or clang on the path. CannotCompile if none."""
    named = os.environ.get("CC")
    for candidate in [named] if named else ["cc", "gcc", "clang"]:
        argv = candidate.split()
        if argv and shutil.which(argv[0]):
            return argv
    raise CannotCompile(f"no C compiler: {named or 'cc, gcc, clang'} not found")


def compile_kernels(target: Path, source: Path = SOURCE) -> None:
    """Compile `source` into the shared library `target`, which appears whole or not at all."""
    argv = find_compiler()
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so.part")
    os.close(handle)
    scratch = Path(name)
    try:
        subprocess.run(
            [*argv, *FLAGS, str(source), "-o", str(scratch), "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        scratch.chmod(0o755)
        scratch.replace(target)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise CannotCompile(f"{argv[0]} failed: {lines[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{argv[0]} failed: {error}") from None
    finally:
        scratch.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Folder of libraries built on first use: edgetrain/ in $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgetrain"


def cached_library() -> Path:
    """The library for this source, these flags and this machine; compiled if it is not there yet.

    Raises CannotCompile, also if the cache belongs to, or can be written by, somebody else.
    """
    text = SOURCE.read_bytes() + " ".join([*FLAGS, platform.machine(), *_named_compiler()]).encode()
    folder = cache_folder()
    target = folder / f"kernels-{hashlib.sha256(text).hexdigest()[:16]}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (_is_ours(folder) and (not target.exists() or _is_ours(target))):
            raise CannotCompile(f"{folder} can be written by others")
    except (OSError, RuntimeError) as error:
        raise CannotCompile(f"no cache: {error}") from None
    if not target.exists():
        compile_kernels(target)
    return target


def _named_compiler() -> list[str]:
    """$CC, if set: a library that it built is another one (with a sanitizer, say)."""
    named = os.environ.get("CC")
    return named.split() if named else []


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
