"""A partition, an outer rule, a schedule, a link, a board, a tracker: a few lines each.

[data]
partition = "more:by_turns"
[train]
schedule = "warmup(5) | more:halving(3)"
[strategy]
outer = "more:Damped(0.5)"
[fleet]
network = "more:field_radio"
device = "more:board"
"""

import numpy as np

from edgetrain.fleet.devices import Device
from edgetrain.fleet.networks import Direction, Profile
from edgetrain.strategies.outer_rules import OuterRule


def by_turns(labels, members, seed):
    """Sample i belongs to member i modulo the number of members."""
    return [np.arange(member, len(labels), members) for member in range(members)]


def halving(step, steps, times):
    """The factor of a learning rate that is halved so many times in a run."""
    return 0.5 ** (step * times // max(1, steps))


class Damped(OuterRule):
    """step = share merged."""

    def _step_tile(self, merged, *vectors):
        merged *= np.float32(self.arguments[0])


field_radio = Profile(
    "field radio", "9.6 kbit/s, half a second each way",
    up=Direction(rate_mbit=0.0096, delay_ms=500), down=Direction(rate_mbit=0.0096, delay_ms=500),
)  # fmt: skip

board = Device(
    "board", "a board of one's own", cores=4, memory_bytes=4 << 30, train_gflops=2, dispatch_s=2e-5,
    idle_watts=2, load_watts=5,
)  # fmt: skip


class Printed:
    """edgetrain track --to more:Printed"""

    def __init__(self, about):
        self.name = about.name

    def write(self, points):
        for point in points:
            print(self.name, point.at, point.tag, point.value)

    def close(self, ok):
        print(self.name, "is over" if ok else "was interrupted")
