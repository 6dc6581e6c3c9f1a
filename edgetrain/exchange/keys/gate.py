"""Who may pass: keys on the list, and tokens that put a key on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from edgetrain.errors import ConfigError, NetworkError, Refused
from edgetrain.exchange.keys.keyring import LOOK_S, Keyring
from edgetrain.exchange.keys.pairs import (
    KEY_BYTES,
    Public,
    _bytes,
    short,
    spell,
)

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
