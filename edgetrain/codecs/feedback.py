"""Error feedback: the remainder of a codec, its only state. (Momentum: `deep`.)

Knows codecs and vectors; no socket, no round, no optimizer. Only `encode` depends on earlier calls;
its payloads are the codec's, and decoded by it.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgetrain.codecs.base import Codec, check_vector
from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Buffer, Vector, zeros


class Feedback:
    """Error feedback (Seide 2014; Karimireddy 2019): the next payload has this one's remainder.

    Law: after any number of rounds, sum(decoded) + residual == sum(inputs), to rounding, because
    the residual is the input minus the payload's own decoding.

    After an EdgetrainError from `encode` (NaN, infinity) the residual is unusable: call `reset`.
    """

    def __init__(self, codec: Codec, elements: int) -> None:
        """`elements` is the length of every vector; a lossless codec costs no memory here."""
        self.codec = codec
        self.elements = elements
        self.residual: Vector = zeros(0 if codec.lossless else elements)

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def lossless(self) -> bool:
        return self.codec.lossless

    def encode(self, vector: Vector, here: slice | None = None, salt: int = 0) -> list[Buffer]:
        """The payloads of `vector` plus the residual of earlier calls; `vector` is only read.
        `here`: its range of the elements (None: all). `salt`: see Codec."""
        here = slice(0, self.elements) if here is None else here
        self._check(vector, here.stop - here.start)
        if self.codec.lossless:
            return self.codec.encode(vector, salt)
        return self.codec.drain(self.residual[here], vector, salt)

    def reset(self) -> None:
        self.residual[:] = 0

    def state(self) -> dict[str, Vector]:
        """The arrays of a checkpoint, as views: copy or write them before the next `encode`."""
        return {"residual": self.residual}

    def restore(self, state: Mapping[str, Vector]) -> None:
        """Copy the arrays of a `state`. Raises ConfigError, without a change, for others."""
        mine = self.state()
        for name, array in mine.items():
            if name not in state or state[name].shape != array.shape:
                raise ConfigError(f"the checkpoint of '{self.name}' lacks '{name}' {array.shape}")
        for name, array in mine.items():
            array[:] = state[name]

    def _check(self, vector: Vector, elements: int) -> None:
        check_vector(vector)
        if vector.size != elements:
            raise ConfigError(f"feedback keeps {elements} elements, the vector has {vector.size}")
