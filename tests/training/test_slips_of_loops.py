"""Slips that people make in loops of their own: each is right, raises, or is told in one line."""

from __future__ import annotations

import io
import logging
import re

import children
import pytest
import safetensors.torch
import torch
from command_line import hub as hub_command
from naive_fleet import PATIENT, NaiveMember, Table
from torch import nn
from torch.nn.functional import cross_entropy

import edgetrain
from edgetrain.errors import ConfigError, Diverged, EdgetrainError
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.runs.folder import folders_in, read_metrics, read_summary
from edgetrain.training.member.optimizers import kept_copy

STRATEGIES = {
    "fedavg": {"local_steps": 5},
    "dga": {"local_steps": 3, "delay": 4},
    "sync-sgd": {},
}


def fleet_of(strategy, *loops, **more):
    """Run a `loop(model, optimizer, index, join)` a member; their models, results, and the hub."""
    wires = HubSocket("tcp://127.0.0.1:0")
    settings = {"policy": PATIENT, **STRATEGIES[strategy], **more}
    hub = children.HubThread(wires, strategy, len(loops), **settings)
    models = [children.model() for _ in loops]

    def train(index):
        model = models[index]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def join(model, optimizer):
            return edgetrain.join(wires.address, model, optimizer, name=f"m{index}")

        return loops[index](model, optimizer, index, join)

    with hub.serving():
        found = children.in_threads(*[lambda i=i: train(i) for i in range(len(loops))])
    return models, found, hub


def compute(model, optimizer, index, number):
    """A batch, forward and backward."""
    x, y = children.batch(index, number)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()


def take(steps, model, optimizer, index):
    for number in range(steps):
        compute(model, optimizer, index, number)
        optimizer.step()


@pytest.mark.parametrize("first", ["member", "optimizer"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_calls_in_one_loop_raise(strategy, first):
    def loop(model, optimizer, index, join):
        member = join(model, optimizer)
        compute(model, optimizer, index, 0)
        calls = [member.step, optimizer.step]
        calls = calls if first == "member" else calls[::-1]
        with member:
            calls[0]()
            before = children.flat(model)
            with pytest.raises(EdgetrainError, match="two steps"):
                calls[1]()
            assert children.flat(model).tobytes() == before.tobytes()
        return member.steps

    _, steps, _ = fleet_of(strategy, loop)
    assert steps == [1]


@pytest.mark.parametrize("call", ["member", "optimizer"])
def test_either_call_alone_trains_the_same(call):
    def loop(model, optimizer, index, join):
        with join(model, optimizer) as member:
            for number in range(7):
                compute(model, optimizer, index, number)
                member.step() if call == "member" else optimizer.step()
        return member.steps

    models, steps, hub = fleet_of("dga", loop, loop)
    expected, _, _ = fleet_of("dga", *[plain] * 2)
    assert steps == [7, 7]
    assert [len(closed.members) for closed in hub.closed] == [2, 2, 2]
    assert children.flat(models[0]).tobytes() == children.flat(expected[0]).tobytes()


def plain(model, optimizer, index, join):
    with join(model, optimizer):
        take(7, model, optimizer, index)


@pytest.mark.parametrize("call", ["scaler.step", "scaler.unscale_"])
def test_a_member_given_to_a_scaler_is_no_optimizer(call):
    def loop(model, optimizer, index, join):
        scaler = torch.amp.GradScaler("cpu")
        with join(model, optimizer) as member:
            x, y = children.batch(index, 0)
            scaler.scale(cross_entropy(model(x), y)).backward()
            if call == "scaler.step":
                scaler.unscale_(optimizer)
            before = children.flat(model)
            with pytest.raises((EdgetrainError, AttributeError)):
                scaler.step(member) if call == "scaler.step" else scaler.unscale_(member)
            assert children.flat(model).tobytes() == before.tobytes()
            optimizer.zero_grad()
            take(1, model, optimizer, index)

    fleet_of("dga", loop)


@pytest.mark.parametrize("call", ["member", "optimizer"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_while_the_model_holds_the_fleets_parameters_raises(strategy, call):
    def loop(model, optimizer, index, join):
        with join(model, optimizer) as member:
            take(4, model, optimizer, index) if call == "optimizer" else None
            own = children.flat(model)
            compute(model, optimizer, index, 4)
            with member.fleet_model(), pytest.raises(EdgetrainError, match="fleet_model"):
                member.step() if call == "member" else optimizer.step()
            assert children.flat(model).tobytes() == own.tobytes()
            member.step() if call == "member" else optimizer.step()
        return member.steps

    _, steps, _ = fleet_of(strategy, loop)
    assert steps == [5 if call == "optimizer" else 1]


def test_a_learnable_loss_beside_the_model_is_refused_by_shape():
    model, temperature = children.model(), nn.Parameter(torch.ones(3, 7))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    wires = HubSocket("tcp://127.0.0.1:0")
    with (
        children.HubThread(wires, "dga", 1).serving(),
        pytest.raises(ConfigError, match=r"not the model's.*\(3, 7\)"),
    ):
        edgetrain.join(wires.address, model, optimizer)


def test_a_learnable_loss_joined_with_the_model_is_trained_by_all():
    wires, ends = HubSocket("tcp://127.0.0.1:0"), [None, None]

    def train(index):
        both = nn.ModuleDict({"model": children.model(), "loss": nn.Linear(3, 1)})
        nn.init.ones_(both["loss"].weight)
        optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
        with edgetrain.join(wires.address, both, optimizer, name=f"m{index}"):
            for number in range(5):
                x, _ = children.batch(index, number)
                optimizer.zero_grad()
                both["loss"](both["model"](x)).square().mean().backward()
                optimizer.step()
        ends[index] = children.flat(both)

    with children.HubThread(wires, "fedavg", 2, local_steps=2, policy=PATIENT).serving():
        children.in_threads(lambda: train(0), lambda: train(1))
    assert ends[0].tobytes() == ends[1].tobytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_member_that_took_no_step_raises_at_its_close(strategy):
    def loop(model, optimizer, index, join):
        member = join(model, optimizer)
        for number in range(3):
            compute(model, optimizer, index, number)  # and optimizer.step() forgotten
        with pytest.raises(EdgetrainError, match="step"):
            member.close()
        member.close()

    fleet_of(strategy, loop)


@pytest.mark.real
def test_a_hub_that_nobody_contributed_to_has_failed(tmp_path):
    model = children.model()
    with hub_command("members=1", "--any-job", cwd=tmp_path) as (serving, address):
        member = edgetrain.join(address, model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(EdgetrainError):
            member.close()
        assert serving.finish() == 1
    assert "Traceback" not in serving.said


def another_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.2


def another_momentum(model, optimizer):
    optimizer.param_groups[0]["momentum"] = 0.5


def a_loaded_state(model, optimizer):
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 0.1)


def a_weight_changed_in_forward(model, optimizer):
    def shrink(module, args):
        with torch.no_grad():
            module.weight.mul_(0.9)

    model[0].register_forward_pre_hook(shrink)


def max_norm(model, optimizer):
    def look_up(module, args):
        nn.functional.embedding(torch.arange(8), module.weight, max_norm=0.1)

    model[0].register_forward_pre_hook(look_up)


DIVERGES = {
    another_rate: r"its optimizer joined with lr=0\.2 \(another member: lr=0\.1\)",
    another_momentum: r"its optimizer joined with settings=\w+ \(another member: settings=\w+\)",
    a_loaded_state: r"its optimizer joined with state=\w+ \(another member: state=none\)",
    a_weight_changed_in_forward: r"something writes to '0\.weight' between steps",
    max_norm: r"something writes to '0\.weight' between steps",
}


@pytest.mark.parametrize("slip", DIVERGES)
def test_replicas_that_are_not_equal_are_told_why(slip):
    def loop(model, optimizer, index, join):
        if index == 1:
            slip(model, optimizer)
        with join(model, optimizer):
            take(4, model, optimizer, index)

    def slips(model, optimizer, index, join):
        with pytest.raises(Diverged, match=r"base has checksum \w+, the member's") as told:
            loop(model, optimizer, index, join)
        return str(told.value)

    _, (_, said, _), hub = fleet_of("sync-sgd", loop, slips, loop)
    assert re.search(DIVERGES[slip], said)
    assert "its optimizer" not in said or "writes to" not in said, "one cause"
    assert "same rates, the same optimizer with the same state" in said
    assert [note.member for note in hub.notes if note.event == "refused"] == ["m1"]


@pytest.mark.real
def test_a_job_that_lost_a_member_to_another_rate_does_not_end_well(tmp_path):
    words = "members=3", "strategy=sync-sgd", "--any-job"
    with hub_command(*words, cwd=tmp_path) as (serving, address):

        def train(index):
            model = children.model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if index == 1 else 0.1)
            with edgetrain.join(address, model, optimizer, name=f"m{index}"):
                take(4, model, optimizer, index)

        def slips():
            with pytest.raises(Diverged, match=r"joined with lr=0\.2"):
                train(1)

        children.in_threads(lambda: train(0), slips, lambda: train(2))
        assert serving.finish() == 1, serving.said
    assert "members failed: m1" in serving.said
    summary = read_summary(next(iter(folders_in(tmp_path / "runs"))))
    assert (summary["status"], summary["members_lost"]) == ("incomplete", ["m1"])


class Replaced(torch.optim.SGD):
    """A loop's own way of stepping, around torch's hooks."""

    def move(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= 0.1 * p.grad


def test_parameters_moved_past_the_optimizers_step_are_not_taken_for_training():
    def loop(model, optimizer, index, join):
        optimizer = Replaced(model.parameters(), lr=0.1)
        member = join(model, optimizer)
        for number in range(3):
            compute(model, optimizer, index, number)
            optimizer.move()
        with pytest.raises(EdgetrainError, match="step"):
            member.close()

    fleet_of("dga", loop)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_made_anew_in_the_middle_raises(strategy):
    def loop(model, optimizer, index, join):
        with join(model, optimizer) as member:
            take(4, model, optimizer, index)
            anew = torch.optim.Adam(model.parameters(), lr=0.01)
            with pytest.raises(EdgetrainError, match="Adam that did not join"):
                take(1, model, anew, index)
        return member.steps

    _, steps, _ = fleet_of(strategy, loop)
    assert steps == [4]


def share(model, optimizer):
    model.share_memory()


def add_a_loss(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


@pytest.mark.parametrize(("act", "said"), [
    (share, "memory that processes share"),
    (add_a_loss, "the optimizer has 5 parameters, and had 4 when it joined"),
])  # fmt: skip
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_takes_a_model_apart_in_the_middle_raises(strategy, act, said):
    def loop(model, optimizer, index, join):
        with join(model, optimizer):
            take(4, model, optimizer, index)
            act(model, optimizer)
            take(8, model, optimizer, index)

    with pytest.raises(EdgetrainError, match=said):
        fleet_of(strategy, loop)


class Around(torch.optim.Optimizer):
    """An optimizer that steps another one, on the same parameters."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_around_the_joined_one_and_one_of_another_model_may_step():
    def loop(model, optimizer, index, join):
        other = children.model()
        others = torch.optim.SGD(other.parameters(), lr=0.1)
        with join(model, optimizer) as member:
            take(5, model, Around(optimizer), index)
            take(2, other, others, index)
        take(1, model, torch.optim.SGD(model.parameters(), lr=0.1), index)
        return member.steps

    _, steps, _ = fleet_of("dga", loop)
    assert steps == [5]


# -- unequal numbers of steps ---------------------------------------------------------------------

UNEQUAL = (4, 13, 9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_members_that_wait_for_the_fleet_end_with_its_model(strategy):
    def loop(model, optimizer, index, join):
        with join(model, optimizer) as member:
            take(UNEQUAL[index], model, optimizer, index)
            member.wait_for_fleet()
        return member.steps

    table, expected = Table(3), [children.model() for _ in UNEQUAL]

    def naive(index):
        member = NaiveMember(table, index, strategy, weights=(1, 1, 1), **STRATEGIES[strategy])
        optimizer = torch.optim.SGD(expected[index].parameters(), lr=0.1, momentum=0.9)
        with member.join(expected[index], optimizer):
            take(UNEQUAL[index], expected[index], optimizer, index)
            member.stay(max(UNEQUAL))

    children.in_threads(*[lambda i=i: naive(i) for i in range(3)])
    models, steps, _ = fleet_of(strategy, loop, loop, loop)
    assert steps == list(UNEQUAL)
    ends = [children.flat(model) for model in models]
    assert len({end.tobytes() for end in ends}) == 1
    for end, theirs in zip(ends, expected, strict=True):
        assert abs(end - children.flat(theirs)).max() <= 1e-6


LOSSY = {
    "bf16": {"codec": "bf16"},
    "powersgd": {"codec": "powersgd(1)"},
    "dgc": {"codec": "dgc(0.2, 0.9, 3) | q2", "reply_codec": "dgc(0.2, 0.0, 3) | q2"},
}


@pytest.mark.parametrize("codec", LOSSY)
def test_members_that_wait_for_the_fleet_are_let_go_whatever_the_codec_leaves_out(codec):
    def loop(model, optimizer, index, join):
        with join(model, optimizer) as member:
            take(UNEQUAL[index], model, optimizer, index)
            member.wait_for_fleet()
        return member.steps

    models, steps, hub = fleet_of("sync-sgd", loop, loop, loop, **LOSSY[codec])
    assert steps == list(UNEQUAL)
    assert len({children.flat(model).tobytes() for model in models}) == 1
    trips = 2 if codec == "powersgd" else 1
    assert len(hub.closed) <= trips * (max(UNEQUAL) + 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_members_that_end_apart_are_told(strategy, caplog):
    def loop(model, optimizer, index, join):
        with join(model, optimizer):
            take(20 if index else 5, model, optimizer, index)

    with caplog.at_level(logging.WARNING, "edgetrain"):
        models, _, _ = fleet_of(strategy, loop, loop)
    ends = [children.flat(model) for model in models]
    assert ends[0].tobytes() != ends[1].tobytes()
    told = [record.getMessage() for record in caplog.records if "round" in record.getMessage()]
    assert len(told) >= 1
    assert all("\n" not in line for line in told)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_members_that_end_together_are_not_warned(strategy, caplog):
    def loop(model, optimizer, index, join):
        with join(model, optimizer):
            take(11, model, optimizer, index)

    with caplog.at_level(logging.WARNING, "edgetrain"):
        fleet_of(strategy, loop, loop)
    assert [record.getMessage() for record in caplog.records] == []


# -- copies of parameters, and parameters that change beside the steps ----------------------------


class Copying(torch.optim.SGD):
    """Steps as SGD does, and keeps a copy of each parameter: `keep(state, parameter)`."""

    def __init__(self, parameters, keep):
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.keep = keep

    def step(self, closure=None):
        found = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.keep(self.state[parameter], parameter.detach())
        return found


COPIES = {
    "z": lambda state, p: state.setdefault("z", p.clone()).sub_(state["momentum_buffer"] * 0.1),
    "ema": lambda state, p: state.setdefault("ema", p.clone()).lerp_(p, 0.001),
    "p0": lambda state, p: state.setdefault("p0", p.clone()),
    "master": lambda state, p: state.update(master=p.double()),
}


def told(caplog, word):
    return [line for line in map(logging.LogRecord.getMessage, caplog.records) if word in line]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", COPIES)
def test_a_state_that_holds_a_copy_of_the_parameters_is_told_by_name(kept, strategy, caplog):
    def loop(model, optimizer, index, join):
        optimizer = Copying(model.parameters(), COPIES[kept])
        with join(model, optimizer):
            take(7, model, optimizer, index)

    with caplog.at_level(logging.WARNING, "edgetrain"):
        fleet_of(strategy, loop, loop)
    lines = told(caplog, f"'{kept}' in the state of Copying")
    assert len(lines) == (0 if strategy == "sync-sgd" else 2)  # there all states are alike


STATES = [
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), lambda p: torch.optim.NAdam(p, lr=0.01),
    lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.3), torch.optim.Adadelta,
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), torch.optim.Rprop,
    lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), torch.optim.Adamax,
]  # fmt: skip


@pytest.mark.parametrize("make", STATES)
@pytest.mark.parametrize("weights", [None, 0.3])
def test_moments_are_no_copies(make, weights):
    model = children.model()
    if weights is not None:  # as in a normalisation layer: all alike
        for p in model.parameters():
            nn.init.constant_(p, weights)
    optimizer = make(model.parameters())
    for number in range(9):
        compute(model, optimizer, 0, number)
        optimizer.step()
        assert kept_copy(optimizer) == ""


def load_best(model):
    model.load_state_dict({n: t * 0.9 for n, t in model.state_dict().items()})


def shrink(model):
    with torch.no_grad():
        for p in model.parameters():
            p *= 0.9


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", [None, load_best, shrink])
def test_what_changes_after_the_last_step_is_told_at_close(change, strategy, caplog):
    def loop(model, optimizer, index, join):
        with join(model, optimizer) as member:
            take(7, model, optimizer, index)
            with member.fleet_model():
                compute(model, optimizer, index, 7)
            if change is not None and index:
                change(model)

    with caplog.at_level(logging.WARNING, "edgetrain"):
        fleet_of(strategy, loop, loop)
    assert len(told(caplog, "m1: the parameters were changed after the last step")) == bool(change)
    assert len(told(caplog, "were changed")) == bool(change)


def test_replicas_that_a_members_own_numbers_moved_apart_are_told_so():
    """As SAM does, whose way back rounds."""

    def loop(model, optimizer, index, join):
        with join(model, optimizer):
            for number in range(5):
                compute(model, optimizer, index, number)
                with torch.no_grad():
                    for p in model.parameters():
                        p += 0.05 * p.grad
                optimizer.step()

    with pytest.raises(Diverged, match=r"'0\.weight' between steps, by this member's own numb"):
        fleet_of("sync-sgd", loop, loop)


@pytest.mark.parametrize("strategy", ["dga", "fedavg"])
def test_a_look_within_autocast_computes_with_the_fleets_parameters(strategy):
    """torch keeps a parameter's copy in half precision until the block ends."""

    def loop(model, optimizer, index, join):
        x, _ = children.batch(index, 0)
        with join(model, optimizer) as member:
            take(7, model, optimizer, index)
            fleets = children.model(5)
            fleets.load_state_dict(member.state_dict())
            with torch.autocast("cpu", torch.bfloat16):
                own = model(x)
                with member.fleet_model():
                    assert torch.equal(model(x), fleets(x))
                    assert not torch.equal(model(x), own)
                assert torch.equal(model(x), own)

    fleet_of(strategy, loop, loop)


# -- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_state_of_a_member_is_the_fleets_in_ordinary_tensors(strategy, tmp_path):
    def loop(model, optimizer, index, join):
        with join(model, optimizer) as member:
            take(4, model, optimizer, index)
            state = member.state_dict()
            with member.fleet_model():
                assert list(state) == list(model.state_dict())
                assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
            file = io.BytesIO()
            torch.save(state["2.bias"], file)
            assert file.tell() < 2000
            safetensors.torch.save_file(state, tmp_path / "during.safetensors")
            copy = children.model(5)
            copy.load_state_dict(state)
            take(1, model, optimizer, index)
            assert children.flat(copy).tobytes() != children.flat(model).tobytes()
        safetensors.torch.save_model(model, str(tmp_path / "after.safetensors"))
        file = io.BytesIO()
        torch.save(model[2].state_dict(), file)
        return file.tell()

    models, (size,), _ = fleet_of(strategy, loop)
    alone = io.BytesIO()
    torch.save(children.model()[2].state_dict(), alone)
    assert size == alone.tell()
    loaded = children.model(5)
    safetensors.torch.load_model(loaded, str(tmp_path / "after.safetensors"))
    assert children.flat(loaded).tobytes() == children.flat(models[0]).tobytes()


# -- what is counted ------------------------------------------------------------------------------


@pytest.mark.real
def test_steps_in_folders_are_the_calls_however_long_rounds_become(tmp_path):
    """With an automatic delay rounds of such short steps grow, from 5 steps to many."""
    calls = 400
    with hub_command("members=2", "strategy=dga", "--any-job", cwd=tmp_path) as (serving, address):

        def train(index):
            model = children.model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            runs = tmp_path / f"m{index}"
            with edgetrain.join(address, model, optimizer, name=f"m{index}", runs=runs) as member:
                take(calls, model, optimizer, index)
            return member.steps, children.flat(model).tobytes()

        ends = children.in_threads(lambda: train(0), lambda: train(1))
        assert serving.finish() == 0, serving.said
    assert [steps for steps, _ in ends] == [calls, calls]
    assert ends[0][1] == ends[1][1]
    (hub,) = folders_in(tmp_path / "runs")
    assert max(line["local_steps"] for line in read_metrics(hub, "round")) > 5
    for folder in (hub, *folders_in(tmp_path / "m0"), *folders_in(tmp_path / "m1")):
        assert read_summary(folder)["steps"] == calls, folder.name
