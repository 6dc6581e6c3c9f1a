"""Keys: a machine's own pair, whom its hub lets in, one-time tokens for those to come.

Files and decisions; sockets, and the cryptography in them, are `sockets`' business. A folder holds

    key         this machine's pair: the public key, then the secret one   (mode 0600)
    members     who may join a hub here: a public key and a name a line; read again when it changes
    tokens      open and used enrolment tokens, as public keys             (mode 0600)
    hubs        hubs that this machine knows: an address and a public key a line

A key is 32 bytes (Curve25519); people and files spell it in 43 characters of base64url. Secrets are
in no repr, no message and no log.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.exchange.files import replacing, write_all
from edgetrain.exchange.keys.pairs import (
    KEY_BYTES,
    NAME,
    MakePair,
    Pair,
    Public,
    _bytes,
    read_key,
    short,
    spell,
)

TOKEN = "edgetrain-"  # noqa: S105  a prefix
"""A token begins so; the hub's public key and a secret key of its own follow."""

TOKEN_MINUTES = 60
LOOK_S = 0.25
"""A change to the files is seen after so long at most."""


def folder(chosen: str | Path | None = None) -> Path:
    """The folder of keys: the one chosen, else edgetrain's in the user's configuration."""
    if chosen is not None:
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "edgetrain"


class Keyring:
    """The folder of keys of one machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether this machine has a pair."""
        return (self.path / "key").exists()

    def pair(self) -> Pair:
        """This machine's pair; ConfigError where there is none, or others can read it."""
        path = self.path / "key"
        try:
            mode = path.stat().st_mode
            lines = path.read_text(encoding="utf-8").split()
        except FileNotFoundError:
            raise ConfigError(
                f"this machine has no keys in {self.path}", "make them with `edgetrain keys init`"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {_said(error)}") from None
        if mode & 0o077:
            raise ConfigError(f"{path} can be read by others", f"chmod 600 {path}")
        words = dict(zip(lines[::2], lines[1::2], strict=False))
        if set(words) != {"public", "secret"}:
            raise ConfigError(f"{path} holds no key pair")
        return Pair(
            read_key(words["public"], f"public key in {path}"),
            read_key(words["secret"], f"secret key in {path}"),
        )

    def init(self, make: MakePair, *, replace: bool = False) -> Pair:
        """A new pair in the folder. ConfigError if there is one, unless it is to be replaced."""
        if self.exists and not replace:
            raise ConfigError(
                f"this machine has keys in {self.path} already",
                "--replace makes new ones; every hub and member then has to be told",
            )
        made = make()
        text = f"public {spell(made.public)}\nsecret {spell(made.secret)}\n"
        self.write("key", text, 0o600)
        return made

    # -- whom a hub here lets in --------------------------------------------------------------

    def members(self) -> dict[Public, str]:
        """Public key -> name, of those that may join."""
        return {
            read_key(key, f"public key in {self.path / 'members'}"): name
            for key, name in self._lines("members", 2)
        }

    def allow(self, key: Public, name: str) -> None:
        """Let a device in from now on, under a name that nobody else has."""
        _check_name(name)
        with self.locked():
            known = self.members()
            taken = [k for k, n in known.items() if n == name and k != key]
            if taken:
                raise ConfigError(
                    f"a device named '{name}' is on the list already, with key {short(taken[0])}…",
                    f"edgetrain keys revoke {name}",
                )
            self._write_members(known | {key: name})

    def revoke(self, who: str) -> tuple[Public, str]:
        """Take a device off the list, by its name or key; a hub that runs drops it at once."""
        with self.locked():
            known = self.members()
            found = [(k, n) for k, n in known.items() if who in (n, spell(k))]
            if not found:
                raise ConfigError(
                    f"no device '{who}' on the list", did_you_mean(who, known.values())
                )
            self._write_members({k: n for k, n in known.items() if k != found[0][0]})
        return found[0]

    def _write_members(self, known: dict[Public, str]) -> None:
        lines = [f"{spell(key)} {name}\n" for key, name in known.items()]
        self.write("members", "".join(lines), 0o644)

    # -- tokens -------------------------------------------------------------------------------

    def issue(self, name: str, make: MakePair, now: float, minutes: float = TOKEN_MINUTES) -> str:
        """A one-time token for a device that is to be let in as `name`. It is a secret: who has it
        can be that device once, until it expires. `now`: seconds since 1970."""
        _check_name(name)
        own = self.pair()
        if name in self.members().values():
            raise ConfigError(
                f"a device named '{name}' is on the list already", f"edgetrain keys revoke {name}"
            )
        made = make()
        with self.locked():
            kept = [t for t in self._tokens() if t.expires > now]
            self._write_tokens([*kept, _Token(made.public, name, now + 60 * minutes, "open")])
        packed = base64.urlsafe_b64encode(own.public + made.secret).decode().rstrip("=")
        return TOKEN + packed

    def redeem(self, token: Public, key: Public, now: float) -> str:
        """Put a device's key on the list for its token, once. Returns its name; Refused in words
        is a ConfigError, which says why not."""
        with self.locked():
            tokens = self._tokens()
            found = next((t for t in tokens if t.public == token), None)
            refused = _why_not(found, now)
            if found is None or refused:
                raise ConfigError(refused)
            known = self.members()
            others = [n for k, n in known.items() if n == found.name and k != key]
            if others:
                raise ConfigError(f"a device named '{found.name}' is on the list already")
            used = _Token(token, found.name, found.expires, "used")
            self._write_tokens([used if t is found else t for t in tokens])
            self._write_members(known | {key: found.name})
        return found.name

    def why_no_token(self, token: Public, now: float) -> str:
        """What is wrong with a token, or "" if it can be redeemed."""
        return _why_not(next((t for t in self._tokens() if t.public == token), None), now)

    def tokens(self, now: float) -> list[tuple[str, float]]:
        """(name, seconds left) of the tokens that can be redeemed."""
        return [(t.name, t.expires - now) for t in self._tokens() if not _why_not(t, now)]

    def _tokens(self) -> list[_Token]:
        found = []
        for key, name, expires, state in self._lines("tokens", 4):
            if re.fullmatch(r"\d+", expires):
                found.append(_Token(read_key(key), name, float(expires), state))
        return found

    def _write_tokens(self, tokens: Sequence[_Token]) -> None:
        lines = [f"{spell(t.public)} {t.name} {t.expires:.0f} {t.state}\n" for t in tokens]
        self.write("tokens", "".join(lines), 0o600)

    # -- hubs that this machine knows ---------------------------------------------------------

    def hubs(self) -> dict[str, Public]:
        """Address -> pinned public key."""
        where = f"public key in {self.path / 'hubs'}"
        return {address: read_key(key, where) for address, key in self._lines("hubs", 2)}

    def hub(self, address: str) -> Public | None:
        """The pinned key of the hub at an address, or None."""
        return self.hubs().get(address)

    def pin(self, address: str, key: Public) -> None:
        """Take the hub at an address for genuine only with this key from now on."""
        with self.locked():
            lines = [f"{a} {spell(k)}\n" for a, k in (self.hubs() | {address: key}).items()]
            self.write("hubs", "".join(lines), 0o644)

    # -- files --------------------------------------------------------------------------------

    def _lines(self, name: str, words: int) -> list[tuple[str, ...]]:
        try:
            text = (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {self.path / name}: {_said(error)}") from None
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        for number, line in enumerate(lines, 1):
            if line and len(line) != words:
                raise ConfigError(
                    f"{self.path / name}, line {number}: {words} words are needed, not {len(line)}"
                )
        return [tuple(line) for line in lines if line]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One writer at a time, whatever process it is in."""
        self._make()
        with (self.path / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.path}: {_said(error)}") from None

    def write(self, name: str, text: str, mode: int) -> None:
        """The whole file or none of it, and never for a moment readable by more than `mode`."""
        self._make()
        draft = self.path / f".{name}.{os.getpid()}"
        try:
            with replacing(self.path / name, draft, mode) as file:
                os.fchmod(file, mode)
                write_all(file, [text.encode()])
        except OSError as error:
            raise ConfigError(f"cannot write {self.path / name}: {_said(error)}") from None
        finally:
            draft.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Token:
    public: Public
    name: str
    expires: float
    """Seconds since 1970."""
    state: str
    """open or used."""


def _why_not(token: _Token | None, now: float) -> str:
    if token is None:
        return "no such enrolment token"
    if token.state != "open":
        return f"the enrolment token for '{token.name}' was used before"
    if token.expires <= now:
        return f"the enrolment token for '{token.name}' has expired"
    return ""


def _check_name(name: str) -> None:
    if not NAME.match(name):
        raise ConfigError(
            f"'{name}' cannot be a device's name",
            "letters, digits, '.', '_' and '-', at most 64, not beginning with a sign",
        )


def _said(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not text"


def read_token(token: str) -> tuple[Public, bytes]:
    """(the hub's public key, the token's secret key); ConfigError, which does not repeat it."""
    packed = _bytes(token.strip().removeprefix(TOKEN))
    if not token.strip().startswith(TOKEN) or len(packed) != 2 * KEY_BYTES:
        raise ConfigError(
            "this is no enrolment token", "`edgetrain keys enroll NAME` at the hub prints one"
        )
    return packed[:KEY_BYTES], packed[KEY_BYTES:]


# -- at the hub's door ----------------------------------------------------------------------------
