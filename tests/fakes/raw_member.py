"""A member that is written out message by message, over real sockets, without torch."""

from __future__ import annotations

import os
import time

import numpy as np
from patience import patience

from edgetrain.exchange.messages import (
    PROTOCOL,
    Base,
    Contribute,
    Join,
    Leave,
    Message,
    Refuse,
    Reply,
    Start,
    Welcome,
    pack,
    unpack,
)
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.vectors.vector import checksum

PATIENCE_S = patience(90.0)


class RawMember:
    """A member of a job with `strategy=local-sgd local_steps=1 codec=fp32` and one part;
    contributes zeros. Fails with the refusal, or after PATIENCE_S without an answer."""

    def __init__(self, address, credentials=None, name="raw", elements=64):
        self.socket = MemberSocket(address, credentials=credentials)
        self.base = np.zeros(elements, np.float32)
        self.name, self.round = name, 0
        self.session = int.from_bytes(os.urandom(7), "big")

    def until(self, kind: type[Message]) -> Message:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            frames = self.socket.receive(0.1)
            if frames is None:
                continue
            message = unpack(frames)
            assert not isinstance(message, Refuse), message
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {PATIENCE_S:g} s")

    def ask(self):
        """Ask to join, and send the base if that is wanted."""
        join = Join(
            PROTOCOL, "", "raw", self.base.size, self.name, 1.0, checksum(self.base), self.session
        )
        self.socket.send(pack(join))
        if self.until(Welcome).upload:
            self.socket.send(pack(Base(0, 1, self.base.tobytes())))
        return self

    def start(self):
        """Wait until training begins."""
        self.round = self.until(Start).round
        return self

    def contribute(self):
        """Contribute zeros to the next round."""
        zeros = np.zeros_like(self.base).tobytes()
        known = checksum(self.base)
        self.socket.send(pack(Contribute(self.round, 0, 1, 1.0, self.round, known, 0, zeros)))

    def take(self):
        """Wait for the reply to it."""
        while self.until(Reply).round < self.round:
            pass
        self.round += 1

    def leave(self):
        self.socket.send(pack(Leave("done")))
        self.socket.close()


def train(members, rounds):
    """So many rounds, all members in each."""
    for _ in range(rounds):
        for member in members:
            member.contribute()
        for member in members:
            member.take()
