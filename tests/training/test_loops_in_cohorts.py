"""Loops of people's own in a fleet whose rounds have a sample of its members."""

from __future__ import annotations

from functools import partial

import children
import numpy as np
import pytest
import torch
from children import HubThread, in_threads

import edgetrain
from edgetrain.errors import ConfigError, Refused
from edgetrain.exchange.hub.drawing import CohortPart
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.strategies.cohort import Cohort

pytestmark = pytest.mark.real

MEMBERS, LOCAL_STEPS, STEPS = 5, 2, 24
COHORT = Cohort(3, MEMBERS, 2)


def loop(at, index, more=0, **words):
    """Train while the job lasts, and `more` steps; the parameters and the member's own steps."""
    model = children.model(0)
    optim = children.optimizer("momentum", model)
    with edgetrain.join(at, model, optim, name=f"m{index}", **words) as member:
        while member.progress < STEPS + more:
            children.backward(model, optim, index, member.steps)
            optim.step()
    return children.flat(model), member.steps


def served(jobs, **words):
    socket = HubSocket("tcp://127.0.0.1:0", 1 << 24)
    at = f"tcp://127.0.0.1:{socket.port}"
    with HubThread(
        socket, "fedavg", MEMBERS, local_steps=LOCAL_STEPS, steps=STEPS, part=CohortPart(COHORT)
    ).serving() as hub:
        found = in_threads(*[partial(job, at) for job in jobs])
    return found, hub


def naive():
    """FedAvg of the drawn members in plain torch; members keep their momentum between rounds."""
    members = [(model := children.model(0), children.optimizer("momentum", model))
               for _ in range(MEMBERS)]  # fmt: skip
    base, taken = children.flat(members[0][0]), [0] * MEMBERS
    for round in range(STEPS // LOCAL_STEPS):
        ends = []
        for index in COHORT.drawn(round):
            model, optim = members[index]
            torch.nn.utils.vector_to_parameters(torch.from_numpy(base).clone(), model.parameters())
            for _ in range(LOCAL_STEPS):
                children.backward(model, optim, index, taken[index])
                optim.step()
                taken[index] += 1
            ends.append(children.flat(model))
        base = np.mean(ends, 0)
    return base, taken


def test_they_train_what_fedavg_of_the_drawn_members_is_in_plain_torch():
    found, _ = served([partial(_at, loop, index) for index in range(MEMBERS)])
    base, taken = naive()
    assert [steps for _, steps in found] == taken
    for model, _ in found:
        np.testing.assert_allclose(model, base, atol=1e-6)
        assert model.tobytes() == found[0][0].tobytes()


def _at(how, index, at, **words):
    return how(at, index, **words)


def test_a_step_behind_the_jobs_last_one_is_refused_in_one_line():
    jobs = [partial(_at, loop, index, more=4 * (index == 0)) for index in range(MEMBERS)]
    said = r"the job's 24 steps are over: step while member.progress < 24$"
    with pytest.raises(Refused, match=said) as caught:
        served(jobs)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_is_refused_in_one_line(tmp_path):
    jobs = [partial(_at, loop, index) for index in range(MEMBERS)]
    jobs[1] = partial(_at, loop, 1, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="a loop of one's own keeps no checkpoint there"):
        served(jobs)
