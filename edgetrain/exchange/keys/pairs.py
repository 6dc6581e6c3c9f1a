"""Key pairs, and keys as text."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.files.reading import read_bytes

KEY_BYTES = 32
"""Length of a public key, and of a secret one (Curve25519)."""

MOST_BYTES = 1 << 16
"""Largest size of a file with a public key."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
"""The names that devices may have."""

Public = bytes
"""The 32 bytes of a public key."""


@dataclass(frozen=True)
class Pair:
    """A key pair; its repr shows only the public half."""

    public: Public
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Credentials:
    """What a member needs to join an encrypted hub: its own pair, and the public key of the one hub
    that it accepts."""

    pair: Pair
    hub: Public


MakePair = Callable[[], Pair]


def keys_folder(chosen: str | Path | None = None) -> Path:
    """The folder of keys: the chosen one, otherwise edgetrain's in the user's configuration."""
    if chosen is not None:
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "edgetrain"


def spell(key: bytes) -> str:
    """43 characters for a key; `read_key` reads them."""
    return base64.urlsafe_b64encode(key).decode().rstrip("=")


def short(key: bytes) -> str:
    """The first 8 characters of a public key: enough to tell it from others in a log."""
    return spell(key)[:8]


def read_key(text: str, what: str = "this text") -> bytes:
    """The 32 bytes of a spelled key. Raises ConfigError, which says `what` is wrong."""
    key = decode_base64url(text.strip())
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{what} is not a key: a key has 43 letters, digits, '-' and '_'")
    return key


def decode_base64url(text: str) -> bytes:
    """The bytes that unpadded base64url text stands for; b"" if it is not such text."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        return b""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return b""


def public_key(text: str) -> Public:
    """A public key: spelled, or in a file (a machine's `key`, or one line). Raises ConfigError."""
    path = Path(text).expanduser()
    if len(decode_base64url(text)) == KEY_BYTES and not path.is_file():
        return read_key(text)
    try:
        lines = read_bytes(path, MOST_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError, ConfigError):
        raise ConfigError(
            f"'{text}' is neither a public key nor a file with one",
            "`edgetrain keys init` on the hub's machine prints it",
        ) from None
    for line in lines:
        word = line.split("#")[0].removeprefix("public").strip()
        if word:
            return read_key(word, f"the public key in {text}")
    raise ConfigError(f"no public key in {text}")
