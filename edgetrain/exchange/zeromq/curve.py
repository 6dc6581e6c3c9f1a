"""Fresh CURVE key pairs."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from edgetrain.exchange.keys.pairs import Pair, spell


def new_pair() -> Pair:
    """A fresh Curve25519 key pair; its public key, spelled, does not begin with "-" (an option)."""
    while True:
        public, secret = zmq.curve_keypair()
        pair = Pair(z85.decode(public), z85.decode(secret))
        if not spell(pair.public).startswith("-"):
            return pair


def pair_of(secret: bytes) -> Pair:
    """The pair that a secret key belongs to."""
    return Pair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)
