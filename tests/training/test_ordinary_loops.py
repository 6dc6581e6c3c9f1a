"""Loops as people write them, with `join` and `close` added and nothing else changed: a fleet of
them trains what the papers say. The reference (tests/fakes/naive_fleet.py) knows nothing of
edgetrain.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass

import children
import pytest
import torch
from naive_fleet import PATIENT, Alone, NaiveMember, Table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel

import edgetrain
from edgetrain.exchange.zeromq.hub_socket import HubSocket

pytestmark = pytest.mark.real

MEMBERS, BATCHES = 3, 13
WEIGHTS = (1.0, 2.0, 5.0)
STRATEGIES = {
    "fedavg": {"local_steps": 5},
    "dga(paper)": {"local_steps": 3, "delay": 4},
    "sync-sgd": {},
}


@dataclass(frozen=True)
class Ordinary:
    """A loop: `loop(model, data, join)`; what it returns is compared, too."""

    loop: Callable
    model: Callable[[], nn.Module]
    poisoned: dict[int, tuple[int, ...]]
    """Member: numbers of the batches whose loss is not finite. A scaler leaves those steps out."""


LOOPS: dict[str, Ordinary] = {}


def ordinary(*, model=children.model, poisoned=None):
    """A loop of this file, tried in fleets of this model."""

    def add(loop):
        LOOPS[loop.__name__] = Ordinary(loop, model, poisoned or {})
        return loop

    return add


# -- the loops ------------------------------------------------------------------------------------


@ordinary()
def plain(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    member.close()


@ordinary()
def kept_gradients(model, data, join):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, weight_decay=0.1)
    with join(model, optimizer):
        for number, (x, y) in enumerate(data):
            model.zero_grad(set_to_none=number % 2 == 0)
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@ordinary()
def mixed_precision(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    member.close()


LOOPS["a_step_skipped_on_one_member"] = Ordinary(mixed_precision, children.model, {1: (4,)})


@ordinary(poisoned={0: (0, 7, 12), 1: (4, 5, 6, 7), 2: (5, 7, 9)})
def many_steps_skipped(model, data, join):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    with join(model, optimizer):
        for x, y in data:
            scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@ordinary(poisoned={2: (3,), 1: (8,)})
def fused_optimizer_and_scaler(model, data, join):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    member.close()


@ordinary(poisoned={1: (2, 12), 2: (7,)})
def two_optimizers_and_a_scaler(model, data, join):
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.Adam(model[2].parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    member = join(model, [first, second])
    for x, y in data:
        model.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(first)
        clip_grad_norm_(model[0].parameters(), 0.5)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    member.close()


@ordinary()
def scaler_switched_off(model, data, join):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    member.close()


@ordinary()
def autocast(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(x)
        cross_entropy(scores.float(), y).backward()
        optimizer.step()
    member.close()


@ordinary()
def accumulation(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    member = join(model, optimizer)
    for number, (x, y) in enumerate(data, 1):
        (cross_entropy(model(x), y) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    member.close()


@ordinary()
def warm_up(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 1e-6 if step < 8 else 1.0)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    member.close()


def from_zero():
    model = nn.Sequential(nn.Linear(6, 3))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    return model


@ordinary(model=from_zero)
def warm_up_from_zero(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with join(model, optimizer):
        tiny = LambdaLR(optimizer, lambda step: 1e-6)
        restarts = CosineAnnealingWarmRestarts(optimizer, 3, eta_min=1e-6)
        scheduler = SequentialLR(optimizer, [tiny, restarts], milestones=[8])
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()


@ordinary()
def one_cycle(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    member = join(model, optimizer)
    scheduler = OneCycleLR(optimizer, max_lr=0.3, total_steps=20)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    member.close()


@ordinary()
def plateau(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    with join(model, optimizer):
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step(1.0 if number < 6 else 2.0)


@ordinary()
def parameter_groups(model, data, join):
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    member.close()


@ordinary()
def closures(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with join(model, optimizer):
        for x, y in data:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
    return losses


@ordinary()
def compiled(model, data, join):
    model = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    member.close()


@ordinary()
def an_optimizer_a_parameter(model, data, join):
    optimizers = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]
    of = dict(zip(model.parameters(), optimizers, strict=True))

    def step(p):
        of[p].step()
        of[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    member = join(model, optimizers)
    for x, y in data:
        cross_entropy(model(x), y).backward()
    member.close()


@ordinary()
def two_optimizers(model, data, join):
    first = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    member = join(model, [first, second])
    for x, y in data:
        first.zero_grad()
        second.zero_grad()
        cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    member.close()


def generator_and_critic():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    return nn.ModuleDict({"generator": generator, "critic": nn.Linear(6, 1)})


@ordinary(model=generator_and_critic)
def adversaries(model, data, join):
    generator, critic = model["generator"], model["critic"]
    makes = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    judges = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    with join(model, [judges, makes]):
        for x, _ in data:
            for _ in range(2):
                judges.zero_grad()
                fake = generator(x.flip(0)).detach()
                (critic(fake).mean() - critic(x).mean()).backward()
                judges.step()
            makes.zero_grad()
            (-critic(generator(x.flip(0))).mean()).backward()
            makes.step()


def with_weight_norm():
    return parametrizations.weight_norm(children.model()[0], dim=0)


@ordinary(model=lambda: nn.Sequential(with_weight_norm(), nn.Tanh(), nn.Linear(8, 3, bias=False)))
def weight_norm(model, data, join):
    with torch.no_grad():
        model[2].weight.copy_(children.model()[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    member.close()


def with_spectral_norm():
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(nn.Linear(6, 8))
    return nn.Sequential(layer, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@ordinary(model=with_spectral_norm)
def statistics_of_each_member(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    member = join(model, optimizer)
    for x, y in data:
        model.train()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x)
    member.close()


@ordinary()
def saved_and_loaded(model, data, join):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    member = join(model, optimizer)
    file = io.BytesIO()
    for number, (x, y) in enumerate(data):
        if number == 4:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        if number == 8:
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    member.close()


@ordinary()
def moving_average(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    member = join(model, optimizer)
    ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)
    member.close()
    return list(ema.parameters())


@ordinary()
def averaged_weights(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, best = AveragedModel(model), copy.deepcopy(model.state_dict())
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=4)
    with join(model, optimizer):
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if number >= 6:
                average.update_parameters(model)
                scheduler.step()
            if number == 10:
                best = copy.deepcopy(model.state_dict())
    return [*average.parameters(), *best.values()]


@ordinary()
def frozen_layers(model, data, join):
    model[0].requires_grad_(False)
    trained = (p for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.SGD(trained, lr=0.1, weight_decay=0.1)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    member.close()


class Branches(nn.Module):
    """A layer for each of two kinds of batches: a step leaves the other's without a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x):
        return self.layers[int(x[0, 0] > 0)](x)


@ordinary(model=Branches)
def unused_layers(model, data, join):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    member.close()


torch.optim.Adam([torch.zeros(1)])  # from here on its `step` calls hooks, too


class Centred(torch.optim.Adam):
    """A user's own: Adam, with gradients whose mean is 0."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad -= p.grad.mean()
        return super().step(closure)


@ordinary()
def own_optimizer(model, data, join):
    optimizer = Centred(model.parameters(), lr=0.01)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    member.close()


@ordinary()
def clipped_values(model, data, join):
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01, foreach=True)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
    member.close()


def tied_words():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 12))
    model[3].weight = model[0].weight
    return model


@ordinary(model=tied_words)
def tied_weights(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer):
        for x, _ in data:
            words = (x.abs() * 5).long().clamp(max=11)
            optimizer.zero_grad()
            cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()).backward()
            optimizer.step()


# -- the fleets -----------------------------------------------------------------------------------


def batches(index, poisoned):
    """A member's data. A poisoned batch has a loss that is not finite."""
    found = [children.batch(index, number) for number in range(BATCHES)]
    return [(x * torch.inf if n in poisoned else x, y) for n, (x, y) in enumerate(found)]


def tensors_of(model, returned):
    """All that a member ends with, parameters, buffers and what its loop returned."""
    return [t.detach() for t in (*model.state_dict().values(), *(returned or []))]


def naive(case, strategy, members=MEMBERS):
    """What each member ends with, as the papers have it."""
    table, models = Table(members), [case.model() for _ in range(members)]

    def train(index):
        member = NaiveMember(table, index, strategy, weights=WEIGHTS, **STRATEGIES[strategy])
        model, poisoned = models[index], case.poisoned.get(index, ())

        def data():
            for number, batch in enumerate(batches(index, poisoned)):
                yield batch
                if number in poisoned and member.steps == number:
                    member.skip()

        returned = case.loop(model, data(), member.join)
        return tensors_of(model, returned), member.steps

    return children.in_threads(*[lambda i=i: train(i) for i in range(members)])


def joined(case, strategy):
    """What each member of a real fleet ends with, and its hub."""
    hub = children.HubThread(
        HubSocket("tcp://127.0.0.1:0"),
        strategy,
        MEMBERS,
        policy=PATIENT,
        **STRATEGIES[strategy],
    )

    models = [case.model() for _ in range(MEMBERS)]

    def train(index):
        model, members = models[index], []

        def join(model, optimizer):
            members.append(
                edgetrain.join(
                    hub.transport.address, model, optimizer, name=f"m{index}", weight=WEIGHTS[index]
                )
            )
            return members[0]

        returned = case.loop(model, batches(index, case.poisoned.get(index, ())), join)
        return tensors_of(model, returned), members[0].steps

    with hub.serving():
        found = children.in_threads(*[lambda i=i: train(i) for i in range(MEMBERS)])
    return found, hub


CASES = [pytest.param(case, id=name) for name, case in LOOPS.items()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_a_fleet_of_ordinary_loops_trains_what_the_papers_say(case, strategy, caplog):
    expected = naive(case, strategy)
    found, hub = joined(case, strategy)
    assert [each.getMessage() for each in caplog.records if each.name == "edgetrain"] == []
    assert all(len(closed.members) == MEMBERS for closed in hub.closed)
    for (ours, steps), (theirs, naive_steps) in zip(found, expected, strict=True):
        assert steps == naive_steps
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if not c.values[0].poisoned])
def test_the_reference_alone_is_the_loop_itself(case):
    model = case.model()
    returned = case.loop(model, batches(0, ()), Alone().join)
    ((found, _),) = naive(case, "dga(paper)", members=1)
    for one, other in zip(found, tensors_of(model, returned), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_optimizers_and_a_scaler_go_on_from_a_checkpoint(strategy, tmp_path):
    """A member that is ended before batch 7, and joins again, ends with the bits, about, of one
    that was not."""

    def life(address, folder, end):
        model = children.model()
        first = torch.optim.Adam(model[0].parameters(), lr=0.01)
        second = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        member = edgetrain.join(
            address,
            model,
            [first, second],
            name="m0",
            checkpoint=edgetrain.Keep(folder, edgetrain.Sparing(0.0, 1.0, 1e15)),
            state={"scaler": scaler},
        )
        with contextlib.suppress(KeyboardInterrupt), member:
            for x, y in [children.batch(0, n) for n in range(member.steps, end)]:
                model.zero_grad()
                scaler.scale(cross_entropy(model(x), y)).backward()
                scaler.step(first)
                scaler.step(second)
                scaler.update()
            if end < BATCHES:
                raise KeyboardInterrupt
        return children.flat(model), member.steps

    def trained(name, *ends):
        hub = children.HubThread(
            HubSocket("tcp://127.0.0.1:0"), strategy, 1, policy=PATIENT, **STRATEGIES[strategy]
        )
        with hub.serving():
            for end in ends:
                found = life(hub.transport.address, tmp_path / name, end)
        return found

    whole, cut = trained("whole", BATCHES), trained("cut", 7, BATCHES)
    assert whole[1] == cut[1] == BATCHES
    assert abs(whole[0] - cut[0]).max() <= 1e-6
