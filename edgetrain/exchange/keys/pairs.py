"""Key pairs, and keys as text."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgetrain.errors import ConfigError

KEY_BYTES = 32

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
"""The names that devices may have."""


Public = bytes
"""The 32 bytes of a public key."""


@dataclass(frozen=True)
class Pair:
    """A key pair; only the public half can be seen."""

    public: Public
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Credentials:
    """With what a member joins: its own pair, and the one hub that it takes for genuine."""

    pair: Pair
    hub: Public


MakePair = Callable[[], Pair]


def spell(key: bytes) -> str:
    """43 characters of a key; `read_key` reads them."""
    return base64.urlsafe_b64encode(key).decode().rstrip("=")


def short(key: bytes) -> str:
    """Enough of a public key to tell it from others in a log."""
    return spell(key)[:8]


def read_key(text: str, what: str = "key") -> bytes:
    """The bytes of a spelled key; ConfigError, which does not repeat the text."""
    key = _bytes(text.strip())
    if len(key) != KEY_BYTES:
        raise ConfigError(f"this is no {what}: 43 letters, digits, '-' and '_' are needed")
    return key


def _bytes(text: str) -> bytes:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        return b""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return b""


def public_key(text: str) -> Public:
    """A public key, spelled or in a file (this machine's `key`, or one line)."""
    path = Path(text).expanduser()
    if NAME.match(text) and len(text) == 43 and not path.is_file():
        return read_key(text, "public key")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"'{text}' is neither a public key nor a file with one",
            "`edgetrain keys init` on the hub's machine prints it",
        ) from None
    for line in lines:
        word = line.split("#")[0].removeprefix("public").strip()
        if word:
            return read_key(word, f"public key in {text}")
    raise ConfigError(f"no public key in {text}")
