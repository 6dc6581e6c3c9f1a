"""Fresh CURVE key pairs."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from edgetrain.exchange.keys.pairs import Pair


def new_pair() -> Pair:
    """A fresh Curve25519 key pair, drawn by libzmq (libsodium)."""
    public, secret = zmq.curve_keypair()
    return Pair(z85.decode(public), z85.decode(secret))


def pair_of(secret: bytes) -> Pair:
    """The pair that a secret key belongs to."""
    return Pair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)
