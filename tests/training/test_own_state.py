"""What a loop has besides the model and the optimizer, in a member's checkpoint: schedules above
all."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import children
import pytest
import torch
from torch.optim import lr_scheduler as schedules

import edgetrain
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.training import processes
from edgetrain.training.member.state import TrainingState, pack, unpack

SCHEDULES = {
    "step": lambda o: schedules.StepLR(o, 5, 0.5),
    "milestones": lambda o: schedules.MultiStepLR(o, [4, 9, 9, 21], 0.5),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 40),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=40),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 7),
    "function": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one after the other": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=6), schedules.ExponentialLR(o, 0.9)], [6]
    ),
    "all at once": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, 4), schedules.PolynomialLR(o, 30)]
    ),
}


class Loop:
    """A model, its optimizer and what goes with it, as someone's script makes them."""

    def __init__(self, make, **others):
        self.model = children.model(0)
        self.optimizer = children.optimizer("sgd", self.model)
        self.schedule = make(self.optimizer)
        others = {name: each(self) for name, each in others.items()}
        self.others = {"schedule": self.schedule, **others}
        self.state = TrainingState(self.model, self.optimizer, self.others)

    def rates(self, steps):
        """The learning rates of so many steps."""
        found = []
        for _ in range(steps):
            found.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.schedule.step()
        return found


def carried(state, make, **others):
    """Another process's loop, with the state of this one."""
    values, buffers = pack(state.collect())
    again = Loop(make, **others)
    again.state.put_back(unpack(values, buffers))
    return again


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("taken", [1, 13])
def test_schedules_of_torch_go_on(make, taken):
    unbroken = Loop(make).rates(35)
    loop = Loop(make)
    first = loop.rates(taken)
    assert first + carried(loop.state, make).rates(35 - taken) == unbroken
    assert len(set(unbroken)) > 1


def test_whatever_has_the_two_methods_goes_on():
    def average(loop):
        return torch.optim.swa_utils.AveragedModel(loop.model)

    def scaler(loop):
        return torch.amp.GradScaler("cpu", init_scale=8.0)

    class Epoch:
        number = 0

        def state_dict(self):
            return {"number": self.number}

        def load_state_dict(self, state):
            self.number = state["number"]

    make = SCHEDULES["step"]
    loop = Loop(make, average=average, scaler=scaler, epoch=lambda loop: Epoch())
    loop.others["epoch"].number = 3
    loop.others["scaler"].load_state_dict(loop.others["scaler"].state_dict() | {"scale": 2.0})
    with torch.no_grad():
        loop.model[0].weight.fill_(5.0)
    loop.others["average"].update_parameters(loop.model)
    again = carried(loop.state, make, average=average, scaler=scaler, epoch=lambda loop: Epoch())
    assert again.others["epoch"].number == 3
    assert again.others["scaler"].get_scale() == 2.0
    assert (again.others["average"].module[0].weight == 5.0).all()
    assert again.others["average"].n_averaged == 1


def test_complex_numbers_go_there_and_back():
    turns = torch.polar(torch.ones(5), torch.arange(5.0))
    values, buffers = pack({"turns": turns, "one": turns[0]})
    found = unpack(values, buffers)
    assert torch.equal(found["turns"], turns)
    assert found["one"] == turns[0]


def test_what_does_not_fit_is_told_by_name():
    make, other = SCHEDULES["step"], SCHEDULES["all at once"]
    values, buffers = pack(Loop(make).state.collect())
    tree = unpack(values, buffers)
    loop = Loop(make)
    with pytest.raises(ConfigError, match=r"holds state of \['schedule'\], this member names noth"):
        TrainingState(loop.model, loop.optimizer).put_back(tree)
    bare = unpack(*pack(TrainingState(loop.model, loop.optimizer).collect()))
    with pytest.raises(ConfigError, match=r"holds state of nothing else, this member names \['sc"):
        loop.state.put_back(bare)
    with pytest.raises(ConfigError, match=r"state\['schedule'\] of .* fit this ChainedScheduler"):
        Loop(other).state.put_back(tree)


class Code:
    """State that only unpickling could bring back."""

    def state_dict(self):
        return {"hook": print}

    def load_state_dict(self, state):
        raise AssertionError("nothing of that kind is loaded")


def test_code_is_not_kept_and_that_is_said_before_training(tmp_path):
    model = children.model(0)
    optimizer = children.optimizer("sgd", model)
    with pytest.raises(
        ConfigError, match=r"state\['code'\]: .* builtin_function_or_method .* no c"
    ):
        TrainingState(model, optimizer, {"code": Code()})
    with pytest.raises(ConfigError, match=r"state\['rate'\] is a float .*load_state_dict"):
        TrainingState(model, optimizer, {"rate": 0.1})
    with pytest.raises(ConfigError, match="name its folder: checkpoint="):
        edgetrain.join("tcp://localhost:1", model, optimizer, state={"code": Code()})


@pytest.mark.real
@pytest.mark.parametrize("strategy", ["sync-sgd", "fedavg"])
def test_killed_twice_every_step_has_the_rate_of_an_unbroken_run(tmp_path, strategy):
    """Kill -9: what was trained on since the checkpoint is not in it."""
    context, started = processes.fork_server(["torch", "edgetrain.training.member.member"]), []
    steps, out = 160, tmp_path / "m0"

    def start(index):
        folder = tmp_path / "kept" if index == 0 else None
        arguments = (hub.transport.address, f"{tmp_path}/m{index}", folder, index, steps)
        started.append(processes.start(context, "own", children.has_a_schedule, *arguments))
        return started[-1]

    journal = Journal(tmp_path / "journal")
    hub = children.HubThread(
        HubSocket("tcp://127.0.0.1:0"), strategy, every=3 if strategy == "fedavg" else 1,
        policy={"gone_s": 60.0}, journal=journal,
    )  # fmt: skip
    try:
        with hub.serving():
            other, life = start(1), start(0)
            for rounds in (9, 30):
                while len(hub.closed) < rounds:
                    time.sleep(0.002)
                os.kill(life.process.pid, signal.SIGKILL)
                life.process.join(60)
                life = start(0)
            for child in (life, other):
                child.process.join(60)
                assert child.exit_code == 0, child.error
    finally:
        processes.stop_all(started)
    journal.close()
    wanted = [0.05 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    lives = Path(f"{out}.rates").read_text().split("begins")[1:]
    assert len(lives) == 3
    seen = [line.split() for life in lives for line in life.splitlines() if line]
    taken = {int(step) for step, _ in seen}
    # The fleet may make a round without it, and its steps with that.
    assert taken == set(range(steps)) if strategy == "sync-sgd" else max(taken) == steps - 1
    assert [int(life.split()[0]) for life in lives] != [0, 0, 0]
    for step, rate in seen:
        assert float(rate) == pytest.approx(wanted[int(step)], rel=1e-6), step
