"""FedExP: the further apart members' contributions lead, the longer the step along their mean.

Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023,
equation 7: the mean times max(1, sum |own_k|^2 / (2 M (|mean|^2 + eps))).

    [strategy]
    name = "fedavg"
    merge = "fedexp:FedExP(0.001)"
"""

import numpy as np


class FedExP:
    """A rule that wants a whole round: it compares lengths over all slices."""

    keeps_late = True

    def __init__(self, eps=0.001):
        self.eps = float(eps)

    def merge_round(self, contributions, out):
        squares = 0.0
        for pieces in contributions:
            for piece, mean in zip(pieces, out, strict=True):
                piece.read(mean)
                squares += float(np.dot(mean, mean))
        members = len(contributions)
        for at, mean in enumerate(out):
            mean[:] = 0
            for pieces in contributions:
                pieces[at].add(1 / members, mean)
        length = sum(float(np.dot(mean, mean)) for mean in out)
        factor = max(1.0, squares / (2 * members * (length + self.eps)))
        for mean in out:
            mean *= np.float32(factor)
        return ()
