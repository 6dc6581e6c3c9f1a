"""One chaos schedule over members that average among themselves, in virtual time.

What goes wrong, and how, is that of `simulated`. A member that is killed joins anew, and gets the
base from another one: m0 is never killed, so that one has it.

The laws: every contribution counts once, none of a member that was there all the time is missing,
and all end equal, bit for bit, with the mean of what was counted, worked out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from chaos import simulated
from chaos.laws import Merging, Outcome
from chaos.machines import FailingSimulation
from chaos.schedule import KINDS as EVERY_KIND
from chaos.schedule import Happening, Kind
from edgetrain.exchange.peers.together import CollectiveExchange
from edgetrain.exchange.seam import Submission
from edgetrain.jobs.resolved import Resolved
from edgetrain.tasks.flat import FlatModel
from edgetrain.vectors.vector import Vector

KINDS: tuple[Kind, ...] = tuple(
    kind for kind in EVERY_KIND if kind not in ("blackout", "control-remove", "control-stop")
)

Given = dict[tuple[str, int], Vector]
"""Contributions, by member and round: of one that was killed, and came back, the last."""

calm_seconds = simulated.calm_seconds


def run(planned: Resolved, seed: int, happenings: Sequence[Happening], calm_s: float) -> Outcome:
    """Run a job through one schedule, and judge it: see `chaos.simulated`."""
    given: Given = {}
    submit = CollectiveExchange.submit

    def seen(self: CollectiveExchange, submission: Submission) -> Vector | None:
        given[self.name, submission.round] = submission.vector.copy()
        return submit(self, submission)

    deadly = ("kill", "power")
    left = [each for each in happenings if each.kind not in deadly or 0 not in each.members]
    with mock.patch.object(CollectiveExchange, "submit", seen):
        return simulated.run(planned, seed, left, calm_s, partial(_judge, given))


def _judge(
    given: Given,
    planned: Resolved,
    simulation: FailingSimulation,
    seen: simulated.Seen,
    folder: Path,
    merging: Merging,
) -> list[str]:
    ended, steady, broken = simulated.ends_of(simulation, folder)
    rounds = [seen.rounds[0][number] for number in sorted(seen.rounds[0])]
    torch.manual_seed(planned.job.seed)
    base = FlatModel(simulation.task.model()).params.astype(np.float64)
    counted: Counter[tuple[str, int]] = Counter()
    for record in rounds:
        counted.update((each.member, each.meant_for) for each in record.counted)
        shares = [(given[each.member, each.meant_for], each.weight) for each in record.counted]
        if total := sum(weight for _, weight in shares):
            base += sum(weight * vector.astype(np.float64) for vector, weight in shares) / total
    broken += [f"{m} counts {n} times in round {r}" for (m, r), n in counted.items() if n > 1]
    for name in steady:
        lost = [r for m, r in given if m == name and r < len(rounds) and not counted[m, r]]
        if lost:
            broken.append(f"{name} was there all the time, and its rounds {lost[:5]} are lost")
    if len({end.base for end in ended.values()}) > 1:
        broken.append(f"members end with other parameters: {ended}")
    bases = [m.training.half.base for m in simulation.members if m.training and m.name in ended]
    if not bases or not np.allclose(bases[0], base, rtol=0, atol=1e-4):
        broken.append("the model is not the mean of what was counted")
    return broken
