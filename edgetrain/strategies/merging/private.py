"""The mean with noise that the hub adds: clipped contributions, Gaussian noise on their sum.

Randomness is passed in; what the noise is worth is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgetrain.strategies.merging.rule import Discounted, Mean, Piece
from edgetrain.vectors.noise import TILE, Gaussian, Source, _scaled, length, normal, share, system
from edgetrain.vectors.vector import Vector


class PrivateMean:
    """A RoundRule of a hub that is trusted: the mean of contributions, each cut to `clip`, noised.

    DP-FedAvg (McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR
    2018, algorithm 1) with equal weights and a fixed clip. The sum of the n contributions that are
    here gets noise of standard deviation noise x clip, and is divided by n: membership of a
    round is public, contributions are secret. Cuts are not reported: lengths are private, too.

    With a `lot`, the number of members that a round has on average, the sum is divided by that,
    and how many there are is secret, too: a round of none is noise.

    `source` gives the random bytes of the noise.
    """

    fewest = 1

    def __init__(
        self,
        mechanism: Gaussian,
        source: Source = system,
        keeps_late: bool = True,
        lot: int = 0,
    ) -> None:
        self._mechanism, self.source = mechanism, source
        self.keeps_late, self.lot = keeps_late, lot

    def merge_round(
        self, contributions: Sequence[Sequence[Piece]], out: Sequence[Vector]
    ) -> tuple[Discounted, ...]:
        clip = self._mechanism.clip
        scales = [share(_length(pieces, out), clip) for pieces in contributions]
        is_plain = not self.lot and not self._mechanism.deviation
        if is_plain and all(scale == 1.0 for scale in scales):
            for part, merged in enumerate(out):
                Mean().merge([pieces[part] for pieces in contributions], merged)
            return ()
        for part, merged in enumerate(out):
            total = np.zeros(merged.size)
            row = np.empty_like(merged)
            for pieces, scale in zip(contributions, scales, strict=True):
                pieces[part].read(row)
                total += _scaled(row, scale)
            if self._mechanism.deviation:
                for start in range(0, total.size, TILE):
                    tile = total[start : start + TILE]
                    tile += self._mechanism.deviation * normal(tile.size, self.source)
            merged[:] = total / (self.lot or len(contributions))
        return ()


def _length(pieces: Sequence[Piece], out: Sequence[Vector]) -> float:
    lengths = []
    for piece, like in zip(pieces, out, strict=True):
        row = np.empty_like(like)
        piece.read(row)
        lengths.append(length(row))
    return math.hypot(*lengths)
