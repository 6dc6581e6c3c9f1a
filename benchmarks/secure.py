"""The work that masks add to one round: processor seconds and bytes, by the sides alone.

No network between them: what either side takes is counted, also with as many members dropped out
as can be. `edgetrain sweep benchmarks/secure_runs.toml` runs a whole job with masks and without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from harness import Measured, measure

from edgetrain.exchange.further_messages import Masking
from edgetrain.exchange.masks.aggregator import Aggregator, Outgoing
from edgetrain.exchange.masks.fixed_point import FixedPoint
from edgetrain.exchange.masks.masker import Masker, parts
from edgetrain.exchange.masks.terms import MaskTerms, default_threshold

ROUNDS = 16
"""In a block, as a hub asks for them."""
MEMBERS, ELEMENTS = 10, 1_000_000


class _Bench:
    """Both sides, no network between them; what either takes is counted."""

    def __init__(self, members: int, elements: int) -> None:
        terms = MaskTerms(members, default_threshold(members), 8.0)
        self.elements = elements
        self.hub = Aggregator(terms)
        self.hub.start_masks(0)
        self.maskers = {f"m{i}": Masker(terms, elements) for i in range(members)}
        self.plain = FixedPoint(8.0, members)
        self.member_s = self.bytes = 0.0

    def deliver(self, outgoing: Outgoing, gone: frozenset[str] = frozenset()) -> None:
        for name, message in outgoing:
            if name in gone:
                continue
            self.bytes += _size(message)
            began = time.process_time()
            answer = self.maskers[name].answer_hub(message)
            self.member_s += time.process_time() - began
            if answer is not None:
                self.bytes += _size(answer)
                self.hub.accept_message(name, answer)

    def set_up(self) -> None:
        self.deliver(self.hub.begin_block(dict.fromkeys(self.maskers, 1.0), 0, ROUNDS, 0.0))
        for _ in range(2):
            self.deliver(self.hub.advance_blocks(list(self.maskers), 60.0, 0.0))


def _size(message: Masking) -> int:
    return memoryview(getattr(message, "payload", b"")).nbytes


def work(members: int, elements: int, dropped: int) -> dict[str, float]:
    """Processor seconds and bytes that masks add to one round."""
    bench = _Bench(members, elements)
    began = time.process_time()
    bench.set_up()
    both = time.process_time() - began
    vector = np.zeros(elements, np.float32)
    setup = bench.member_s / members / ROUNDS
    setup_hub, setup_bytes = (both - bench.member_s) / ROUNDS, bench.bytes / members / ROUNDS
    bench.member_s = bench.bytes = 0.0
    gone = frozenset(list(bench.maskers)[:dropped])
    masked = np.empty(elements, np.uint32)
    masking = 0.0
    for name, masker in bench.maskers.items():
        if name not in gone:
            began = time.process_time()
            masker.mask(0, vector, 1.0, masked)
            masking += time.process_time() - began
            bench.hub.add_contribution(name, 0, parts(masked, 1 << 20))
    began = time.process_time()
    bench.deliver(bench.hub.close_round(0, 0.0), gone)
    end = bench.hub.unmask_round(0, 60.0, 0.0)
    unmasking = time.process_time() - began - bench.member_s
    assert end is not None
    assert end.vector is not None
    return {
        "member: keys and shares, s": setup,
        "member: masking, s": masking / (members - dropped),
        "member: revealing, s": bench.member_s / (members - dropped),
        "hub: keys and shares, s": setup_hub,
        "hub: unmasking, s": unmasking,
        "member: keys and shares, bytes": setup_bytes,
        "member: revealing, bytes": bench.bytes / (members - dropped),
        "contribution, bytes": 4.0 * elements,
    }


def measured() -> Iterator[Measured]:
    """Nobody dropped out, then as many as can."""
    for dropped in (0, MEMBERS - default_threshold(MEMBERS)):
        what = f"{MEMBERS} members, {dropped} dropped out, {ELEMENTS:,} elements"
        yield measure(what, lambda: work(MEMBERS, ELEMENTS, dropped), 3)  # noqa: B023
