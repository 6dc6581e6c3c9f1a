"""Cryptography that others have built and checked: key agreement, key derivation, keystream and
authenticated encryption of `cryptography`; and Shamir's secret sharing, which it does not have.

The only module that imports this package. It fixes how it is used, and is loaded only if a job is
secure.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
from collections.abc import Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edgetrain.errors import BadPayload
from edgetrain.exchange.keys.pairs import KEY_BYTES
from edgetrain.exchange.masks.fixed_point import Words
from edgetrain.exchange.masks.payloads import SEED_BYTES

_NONCE = bytes(12)
"""Fixed, because every key encrypts one message."""
_TILE_BYTES = 1 << 18


def _derived(secret: bytes, purpose: bytes, context: bytes) -> bytes:
    info = b"edgetrain secure 1 " + purpose + b"\0" + context
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def public_of(seed: bytes, context: bytes) -> bytes:
    """The X25519 public key of the private key that is derived from this seed."""
    return _private(seed, context).public_key().public_bytes_raw()


def _private(seed: bytes, context: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_derived(seed, b"private key", context))


def is_public(key: bytes) -> bool:
    """Whether a key can be agreed on with this public key: not a point of low order."""
    try:
        _private(bytes(SEED_BYTES), b"").exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


def commitment(seed: bytes, context: bytes) -> bytes:
    """A value that is published before the seed is, so that a different seed is noticed."""
    return _derived(seed, b"commitment", context)


def equal(a: bytes, b: bytes) -> bool:
    """Compare in a time that does not depend on where they differ."""
    return hmac.compare_digest(a, b)


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def agreed_key(
    seed: bytes, public: bytes, purpose: bytes, own_context: bytes, context: bytes
) -> bytes:
    """The key that the owner of `seed` shares with the owner of `public`, for one purpose.

    `own_context` is the context with which the private key was derived. Raises BadPayload if
    `public` is not an X25519 public key.
    """
    try:
        shared = _private(seed, own_context).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise BadPayload("a public key of another member is not one of X25519") from None
    return _derived(shared, purpose, context)


def own_key(seed: bytes, context: bytes) -> bytes:
    return _derived(seed, b"own mask", context)


def add_mask(key: bytes, sign: int, total: Words) -> None:
    """total += sign * mask, modulo 2^32. The mask is the ChaCha20 keystream under the key."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros, made = bytes(_TILE_BYTES), bytearray(_TILE_BYTES)
    mask = np.frombuffer(made, "<u4")
    for start in range(0, total.size, mask.size):
        here = total[start : start + mask.size]
        stream.update_into(zeros[: 4 * here.size], made)
        if sign > 0:
            here += mask[: here.size]
        else:
            here -= mask[: here.size]


def seal(key: bytes, plain: bytes, told: bytes) -> bytes:
    """Encrypt `plain`, and authenticate it together with `told`. Use each key only once."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, plain, told)


def unseal(key: bytes, sealed: bytes, told: bytes) -> bytes | None:
    """The plain text of `seal`; None if it was not sealed with this key and `told`."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, told)
    except InvalidTag:
        return None


def split(seed: bytes, threshold: int, places: int) -> list[bytes]:
    """Shamir shares of a seed, one for each place; `threshold` of them restore it: values of a
    polynomial over GF(2^128) at 1, 2, ..., whose last coefficient is the seed and whose others are
    drawn."""
    drawn = [secrets.token_bytes(SEED_BYTES) for _ in range(threshold - 1)]
    shares = []
    for at in range(1, places + 1):
        share = 0
        for coefficient in (*drawn, seed):
            share = _product(share, at) ^ int.from_bytes(coefficient)
        shares.append(share.to_bytes(SEED_BYTES))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The seed, from shares by place (from 0), exactly as many as the threshold."""
    seed = 0
    for factor, place in zip(_factors(tuple(sorted(shares))), sorted(shares), strict=True):
        seed ^= _product(int.from_bytes(shares[place]), factor)
    return seed.to_bytes(SEED_BYTES)


@functools.lru_cache(8)
def _factors(places: tuple[int, ...]) -> list[int]:
    """What the shares of these places are multiplied with in their seed: Lagrange's, at 0."""
    found = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = _product(above, other + 1)
                below = _product(below, (other + 1) ^ (place + 1))
        # In the same field, by Euclid's algorithm
        low, rest, of_low, of_rest = below, _MODULUS, 1, 0
        while low != 1:
            shift = rest.bit_length() - low.bit_length()
            if shift < 0:
                low, rest, of_low, of_rest, shift = rest, low, of_rest, of_low, -shift
            rest ^= low << shift
            of_rest ^= of_low << shift
        found.append(_product(above, of_low))
    return found


_MODULUS = 1 << 128 | 0x87


def _product(secret: int, known: int) -> int:
    """In GF(2^128), modulo x^128 + x^7 + x^2 + x + 1. Only `known` decides what is done."""
    product = 0
    while known:
        product ^= secret * (known & 1)
        secret = secret << 1 ^ (secret >> 127) * _MODULUS
        known >>= 1
    return product
