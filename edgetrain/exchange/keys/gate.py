"""The gate of a hub: keys on the list may join, and a token puts one key on the list."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from edgetrain.errors import ConfigError, NetworkError, Refused
from edgetrain.exchange.descriptors import reserve
from edgetrain.exchange.keys.host_keys import LONGEST, read_host_key
from edgetrain.exchange.keys.keyring import LOOK_S, NO_SUCH_TOKEN, Keyring
from edgetrain.exchange.keys.pairs import KEY_BYTES, Pair, Public, decode_base64url, short, spell

ENROL = b"E"
"""Kind of the one message of an enrolment, and of its answer."""

LONGEST_ANSWER = 512
"""Bytes of text in a hub's answer."""


class Gatekeeper(Protocol):
    """Decides which connections a socket admits; `Gate`, by a machine's list of keys, is one."""

    pair: Pair

    def admit(self, key: Public) -> tuple[str, str]:
        """(identity, "") of a connection that has proved to hold this key, or ("", why not)."""

    def knows(self, identity: str) -> bool:
        """Whether this identity may still send."""

    def allowed(self) -> Mapping[Public, str]:
        """The names of those that may stay, by key: the same object until that changes."""

    def enrol(self, identity: str, frames: Sequence[bytes]) -> tuple[list[bytes], str]:
        """Redeem a token: the frames of the answer, and what to log."""


class Gate:
    """Decides which connections a hub admits, and again whether it hears their messages.

    A connection that has proved to hold a key gets an identity, "member KEY" or "token KEY"; the
    key is spelled. The gate reads the folder again when the list has changed. `wall` is the time of
    day, by which tokens expire. If a file is damaged, no new connection is admitted, and those that
    are there stay.
    """

    def __init__(
        self,
        ring: Keyring,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        own_name: str = "",
    ) -> None:
        """`own_name`: under which this machine itself may join, with its own key; "": it may not.
        Raises ConfigError if the machine has no pair, or its list is damaged."""
        self.pair = ring.pair()
        self._ring, self._clock, self._wall = ring, clock, wall
        self._own = {self.pair.public: own_name} if own_name else {}
        self._members = self._settled = self._read_list()
        self._stamp = self._list_stamp()
        self._looked = clock()

    def admit(self, key: Public) -> tuple[str, str]:
        """(identity, "") of a connection that has proved to hold this key, or ("", why not)."""
        try:
            self._reread_list()
            name = self._members.get(key)
            if name is not None:
                return f"member {spell(key)}", ""
            with reserve():
                refused = self._ring.why_no_token(key, self._wall())
        except ConfigError as error:
            return "", f"the list cannot be read: {error}"
        if not refused:
            return f"token {spell(key)}", ""
        if refused == NO_SUCH_TOKEN:
            return "", f"key {short(key)}… is not on the list"
        return "", refused

    def knows(self, identity: str) -> bool:
        """Whether this identity may still send: its key may have been revoked since."""
        kind, _, spelled = identity.partition(" ")
        if kind == "token":
            return True  # judged when it is redeemed
        with contextlib.suppress(ConfigError):  # reported at the next new connection
            self._reread_list()
        return kind == "member" and decode_base64url(spelled) in self._members

    def allowed(self) -> Mapping[Public, str]:
        """The names of the devices that may stay, by key: the same object until that changes.

        A list that has changed counts once it is the same at two looks: whoever edits it by hand
        may leave it empty, or half written, for a moment, and a revocation is for good.
        """
        with contextlib.suppress(ConfigError):  # reported at the next new connection
            self._reread_list()
        return self._settled

    def enrol(self, identity: str, frames: Sequence[bytes]) -> tuple[list[bytes], str]:
        """Redeem a token for the device that holds it: its key, and its SSH host key if it sends
        one, are kept. Returns the frames of the answer, and what to log."""
        kind, _, spelled = identity.partition(" ")
        is_one = len(frames) in (2, 3) and frames[0] == ENROL and len(frames[1]) == KEY_BYTES
        if kind != "token" or not is_one:
            return [ENROL, b"no", b"this is not an enrolment"], "a token's holder sent no enrolment"
        try:
            token = decode_base64url(spelled)
            host_key = ""
            if len(frames) == 3:
                text = frames[2][: LONGEST + 1].decode("ascii", "replace")
                host_key = read_host_key(text, "the host key")
            with reserve():
                name = self._ring.redeem_token(token, frames[1], self._wall(), host_key)
        except ConfigError as error:
            return [ENROL, b"no", error.message.encode()], error.message
        return [ENROL, b"ok", name.encode()], ""

    def _reread_list(self) -> None:
        if self._clock() - self._looked < LOOK_S:
            return
        self._looked = self._clock()
        stamp = self._list_stamp()
        if stamp != self._stamp:
            with reserve():
                self._members = self._read_list()
            self._stamp = stamp  # only after it was read: a damaged list is read again
        else:
            self._settled = self._members

    def _read_list(self) -> Mapping[Public, str]:
        return {**self._own, **self._ring.members()}

    def _list_stamp(self) -> tuple[int, ...]:
        try:
            found = (self._ring.path / "members").stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode


def enrolled(frames: Sequence[bytes] | None) -> str:
    """The device's name in a hub's answer to an enrolment. Raises Refused, NetworkError."""
    if frames is None:
        raise NetworkError(
            "the hub did not answer the enrolment", "is it the hub of this token?", passing=True
        )
    if len(frames) != 3 or frames[0] != ENROL or len(frames[2]) > LONGEST_ANSWER:
        raise NetworkError("the hub's answer is not one to an enrolment")
    text = bytes(frames[2]).decode(errors="replace")
    if frames[1] != b"ok":
        raise Refused("token", f"the hub refused: {text}", "ask its owner for a new token")
    return text
