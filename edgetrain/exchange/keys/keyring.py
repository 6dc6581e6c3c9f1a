"""Keys: a machine's own pair, the devices that its hub admits, one-time tokens for new ones.

Files and decisions; the sockets of exchange/zeromq/ do the cryptography. A folder and a file in it
that others can change are refused, as OpenSSH refuses them. A folder holds

    key         this machine's pair: the public key, then the secret one   (mode 0600)
    members     devices that may join a hub here: a public key and a name a line; read again when
                it changes
    tokens      enrolment tokens and their states, as public keys          (mode 0600)
    hubs        hubs that this machine knows: an address and a public key a line
    hosts       SSH host keys of devices that may join: a name, a kind and a public key a line

A key is 32 bytes (Curve25519), written as 43 characters of base64url. No repr, message or log
contains a secret.

A token is a key pair. Its secret half is given to a new device, which connects to the hub with it
and sends its own public key. In the file `tokens` it has a state:

    state    event                   next      effect
    (none)   issue                   open
    open     redeem                  used      the device's key is on the list
    used     redeem, the same key    used      none: the device has not heard the first answer
    used     redeem, another key     used      refused
    any      its name is revoked     closed    the name's key is off the list
    any      issue, the same name    closed    a name has one token that counts: the newest
    closed   redeem                  closed    refused
    any      its time is over        the same  cannot be redeemed
    any      issue, time is over     (none)    its line is removed

So a name is all that its owner needs to know to lock a device out, or a card that was lost.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgetrain.errors import ConfigError, did_you_mean, explain_os_errors
from edgetrain.exchange.keys.host_keys import read_host_key
from edgetrain.exchange.keys.pairs import (
    KEY_BYTES,
    NAME,
    MakePair,
    Pair,
    Public,
    decode_base64url,
    read_key,
    short,
    spell,
)
from edgetrain.files.reading import OTHERS_READ, check_guarded, read_guarded
from edgetrain.files.writing import replacing

TOKEN = "edgetrain-"  # noqa: S105  a prefix
"""The beginning of a token; the hub's public key and the token's own secret key follow."""

MOST_BYTES = 64 << 20
"""Largest size of each file: half a million devices."""

TOKEN_MINUTES = 60
"""Time until a token expires."""

LOOK_S = 0.25
"""Seconds after which a change to the files is noticed, at most."""

NO_SUCH_TOKEN = "no such enrolment token"  # noqa: S105  a reason


class Keyring:
    """The folder of keys of one machine. Its methods raise ConfigError for files that cannot be
    read or written, or are damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        return (self.path / "key").exists()

    def pair(self) -> Pair:
        """This machine's pair. ConfigError if there is none, or others have access to it."""
        path = self.path / "key"
        try:
            lines = read_guarded(path, MOST_BYTES, OTHERS_READ).split()
        except FileNotFoundError:
            raise ConfigError(
                f"this machine has no keys in {self.path}", "make them with `edgetrain keys init`"
            ) from None
        words = dict(zip(lines[::2], lines[1::2], strict=False))
        if set(words) != {"public", "secret"}:
            raise ConfigError(f"{path} does not hold a key pair")
        return Pair(
            read_key(words["public"], f"the public key in {path}"),
            read_key(words["secret"], f"the secret key in {path}"),
        )

    def init(self, make: MakePair, *, replace: bool = False) -> Pair:
        """Make a pair and write it. Raises ConfigError if there is one, unless `replace`."""
        if self.exists and not replace:
            raise ConfigError(
                f"this machine has keys in {self.path} already",
                "--replace makes new ones; then give the new public key to every hub and member",
            )
        made = make()
        text = f"public {spell(made.public)}\nsecret {spell(made.secret)}\n"
        self.write("key", text, 0o600)
        return made

    # -- devices that a hub here admits -------------------------------------------------------

    def members(self) -> dict[Public, str]:
        """The names of devices that may join, by public key."""
        return {
            read_key(key, f"the public key in {self.path / 'members'}"): name
            for key, name in self._lines("members", 2)
        }

    def allow(self, key: Public, name: str, *, replace: bool = False) -> None:
        """Put a device on the list. Raises ConfigError if another key has the name, unless
        `replace`: then that one is taken off."""
        _check_name(name)
        with self.locked():
            known = self.members()
            taken = [k for k, n in known.items() if n == name and k != key]
            if taken and not replace:
                raise ConfigError(
                    f"a device named '{name}' is on the list already, with key {short(taken[0])}…",
                    f"edgetrain keys revoke {name}",
                )
            kept = {k: n for k, n in known.items() if k not in taken}
            self._write_members(kept | {key: name})

    def revoke(self, who: str) -> Revoked:
        """Lock a device out, by its name or key: its key is taken off the list, so that a running
        hub drops it at once, and the tokens for its name are closed. For a name without a key there
        may be tokens alone: those of a card that was lost before its first boot.

        Raises ConfigError if there is neither a key nor an open token.
        """
        with self.locked():
            known = self.members()
            keys = tuple(k for k, n in known.items() if who in (n, spell(k)))
            name = known[keys[0]] if keys else who
            if keys:  # first, so that no damage to the other files keeps a key on the list
                self._write_members({k: n for k, n in known.items() if k not in keys})
            tokens = self._tokens()
            opened = [t.name for t in tokens if t.state == "open"]
            if not keys and name not in opened:
                raise ConfigError(
                    f"there is no device '{who}' on the list, and no open token for it",
                    did_you_mean(who, {*known.values(), *opened}),
                )
            if tokens:
                self._write_tokens(_closed(tokens, name))
            self._write_hosts(self.hosts() | {name: ""})
        return Revoked(name, keys, opened.count(name))

    def hosts(self) -> dict[str, str]:
        """The SSH host keys of devices that sent one when they enrolled, by name."""
        where = f"a host key in {self.path / 'hosts'}"
        return {
            name: read_host_key(f"{kind} {key}", where)
            for name, kind, key in self._lines("hosts", 3)
        }

    def _write_hosts(self, known: Mapping[str, str]) -> None:
        """Those whose key is "" are left out; no file is made for none."""
        lines = [f"{name} {key}\n" for name, key in known.items() if key]
        if lines or (self.path / "hosts").exists():
            self.write("hosts", "".join(lines), 0o644)

    def _write_members(self, known: dict[Public, str]) -> None:
        lines = [f"{spell(key)} {name}\n" for key, name in known.items()]
        self.write("members", "".join(lines), 0o644)

    # -- tokens -------------------------------------------------------------------------------

    def issue_token(
        self, name: str, make: MakePair, now: float, minutes: float = TOKEN_MINUTES
    ) -> str:
        """A one-time token that puts a device on the list as `name`. `now`: seconds since 1970.

        It is a secret: until it expires, the first device that presents it gets the name. Older
        tokens for the name are closed. Raises ConfigError if a device has the name, or this machine
        has no pair.
        """
        _check_name(name)
        token, public = self.draw_token(make)
        self.open_token(name, public, now, minutes)
        return token

    def draw_token(self, make: MakePair) -> tuple[str, Public]:
        """A token that `open_token` makes usable, and its public half. Writes nothing."""
        own, made = self.pair(), make()
        packed = base64.urlsafe_b64encode(own.public + made.secret).decode().rstrip("=")
        return TOKEN + packed, made.public

    def open_token(self, name: str, token: Public, now: float, minutes: float) -> None:
        """From now on a token puts a device on the list as `name`; see `issue_token`."""
        _check_name(name)
        if name in self.members().values():
            raise ConfigError(
                f"a device named '{name}' is on the list already", f"edgetrain keys revoke {name}"
            )
        with self.locked():
            kept = [t for t in self._tokens() if t.expires > now]
            self._write_tokens(
                [*_closed(kept, name), _Token(token, name, now + 60 * minutes, "open")]
            )

    def redeem_token(self, token: Public, key: Public, now: float, host_key: str = "") -> str:
        """Use a token up, and put the device's key on the list. Returns the device's name, also if
        this key has used the token before and is still on the list.

        `host_key`: the device's SSH host key, as `read_host_key` returns it, which is kept. A token
        that was used before changes none: who finds it then cannot pass for the device.

        Raises ConfigError, which says why the token or the name cannot be used.
        """
        with self.locked():
            tokens, known = self._tokens(), self.members()
            found = next((t for t in tokens if t.public == token), None)
            refused = _why_not(found, now, used_by=known.get(key))
            if found is None or refused:
                raise ConfigError(refused)
            others = [n for k, n in known.items() if n == found.name and k != key]
            if others:
                raise ConfigError(f"a device named '{found.name}' is on the list already")
            if found.state == "open":
                self._write_hosts(self.hosts() | {found.name: host_key})
            # The list first: if the power fails in between, the device may show the token again.
            self._write_members(known | {key: found.name})
            self._write_tokens([replace(t, state="used") if t is found else t for t in tokens])
        return found.name

    def why_no_token(self, token: Public, now: float) -> str:
        """Why no device can redeem a token, NO_SUCH_TOKEN for one that was never issued; or "".
        One that was used may be shown again by its device, as long as that is on the list."""
        found = next((t for t in self._tokens() if t.public == token), None)
        used_by = found.name if found is not None and found.name in self.members().values() else ""
        return _why_not(found, now, used_by)

    def open_tokens(self, now: float) -> list[tuple[str, float]]:
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
        where = f"the public key in {self.path / 'hubs'}"
        lines = self._lines("hubs", 2)
        if not all("://" in address for address, _ in lines):
            # Not repeated: a copy of the file `key` has two words a line as well.
            raise ConfigError(f"{self.path / 'hubs'} does not hold addresses of hubs")
        return {address: read_key(key, where) for address, key in lines}

    def hub_key(self, address: str) -> Public | None:
        return self.hubs().get(address)

    def pin_hubs(self, pins: Mapping[str, Public | None]) -> None:
        """From now on accept the hubs at these addresses only with these keys; None: the key of the
        hub there is not known."""
        with self.locked():
            known = {a: k for a, k in (self.hubs() | dict(pins)).items() if k is not None}
            self.write("hubs", "".join(f"{a} {spell(k)}\n" for a, k in known.items()), 0o644)

    # -- files --------------------------------------------------------------------------------

    def _lines(self, name: str, words: int) -> list[tuple[str, ...]]:
        """The lines of a file, in words, without comments; [] if there is no such file."""
        try:
            text = read_guarded(self.path / name, MOST_BYTES)
        except FileNotFoundError:
            return []
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        for number, line in enumerate(lines, 1):
            if line and len(line) != words:
                where = f"{self.path / name}, line {number}"
                raise ConfigError(f"{where}: {words} words are needed, not {len(line)}")
        return [tuple(line) for line in lines if line]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other writers, in this process and others, for the length of a `with` block."""
        self._make_folder()
        path = self.path / ".lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        with explain_os_errors(f"cannot open {path}"):
            file = os.open(path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _make_folder(self) -> None:
        with explain_os_errors(f"cannot create {self.path}"):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_guarded(self.path)

    def write(self, name: str, text: str, mode: int) -> None:
        """Replace a file in one step, by one that is at no moment readable beyond `mode`."""
        self._make_folder()
        path = self.path / name
        with explain_os_errors(f"cannot write {path}"), replacing(path, mode=mode) as file:
            os.fchmod(file.fileno(), mode)
            file.write(text.encode())


@dataclass(frozen=True)
class Revoked:
    """The keys and tokens closed by `Keyring.revoke`."""

    name: str
    keys: tuple[Public, ...]
    """Taken off the list: one, or none if there were only tokens; several of one name can stand in
    a list that was written by hand."""
    tokens: int
    """Tokens that were open."""


@dataclass(frozen=True)
class _Token:
    """One line of the file `tokens`."""

    public: Public
    name: str
    expires: float
    """Seconds since 1970."""
    state: str
    """"open", "used" or "closed"."""


def _closed(tokens: Sequence[_Token], name: str) -> list[_Token]:
    """These tokens, those for `name` closed."""
    return [replace(t, state="closed") if t.name == name else t for t in tokens]


def _why_not(token: _Token | None, now: float, used_by: str | None = None) -> str:
    """Why a token cannot be redeemed, or "". `used_by`: the name of the device that shows it."""
    if token is None:
        return NO_SUCH_TOKEN
    if token.state == "closed":
        return f"the enrolment token for '{token.name}' was revoked, or replaced by a newer one"
    if token.state != "open" and token.name != used_by:
        return f"the enrolment token for '{token.name}' was used before"
    if token.expires <= now:
        return f"the enrolment token for '{token.name}' has expired"
    return ""


def _check_name(name: str) -> None:
    if not NAME.match(name):
        raise ConfigError(
            f"'{name}' cannot be a device's name",
            "a name has letters, digits, '.', '_' and '-', at most 64, and begins with a letter or "
            "a digit",
        )


def read_token(token: str) -> tuple[Public, bytes]:
    """(the hub's public key, the token's secret key). Raises ConfigError."""
    packed = decode_base64url(token.strip().removeprefix(TOKEN))
    if not token.strip().startswith(TOKEN) or len(packed) != 2 * KEY_BYTES:
        raise ConfigError(
            "this is not an enrolment token", "`edgetrain keys enroll NAME` at the hub prints one"
        )
    return packed[:KEY_BYTES], packed[KEY_BYTES:]
