"""What a loop has besides the model and the optimizer, in a member's checkpoint: schedules above
all."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from collections import OrderedDict
from pathlib import Path

import children
import pytest
import torch
from torch import nn
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


class Cached(nn.Module):
    """Buffers that forward passes make, replace and let grow."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.register_buffer("cos", torch.zeros(4), persistent=False)
        self.register_buffer("memory", torch.zeros(0, 3))
        self.register_buffer("late", None)
        self.register_buffer("narrow", torch.zeros(2))

    def forward(self, x):
        if self.cos.numel() < 8:
            self.cos = torch.arange(8.0).cos()
        if self.late is None:
            self.late = torch.full((3,), 0.5)
            self.register_buffer("first", x[0].detach().clone())
            self.register_buffer("mask", torch.ones(3), persistent=False)
        self.memory = torch.cat([self.memory, x.detach()])[-7:]
        self.late = self.late * 0.9 + x.detach().mean(0)
        self.narrow = (self.narrow + 1).to(torch.bfloat16)
        return self.body(x + self.late + self.memory.mean(0) * self.first * self.mask) * self.narrow


def trained(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(2, 3).to(model.body.weight.dtype)).float().square().sum().backward()
        optimizer.step()


def back(state, again):
    """Put what a file would hold of this state into another."""
    values, buffers = pack(state.collect())
    again.put_back(unpack(values, [each.copy() for each in buffers]))


def test_buffers_that_grew_or_came_late_come_back_as_they_were():
    torch.manual_seed(0)
    unbroken = Cached()
    other = copy.deepcopy(unbroken)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (unbroken, other)]
    trained(unbroken, optimizers[0], range(5))
    back(TrainingState(unbroken, optimizers[0]), TrainingState(other, optimizers[1]))
    assert "mask" not in dict(other.named_buffers()), "it is made again"
    with torch.no_grad():
        other.body.load_state_dict(unbroken.body.state_dict())
    assert other.state_dict().keys() == unbroken.state_dict().keys()
    other.register_buffer("mask", torch.ones(3), persistent=False)
    for model, optimizer in zip((unbroken, other), optimizers, strict=True):
        trained(model, optimizer, range(5, 8))
    for name, value in unbroken.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
        assert value.dtype is other.state_dict()[name].dtype
    lacking = TrainingState(nn.BatchNorm1d(3), torch.optim.SGD(unbroken.parameters(), 0.01))
    with pytest.raises(ConfigError, match="it has no buffer 'num_batches_tracked'"):
        back(TrainingState(unbroken, optimizers[0]), lacking)


class Masters(torch.optim.Optimizer):
    """What others' optimizers keep: masters in float32, counters, texts, tables, a plain number."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        self.state["all"] = {"calls": self.calls}
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state |= {"master": p.clone().float(), "count": torch.zeros((), dtype=torch.int64)}
                state |= {"rows": torch.zeros(3, dtype=torch.float64), "kind": "master", "old": ()}
            state["count"] += 16_777_217  # not a number of bfloat16
            state["rows"] += p.grad.double().sum() / 3
            state["old"] = (p.grad.float() / self.calls, {"kind": [state["count"].clone()]})
            state["master"] -= self.param_groups[0]["lr"] * (p.grad + state["rows"].sum())
            p.copy_(state["master"] * (1 + 1e-9 * state["count"].item() * state["old"][0].mean()))


class Casting(Masters):
    """Its own way back ends with torch's."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.param_groups[0].setdefault("lr", 0.01)


OPTIMIZERS = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", Masters, Casting,
]  # fmt: skip


def shown(value):
    """A state as it can be compared: kinds, dtypes, shapes and values."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.tolist()
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    return [type(value), *map(shown, value)] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("second", [False, True], ids=["the first", "another"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_goes_on_with_the_bits_of_an_unbroken_run(kind, dtype, second):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(OrderedDict(body=nn.Linear(3, 2))).to(dtype)
        cls = getattr(torch.optim, kind) if isinstance(kind, str) else kind
        optimizer = cls(model.parameters(), lr=0.01)
        idle = torch.optim.SGD(model.parameters(), 0.0)
        state = (model, idle, {"optimizer 2": optimizer}) if second else (model, optimizer)
        return model, optimizer, TrainingState(*state)

    unbroken, optimizer, state = made()
    other, again, its_state = made()
    trained(unbroken, optimizer, range(5))
    back(state, its_state)
    other.load_state_dict(unbroken.state_dict())
    assert shown(again.state_dict()) == shown(optimizer.state_dict())
    trained(unbroken, optimizer, range(5, 10))
    trained(other, again, range(5, 10))
    assert shown(again.state_dict()) == shown(optimizer.state_dict())
    assert shown(other.state_dict()) == shown(unbroken.state_dict())


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
        HubSocket("tcp://127.0.0.1:0"), strategy, local_steps=3 if strategy == "fedavg" else 1,
        policy={"lost_after_s": 60.0}, journal=journal,
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
