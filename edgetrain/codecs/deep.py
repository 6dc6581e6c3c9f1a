"""Deep Gradient Compression: the codec `dgc`, and the memory around it, which has momentum."""

from __future__ import annotations

import math

import numpy as np

from edgetrain.codecs.base import Codec
from edgetrain.codecs.feedback import Feedback
from edgetrain.codecs.fixed import Ranged
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels.contract import LIMIT
from edgetrain.codecs.sparse import TopK
from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Buffer, Vector, zeros


class Deep(TopK):
    """`dgc(0.01) | q2`: top-k on the wire, with Deep Gradient Compression where it is encoded.

    The codec itself is stateless, as all are; `memory` makes its `DeepGradient`.
    """

    gradients_only = whole = True

    def __init__(
        self,
        density: float,
        momentum: float = 0.9,
        warmup: int = 0,
        clip: float = 0.0,
        values: Ranged | None = None,
    ) -> None:
        """As DeepGradient; `clip` 0: none."""
        super().__init__(density, values)
        if not 0 <= momentum < 1:
            raise ConfigError(f"dgc's momentum is in [0, 1), not {momentum:g}")
        if warmup < 0 or not 0 <= clip < LIMIT:
            raise ConfigError(f"dgc's warm-up and clip are 0 or more, not {warmup} and {clip:g}")
        self.momentum, self.warmup, self.clip = momentum, warmup, clip
        options = [repr(density), repr(momentum), str(warmup), repr(clip)]
        defaults = ["", "0.9", "0", "0.0"]
        while options[-1] == defaults[len(options) - 1]:
            options.pop()
        tail = "" if values is None or values.name == "fp32" else f" | {values.name}"
        self.name = f"dgc({', '.join(options)}){tail}"

    def for_replies(self) -> Deep:
        """Feedback and the same warm-up, without momentum and clipping."""
        return Deep(self.density, 0.0, self.warmup, 0.0, self.values.codec)

    def for_displacements(self) -> TopK:
        """Top-k without Deep Gradient Compression; it reads the same payloads."""
        return TopK(self.density, self.values.codec)


WARMUP_FROM = 0.25
"""The density at the start of warm-up (Lin 2018: 75 % sparsity in the first epoch)."""


class DeepGradient(Feedback):
    """Deep Gradient Compression (Lin et al., ICLR 2018) around a sparsifier, for gradients.

        g *= min(1, clip / sqrt(members) / ||g||)       local clipping, before accumulation
        u = momentum * u + g                            momentum correction: u, not g, accumulates
        v = v + u;  send what the codec keeps of v
        u[sent] = 0;  v = v - decoded                   momentum factor masking; error feedback

    The optimizer behind it must have no momentum of its own. During the first `warmup` calls the
    density falls from 25 % to the codec's, by the same factor each time. Differences to the paper:
    v keeps the quantization error of the values (the paper clears it), and warm-up counts calls,
    not epochs.
    """

    def __init__(
        self,
        codec: Codec,
        elements: int,
        momentum: float = 0.9,
        clip: float | None = None,
        members: int = 1,
        masking: bool = True,
        warmup: int = 0,
    ) -> None:
        """`clip` is the largest norm of the gradients of all members together; None: no limit."""
        super().__init__(codec, elements)
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum is in [0, 1), not {momentum:g}")
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip is a norm above 0, not {clip:g}")
        if members < 1 or warmup < 0:
            raise ConfigError(f"members are at least 1 and warmup 0, not {members} and {warmup}")
        if warmup and not isinstance(codec, TopK):
            raise ConfigError(f"only topk has a density to warm up, '{codec.name}' has none")
        self.residual = zeros(elements)
        self.velocity: Vector = zeros(elements)
        self._momentum = momentum
        self._limit = None if clip is None else clip / math.sqrt(members)
        self._masking = masking
        self._warmup = warmup
        self._calls = np.zeros(1, np.float32)

    def encode(self, vector: Vector, here: slice | None = None, salt: int = 0) -> list[Buffer]:
        """The payloads of this gradient with momentum, plus the residual of earlier calls. Always
        of all elements: gradients have no ranges."""
        self._check(vector, self.elements)
        codec = self.codec_now()
        kernels.current().momentum(self.velocity, vector, self._momentum, self._scale(vector))
        payloads = codec.drain(self.residual, self.velocity, salt)
        if self._masking:
            step = self.codec.part_elements
            for i, payload in enumerate(payloads):
                part = self.velocity[i * step : (i + 1) * step]
                if isinstance(self.codec, TopK):
                    part[self.codec.entries(payload, part.size)[0]] = 0
                else:
                    sent = np.empty(part.size, np.float32)
                    self.codec.decode(payload, sent)
                    part[sent != 0] = 0
        self._calls += 1
        return payloads

    def codec_now(self) -> Codec:
        """The codec of the next call: the wrapped one, at the density of warm-up."""
        calls = float(self._calls[0])
        if calls >= self._warmup or not isinstance(self.codec, TopK):
            return self.codec
        final = self.codec.density
        start = max(WARMUP_FROM, final)
        return self.codec.at_density(start * (final / start) ** (calls / self._warmup))

    def reset(self) -> None:
        """Set residual and momentum to zero, and start warm-up again."""
        for array in self.state().values():
            array[:] = 0

    def state(self) -> dict[str, Vector]:
        return {"residual": self.residual, "velocity": self.velocity, "calls": self._calls}

    def _scale(self, vector: Vector) -> float:
        if self._limit is None:
            return 1.0
        norm = math.sqrt(float(np.dot(vector, vector)))
        return min(1.0, self._limit / norm) if norm > 0 else 1.0
