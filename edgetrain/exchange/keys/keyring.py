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
import binascii
import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgetrain.errors import ConfigError, NetworkError, Refused, did_you_mean

KEY_BYTES = 32
TOKEN = "edgetrain-"  # noqa: S105  a prefix
"""A token begins so; the hub's public key and a secret key of its own follow."""

TOKEN_MINUTES = 60
LOOK_S = 0.25
"""A change to the files is seen after so long at most."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")

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


def folder(chosen: str | Path | None = None) -> Path:
    """The folder of keys: the one chosen, else edgetrain's in the user's configuration."""
    if chosen is not None:
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "edgetrain"


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
    if _NAME.match(text) and len(text) == 43 and not path.is_file():
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
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123  a descriptor
                os.fchmod(file.fileno(), mode)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path / name)
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
    if not _NAME.match(name):
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


def credentials(
    hub: str,
    hub_key: str | None = None,
    chosen: str | Path | None = None,
    *,
    insecure: bool = False,
) -> Credentials | None:
    """With what to join the hub at an address; None: without encryption.

    `hub_key`: the hub's public key or a file with it; else the one that enrolment pinned. `chosen`:
    the folder of this machine's keys. Off this machine nothing travels in the clear unless it is
    said to be `insecure`. Raises ConfigError.
    """
    from edgetrain.exchange.addresses import is_local_name
    from edgetrain.exchange.zeromq.frames import split_address

    if insecure:
        return None
    ring = Keyring(folder(chosen))
    key = public_key(hub_key) if hub_key else ring.hub(hub)
    if key is not None:
        return Credentials(ring.pair(), key)
    if is_local_name(split_address(hub)[0]) and chosen is None:
        return None
    raise ConfigError(
        f"the key of the hub at {hub} is not known here",
        "enrol with a token (edgetrain keys enroll --hub … --token …), give its key (--hub-key, "
        "hub_key=), or, inside a network you trust, --insecure (insecure=True)",
    )


# -- at the hub's door ----------------------------------------------------------------------------

ENROL = b"E"
"""Kind of the one message of an enrolment, and of its answer."""


class Gate:
    """Whom a hub lets in: asked for each new connection, and again for what it sends.

    It reads the folder again when a file in it has changed. `wall` is the time of day: tokens
    expire by it. A damaged file lets nobody new in, and says so.
    """

    def __init__(
        self,
        ring: Keyring,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.pair = ring.pair()
        self._ring, self._clock, self._wall = ring, clock, wall
        self._members = ring.members()
        self._stamp = self._stamps()
        self._looked = clock()

    def admit(self, key: Public) -> tuple[str, str]:
        """(identity, "") of who has proved to hold this key, or ("", why not)."""
        try:
            self._look()
            name = self._members.get(key)
            if name is not None:
                return f"member {spell(key)}", ""
            refused = self._ring.why_no_token(key, self._wall())
        except ConfigError as error:
            return "", f"the list cannot be read: {error}"
        if not refused:
            return f"token {spell(key)}", ""
        if refused.startswith("no such"):
            return "", f"key {short(key)}… is not on the list"
        return "", refused

    def knows(self, identity: str) -> bool:
        """Whether what admitted this identity still holds: a key may have been revoked since."""
        kind, _, spelled = identity.partition(" ")
        if kind == "token":
            return True  # judged when it is redeemed
        with contextlib.suppress(ConfigError):  # a damaged list is told of at the next connection
            self._look()
        return kind == "member" and _bytes(spelled) in self._members

    def enrol(self, identity: str, frames: Sequence[bytes]) -> tuple[list[bytes], str]:
        """The answer to a device that came with a token, and what is to be logged of it."""
        kind, _, spelled = identity.partition(" ")
        if kind != "token" or len(frames) != 2 or frames[0] != ENROL or len(frames[1]) != KEY_BYTES:
            return [ENROL, b"no", b"this is no enrolment"], "a token's holder sent no enrolment"
        try:
            name = self._ring.redeem(_bytes(spelled), frames[1], self._wall())
        except ConfigError as error:
            return [ENROL, b"no", error.message.encode()], error.message
        return [ENROL, b"ok", name.encode()], ""

    def _look(self) -> None:
        if self._clock() - self._looked < LOOK_S:
            return
        self._looked = self._clock()
        stamp = self._stamps()
        if stamp != self._stamp:
            self._members = self._ring.members()
            self._stamp = stamp  # only now: a damaged list is looked at again

    def _stamps(self) -> tuple[int, ...]:
        try:
            found = (self._ring.path / "members").stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ino, found.st_size


def enrolled(frames: Sequence[bytes] | None) -> str:
    """The name in a hub's answer to an enrolment. Raises Refused with its reason, NetworkError."""
    if frames is None:
        raise NetworkError("the hub did not answer the enrolment", "is it the hub of this token?")
    if len(frames) != 3 or frames[0] != ENROL or len(frames[2]) > 512:
        raise NetworkError("the hub answered something that is no enrolment")
    text = bytes(frames[2]).decode(errors="replace")
    if frames[1] != b"ok":
        raise Refused("token", f"the hub refused: {text}", "ask its owner for a new token")
    return text
