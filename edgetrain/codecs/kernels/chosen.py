"""Choose the implementation of the inner loops: the C library, or NumPy.

Both give the same bits (tests/codecs/kernels); C is faster. This is the only module that imports an
implementation, on first use. The environment variable EDGETRAIN_KERNELS overrides the choice: auto,
numpy, or an instruction set (portable, avx2, avx512, neon), an error if this machine lacks it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from edgetrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from edgetrain.codecs.kernels.native import Native
    from edgetrain.codecs.kernels.numpy_twin import NumpyTwin

Kernels: TypeAlias = "Native | NumpyTwin"
"""The inner loops. `NumpyTwin` says what each method does."""

_IN_WORDS = {
    "portable": "no vector instructions",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "neon": "NEON",
}


@dataclass(frozen=True)
class Backend:
    """An implementation: "c" or "numpy", the instruction set, the library's file, and why."""

    name: str
    instructions: str
    path: str
    reason: str

    @property
    def sentence(self) -> str:
        """The line that `edgetrain doctor` prints."""
        if self.name == "numpy":
            return f"NumPy, several times slower than C and the same bits: {self.reason}"
        return f"C with {_IN_WORDS[self.instructions]}: {self.reason} ({self.path})"


_current: tuple[Kernels, Backend] | None = None


def current() -> Kernels:
    """The implementation in use. The first call chooses it, and compiles it if necessary."""
    return _loaded()[0]


def backend() -> Backend:
    return _loaded()[1]


@contextmanager
def using(choice: str) -> Iterator[Kernels]:
    """Use another implementation inside a `with` block, in the whole process; for tests."""
    global _current
    before = _loaded()
    try:
        _current = _choose(choice)
        yield _current[0]
    finally:
        _current = before
        _choose("numpy" if before[1].name == "numpy" else before[1].instructions)


def choices() -> list[str]:
    """Names that `using` accepts on this machine; "numpy" is always among them."""
    from edgetrain.codecs.kernels import native

    return ["numpy", *native.instruction_sets()]


def _loaded() -> tuple[Kernels, Backend]:
    global _current
    if _current is None:
        _current = _choose(os.environ.get("EDGETRAIN_KERNELS", "auto"))
    return _current


def _choose(choice: str) -> tuple[Kernels, Backend]:
    from edgetrain.codecs.kernels import native
    from edgetrain.codecs.kernels.numpy_twin import NumpyTwin

    known = ["auto", "numpy", *native.INSTRUCTION_SETS]
    if choice not in known:
        raise ConfigError(
            f"EDGETRAIN_KERNELS is '{choice}', not one of {', '.join(known)}",
            did_you_mean(choice, known),
        )
    if choice == "numpy":
        return NumpyTwin(), Backend("numpy", "-", "-", "asked for")
    library, path, reason = native.load()
    if library is None and choice == "auto":
        return NumpyTwin(), Backend("numpy", "-", "-", reason)
    if library is None or choice not in ["auto", *native.instruction_sets()]:
        raise ConfigError(f"no kernels for '{choice}' here: {reason}", "set EDGETRAIN_KERNELS=auto")
    used = native.Native(library, choice)
    return used, Backend("c", used.instructions, path, reason)
