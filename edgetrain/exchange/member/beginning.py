"""What a member gives and takes before it trains: the base, and behind it the values of tensors
that are not trained, where all take over the first member's.

Parts come in order. An answer of the hub begins with its Welcome (`restart`) and ends with its
Start (`finish`). No transport.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgetrain.errors import BadMessage, Diverged
from edgetrain.exchange.messages import Base, Fixed
from edgetrain.exchange.seam import FixedTensors
from edgetrain.vectors.blob import blob_digest, blob_part, blob_part_count, blob_parts
from edgetrain.vectors.parts import base_part, base_part_count, base_parts
from edgetrain.vectors.vector import Buffer, Vector


class Beginning:
    """One member's parameters, float32 [elements], and its `fixed` tensors, None: no values are
    handed out. Both are the caller's. Parameters are overwritten part by part, fixed tensors once
    all of their bytes are here and have the right digest."""

    def __init__(self, params: Vector, fixed: FixedTensors | None, digest: str) -> None:
        """`digest`: of the fixed tensors as they are now."""
        self._params, self._fixed, self._own = params, fixed, digest
        self._payloads: list[Buffer] = []

    def messages(self) -> Iterator[Base | Fixed]:
        """All that the fleet begins with, from this member, as it is now."""
        snapshot = self._params.copy()
        parts = list(base_parts(snapshot.size))
        for part, here in enumerate(parts):
            yield Base(part, len(parts), snapshot[here].data.cast("B"))
        if self._fixed is not None:
            pieces = list(blob_parts(self._fixed.read()))
            for part, piece in enumerate(pieces):
                yield Fixed(part, len(pieces), piece)

    def restart(self) -> None:
        self._payloads = []

    def accept_part(self, message: Base | Fixed) -> None:
        """Take in a part. Raises BadMessage before it takes memory for one that does not fit."""
        if isinstance(message, Fixed):
            self._accept_fixed(message)
            return
        here, parts = base_part(message.part, self._params.size), base_part_count(self._params.size)
        if message.part >= parts:
            raise BadMessage(f"base part {message.part} of {parts}")
        received = np.frombuffer(message.payload, np.float32)
        if received.size != here.stop - here.start:
            raise BadMessage(f"base part {message.part} has {received.size} elements")
        self._params[here] = received

    def _accept_fixed(self, message: Fixed) -> None:
        total = self._fixed.size if self._fixed is not None else 0
        here, size = blob_part(message.part, total), memoryview(message.payload).nbytes
        in_order = message.part == len(self._payloads) < blob_part_count(total) == message.parts
        if not in_order or size != here.stop - here.start:
            raise BadMessage(
                f"part {message.part} of {message.parts} of fixed tensors, {size} bytes, is out of "
                f"order or not of {total} bytes"
            )
        self._payloads.append(message.payload)

    def finish(self, digest: str) -> str:
        """The answer is whole, and the fleet's fixed tensors have this `digest`: take over their
        values, if they are others. Returns the digest of this member's from now on.

        Raises Diverged for values that have another digest, or that did not come.
        """
        payloads, self._payloads = self._payloads, []
        if self._fixed is None or digest == self._own:
            return self._own
        if blob_digest(payloads) != digest:
            raise Diverged("the fixed tensors arrived damaged: their digest differs from the hub's")
        self._fixed.write(b"".join(payloads))
        self._own = digest
        return digest
