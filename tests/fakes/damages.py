"""Damage to a folder of files, drawn at random: what disks, programs and people do to them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ESCAPES = ("\x1b[31mred", "\x1b]0;title\x07", "a\rb", "\x9b2J", "\x00", "\u202eabc", "\x7f")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, -1e308, 10**400, 2**63, 0.5, "", "x" * 5000, [], [[]], {}, {"a": 1},
    [None], ["m0", 3], *ESCAPES,
)  # fmt: skip

Damage = Callable[[random.Random, Path], None]


def everything(folder: Path) -> dict[str, object]:
    """What is in a folder: the bytes of files, what else there is, and permissions."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24
        found[path.relative_to(folder).as_posix()] = mode, path.read_bytes() if plain else None
    return found


def truncated(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def flipped(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 3, 30])):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zeroed(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content) + 1)
    content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    path.write_bytes(content)


def followed_by_junk(rng: random.Random, path: Path) -> None:
    junk = (rng.randbytes(rng.randrange(1, 400)), b"\x00" * 600, "".join(ESCAPES).encode())
    path.write_bytes(path.read_bytes() + rng.choice(junk))


def replaced_by_junk(rng: random.Random, path: Path) -> None:
    junk = (rng.randbytes(300), b"", b"[" * 50_000, b"null", b'"text"', b"\xff\xfe\x00", b"\n\n\n")
    path.write_bytes(rng.choice(junk))


def taken_from_another(rng: random.Random, path: Path) -> None:
    others = [other for other in _files_in(path.parent) if other != path]
    if others:
        shutil.copyfile(rng.choice(sorted(others)), path)


def removed(rng: random.Random, path: Path) -> None:
    path.unlink()


def made_a_folder(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_fifo(rng: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def made_a_link(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice(["/dev/zero", "/dev/full", path.name, "nowhere", "/"]))


def made_endless(rng: random.Random, path: Path) -> None:
    os.truncate(path, 1 << 40)


ANY: tuple[Damage, ...] = (
    truncated, flipped, zeroed, followed_by_junk, replaced_by_junk, taken_from_another, removed,
    made_a_folder, made_a_fifo, made_a_link, made_endless,
)  # fmt: skip


def _with_odd_value(rng: random.Random, value: Any) -> Any:
    """A copy with another value somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {each: value[each] for each in value if each != key}
        return {**value, key: _with_odd_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], _with_odd_value(rng, value[place]), *value[place + 1 :]]
    return rng.choice(ODD)


def odd_json(rng: random.Random, path: Path) -> None:
    """Well-formed, and not what is expected: a summary, or lines of metrics."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    for _ in range(rng.choice([1, 3, 20]) if path.suffix == ".jsonl" else 1):
        place = rng.randrange(len(lines))
        changed = _with_odd_value(rng, json.loads(lines[place]))
        lines[place] = json.dumps(changed, separators=(",", ":"), allow_nan=True)
    path.write_text("\n".join(lines) + "\n")


def odd_toml(rng: random.Random, path: Path) -> None:
    lines = path.read_text().splitlines()
    places = [number for number, line in enumerate(lines) if " = " in line]
    place = rng.choice(places)
    odd = (
        '"\\u001b[31m"', "-1", "1e400", "nan", "[]", "{}", "true", "9" * 400, '""', "1979-05-27",
        "[[1]]", '"' + "x" * 20_000 + '"',
    )  # fmt: skip
    key = lines[place].partition(" = ")[0]
    lines[place] = f"{key} = {rng.choice(odd)}"
    if rng.random() < 0.2:  # a table becomes a value, or a value a table
        lines.insert(0, f"{rng.choice(['fleet', 'train', 'strategy', 'hub', 'task'])} = 3")
    path.write_text("\n".join(lines) + "\n")


def damages_of(path: Path) -> tuple[Damage, ...]:
    """What can happen to a file, by its kind."""
    own = {".json": odd_json, ".jsonl": odd_json, ".toml": odd_toml}.get(path.suffix)
    return ANY if own is None else (*ANY, *[own] * len(ANY))


def _files_in(folder: Path) -> list[Path]:
    """Those that have not been made something else, or endless."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()]
    return [path for path in files if path.stat().st_size < 1 << 24]


def damage(rng: random.Random, folder: Path, most: int = 2) -> str:
    """Damage some files of a folder; in words, what was done."""
    said = []
    for _ in range(rng.randint(1, most)):
        files = _files_in(folder)
        if not files:
            break
        path = rng.choice(files)
        options = damages_of(path)
        chosen = rng.choice(options)
        try:
            chosen(rng, path)
        except (ValueError, IndexError, AttributeError):  # a second one of what is no JSON any more
            continue
        said.append(f"{path.relative_to(folder)} {chosen.__name__}")
    return ", ".join(said)
