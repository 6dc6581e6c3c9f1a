"""Codecs that send every element in a few bits: int8, int4, qsgd, ternary, sign, q1 to q4.

Each block of a part has its own scale, so an outlier affects only its block. The loops are in
kernels/; docs/reference/codecs.md specifies the bytes.
"""

from __future__ import annotations

from edgetrain.codecs.base import as_bytes
from edgetrain.codecs.fixed import FixedSize
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels.contract import LEVEL_BLOCK, SIGN_BLOCK, Blocks, Bytes
from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Buffer, Vector


class Blockwise(FixedSize):
    """int8, int4, qsgd(s), ternary: scale = max|x| of a block, integer levels -s..s.

    int8, int4 (s = 127, 7): to the nearest level. Bound: |error| <= 0.501 scale.
    qsgd(s) (Alistarh 2017, with the maximum norm, as in its experiments), ternary (s = 1;
    TernGrad, Wen 2017): rounded to a neighbouring level at random, without bias.
    Bound: |error| <= 1.001 scale. A block without a magnitude of 2^-100 is sent as zeros.
    """

    def __init__(self, name: str, code: Blocks) -> None:
        self.name = name
        self.code = code
        self.stochastic = code.stochastic
        self.nearly_all = name == "int8"
        self.part_elements = 2**21 if code.width == 8 else 2**22

    def write(self, r: Vector, g: Vector | None, seed: int, out: Bytes) -> None:
        kernels.current().blocks_encode(r, g, self.code, seed, out)

    def check(self, payload: Buffer, elements: int) -> None:
        super().check(payload, elements)
        kernels.current().blocks_check(as_bytes(payload), elements, self.code)

    def read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        kernels.current().blocks_read(payload, elements, first, self.code, out, weight)

    def max_bytes(self, elements: int) -> int:
        return self.code.scale_bytes(elements) + self.code.code_bytes(elements)


def int8() -> Blockwise:
    """8 bits an element and a scale per 256: a quarter of fp32."""
    return Blockwise("int8", Blocks(127, 8))


def int4() -> Blockwise:
    """4 bits an element and a scale per 256: an eighth of fp32."""
    return Blockwise("int4", Blocks(7, 4))


def ternary() -> Blockwise:
    """1.6 bits an element and a scale per 512; -1, 0 or 1 at random, without bias."""
    return Blockwise("ternary", Blocks(1, 5, stochastic=True))


def qsgd(levels: int = 7) -> Blockwise:
    """`levels` steps each way, at random without bias: 4 bits up to 7, 8 bits up to 127."""
    if not 1 <= levels <= 127:
        raise ConfigError(f"qsgd has 1 to 127 levels, not {levels}")
    return Blockwise(f"qsgd({levels})", Blocks(levels, 4 if levels <= 7 else 8, stochastic=True))


class Sign(FixedSize):
    """One bit an element: its sign; a block of 512 shares its mean magnitude as scale.

    With feedback this is EF-signSGD (Karimireddy 2019) and, but for one scale where that has
    two means, 1-bit SGD (Seide 2014). Bound: |error| <= max(|x|, scale), and the sum of squares
    never grows: ||x - decoded|| <= ||x||.
    """

    name = "sign"
    part_elements = 2**23

    def write(self, r: Vector, g: Vector | None, seed: int, out: Bytes) -> None:
        kernels.current().signs_encode(r, g, out)

    def check(self, payload: Buffer, elements: int) -> None:
        super().check(payload, elements)
        kernels.current().signs_check(as_bytes(payload), elements)

    def read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        kernels.current().signs_read(payload, elements, first, out, weight)

    def max_bytes(self, elements: int) -> int:
        return 4 * -(-elements // SIGN_BLOCK) + -(-elements // 8)


class Planes(FixedSize):
    """q1 to q4: a sign and 1, 2, 4 or 8 levels, as bit planes; blocks of 128 share a mean.

    Levels are the Lloyd-Max points of the exponential law, which is what magnitudes above a
    threshold follow closely: the values of `topk(0.01) | q2`. On its own it takes the magnitudes
    themselves as exponential. Bound: |error| <= max(|x|, 6.3 mean|x| of the block).
    """

    def __init__(self, bits: int) -> None:
        if not 1 <= bits <= 4:
            raise ConfigError(f"q1, q2, q3 and q4 are the plane codecs, there is no q{bits}")
        self.name = f"q{bits}"
        self.bits = bits
        self.part_elements = 2**22

    def write(self, r: Vector, g: Vector | None, seed: int, out: Bytes) -> None:
        kernels.current().planes_encode(r, g, self.bits, out)

    def check(self, payload: Buffer, elements: int) -> None:
        super().check(payload, elements)
        kernels.current().levels_check(as_bytes(payload), elements, self.bits)

    def read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        kernels.current().levels_read(payload, elements, first, self.bits, out, weight)

    def max_bytes(self, elements: int) -> int:
        return 4 + 2 * -(-elements // LEVEL_BLOCK) + self.bits * -(-elements // 8)
