"""A user's own: whatever has a name in a job may be code that does not come with edgetrain.

A job names it as `module:object`, of a file beside the job file or of an installed package; as
`FILE.bundle#module:object`, of a bundle that this device allows; or, of an installed package, by
the name of an entry point in the group of its kind (`GROUPS`). docs/how-to/extensions.md has the
contract of each kind.

What a job of this machine spells as `module:object` is imported by `load`. Whatever the network
names is looked for among that and the entry points, and never imported from anywhere else.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from edgetrain.errors import ConfigError, EdgetrainError, did_you_mean, quoted

T = TypeVar("T")


@dataclass(frozen=True)
class Extension:
    """An object loaded under a name."""

    made: Any
    module: ModuleType
    digest: str
    """Digest of its code: 16 hexadecimal digits."""


loaded: dict[str, Extension] = {}
"""By the name of an entry point, or as jobs spell it: "my.bundle#module:object". There also, where
a colon means something else, with a dot: see `dotted`."""

_SPELLED = re.compile(
    r"(?<![^\s;|,(])(?:([^\s;|,()#]+)#)?([A-Za-z_][\w.]*):([A-Za-z_]\w*)(?![\w.#/*?-])"
)


# -- found by name -------------------------------------------------------------------------------


def find(kind: str, name: str, known: Mapping[str, T], cls: type[Any] = object) -> T:
    """What is called so: of `known`, or of a user's own, which has to be a `cls`. ConfigError, with
    the near miss."""
    if name in known:
        return known[name]
    found = own(kind, name)
    if found is None:
        hint = did_you_mean(name, [*known, *names(kind)])
        raise ConfigError(f"no {kind} '{name}'", _NOT_LOADED if ":" in name else hint)
    if not (isinstance(found, cls) or (isinstance(found, type) and issubclass(found, cls))):
        said = f"a {type(found).__name__}, and no {cls.__name__}"
        raise ConfigError(f"{kind} '{name}' is {said}", "see docs/how-to/extensions.md")
    return cast(T, found)


_NOT_LOADED = "what is spelled module:object is loaded by the job that names it"


def own(kind: str, name: str) -> Any:
    """A user's own of this name; None: there is none."""
    if name not in loaded and "." not in name:
        entry = next((each for each in _entries(kind) if each.name == name), None)
        if entry is not None:
            try:
                made = entry.load()
            except Exception as error:
                said = f"{kind} '{name}' of the package '{entry.module}' cannot be imported"
                raise ConfigError(f"{said}: {quoted(error)}") from error
            _keep(name, made, sys.modules[entry.module])
            _load_outer(made, None)
    return loaded[name].made if name in loaded else None


def is_own(name: str) -> bool:
    """Whether a user's own was found under this name."""
    return name in loaded


def names(kind: str) -> list[str]:
    """Entry points of installed packages."""
    return sorted({entry.name for entry in _entries(kind)})


def _entries(kind: str) -> Iterable[EntryPoint]:
    from edgetrain.extensions.modules import GROUPS

    return entry_points(group=GROUPS[kind])


def dotted(text: str) -> str:
    """A text whose colons mean something else, too, with those of loaded names as dots.

    >>> dotted("wifi:4, *.bias:int8; fp32")
    'wifi:4, *.bias:int8; fp32'
    """
    return _SPELLED.sub(lambda found: _dotted(found) if found[0] in loaded else found[0], text)


def _dotted(found: re.Match[str]) -> str:
    return f"{found[2]}.{found[3]}"


def build(kind: str, name: str, words: Iterable[str], made: Callable[..., T]) -> T:
    """`made` of the arguments `words`: numbers where they are spelled so. ConfigError."""
    try:
        return made(*map(_value, words))
    except EdgetrainError:
        raise
    except Exception as error:
        raise ConfigError(f"{kind} '{name}({', '.join(words)})': {quoted(error)}") from error


def _value(word: str) -> int | float | str:
    for cls in (int, float):
        try:
            return cls(word)
        except ValueError:
            continue
    return word.strip("'\"")


def mark(text: str) -> str:
    """What the digest of a job ends with, whose values are these: a digest of the code of all
    extensions that it names; "": it names none."""
    said = [n for n in loaded if re.search(rf"(?<![\w.-]){re.escape(n)}(?![\w.-])", text)]
    codes = " ".join(f"{name} {loaded[name].digest}" for name in sorted(said))
    return f"+{hashlib.sha256(codes.encode()).hexdigest()[:16]}" if said else ""


# -- loaded --------------------------------------------------------------------------------------


def load(text: str, beside: Path | None, open_bundle: Callable[[str], Path] | None = None) -> None:
    """Import all that a job spells as `module:object` in this text: from the folder `beside`, from
    installed packages that have a group of `GROUPS`, or from what `open_bundle` makes of a bundle's
    path. ConfigError."""
    for found in _SPELLED.finditer(text):
        path = found[1]
        if found[0] in loaded and not path:
            continue
        if path and open_bundle is None:
            raise ConfigError(f"'{found[0]}': no bundle can be named here", "name module:object")
        within = open_bundle(path) if path and open_bundle is not None else None
        _load(found, beside, within)


def _load(found: re.Match[str], beside: Path | None, within: Path | None = None) -> None:
    from edgetrain.extensions.modules import attribute_of, module_of

    module = module_of("extension", found[0], found[2], beside, within)
    made = attribute_of(module, found[3])
    for key in (found[0], _dotted(found)):
        _keep(key, made, module)
    _load_outer(made, beside, within)


def _load_outer(made: Any, beside: Path | None, within: Path | None = None) -> None:
    """The outer rule that a strategy's row names comes from where the row does."""
    outer = getattr(made, "outer", "")
    for found in _SPELLED.finditer(outer if isinstance(outer, str) else ""):
        _load(found, beside, within)


def _keep(name: str, made: Any, module: ModuleType) -> None:
    # Of the file of a module, or of all modules in the package that it is in
    top = sys.modules[module.__name__.partition(".")[0]]
    folder = Path(str(top.__file__)).parent
    files = sorted(folder.rglob("*.py")) if hasattr(top, "__path__") else [Path(str(top.__file__))]
    code = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        code.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    loaded[name] = Extension(made, module, code.hexdigest()[:16])
