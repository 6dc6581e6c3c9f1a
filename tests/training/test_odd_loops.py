"""Oddities of loops and models of one's own that could end in something silently wrong."""

from __future__ import annotations

import contextlib

import children
import pytest
import torch
from naive_fleet import PATIENT, Alone
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import edgetrain
from edgetrain.errors import ConfigError
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.tasks.flat import FlatModel

STRATEGIES = {"fedavg": {"local_steps": 3}, "dga": {"local_steps": 3, "delay": 2}, "sync-sgd": {}}
SHARE = "share memory"


def trained(strategy, make, loop, members=2, batches=6, **more):
    """The models of members that run `loop(model, data, join)`; `more` goes to `join`."""
    hub = children.HubThread(
        HubSocket("tcp://127.0.0.1:0"),
        strategy,
        members,
        policy=PATIENT,
        **STRATEGIES.get(strategy, {"local_steps": 3}),
    )
    models = [make() for _ in range(members)]

    def train(index):
        def join(model, optimizer):
            address = hub.transport.address
            return edgetrain.join(address, model, optimizer, name=f"m{index}", **more)

        loop(models[index], [children.batch(index, n) for n in range(batches)], join)

    with hub.serving():
        children.in_threads(*[lambda i=i: train(i) for i in range(members)])
    return models


def bits(model):
    return [p.detach().numpy().tobytes() for p in model.parameters()]


# -- several optimizers ---------------------------------------------------------------------------


def generator_and_critic():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    return nn.ModuleDict({"generator": generator, "critic": nn.Linear(6, 1)})


def adversaries(model, data, join, *, critic_steps, each, waits):
    """`critic_steps` a batch, and one of the generator every `each` batches."""
    generator, critic = model["generator"], model["critic"]
    makes = torch.optim.Adam(generator.parameters(), lr=0.01)
    judges = torch.optim.SGD(critic.parameters(), lr=0.05)
    member = join(model, [judges, makes])
    for number, (x, _) in enumerate(data, 1):
        for _ in range(critic_steps):
            judges.zero_grad()
            (critic(generator(x.flip(0)).detach()).mean() - critic(x).mean()).backward()
            judges.step()
        if number % each == 0:
            makes.zero_grad()
            (-critic(generator(x.flip(0))).mean()).backward()
            makes.step()
    if waits:
        member.wait_for_fleet()
    member.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_of_a_critic_behind_the_generators_last_one_count(strategy):
    def loop(model, data, join):
        adversaries(model, data, join, critic_steps=1, each=2, waits=False)

    (found,) = trained(strategy, generator_and_critic, loop, members=1, batches=7)
    expected = generator_and_critic()
    loop(expected, [children.batch(0, n) for n in range(7)], Alone().join)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_member_that_waits_steps_the_optimizer_that_the_others_step(strategy):
    def loop(model, data, join):
        short = data if torch.equal(data[0][0], children.batch(0, 0)[0]) else data[:2]
        adversaries(model, short, join, critic_steps=2, each=1, waits=True)

    one, other = trained(strategy, generator_and_critic, loop)
    assert bits(one) == bits(other)


def test_a_parameter_without_a_gradient_has_none_after_another_optimizers_step():
    """FedProx adds to the gradient of what its optimizer steps, not to that of the next one."""
    model, seen = children.model(), []

    def loop(model, data, join):
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.SGD(model[2].parameters(), lr=0.1)
        with join(model, [first, second]):
            for x, y in data:
                second.zero_grad()
                cross_entropy(model(x), y).backward()
                second.step()
                model.zero_grad()
                first.step()
                seen.extend(p.grad for p in model[2].parameters())

    trained("fedprox(0.1)", lambda: model, loop, members=1)
    assert seen == [None] * 12


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sync-sgd", "fedprox(0.1)"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_is_exchanged_as_one_without(strategy):
    def loop(graph):
        def of(model, data, join):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with join(model, optimizer):
                for x, y in data:
                    optimizer.zero_grad()
                    cross_entropy(model(x), y).backward(create_graph=graph)
                    optimizer.step()

        return of

    plain, graph = (trained(strategy, children.model, loop(g)) for g in (False, True))
    assert bits(plain[0]) == bits(graph[0])


def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(50, 6, sparse=True), nn.Linear(6, 3))


@pytest.mark.parametrize("strategy", ["sync-sgd", "fedprox(0.1)"])
def test_sparse_adam_is_refused_where_gradients_are_read_densely(strategy):
    def loop(model, data, join):
        rows = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
        join(model, [rows, torch.optim.SGD(model[1].parameters(), lr=0.1)])

    with pytest.raises(ConfigError, match="SparseAdam takes none"):
        trained(strategy, words, loop, members=1)


# -- what is not exchanged ------------------------------------------------------------------------


class Running(nn.Module):
    """A mean of its own, which it takes away."""

    def __init__(self, value=0.0):
        super().__init__()
        self.model = children.model()
        self.register_buffer("seen", torch.full((6,), value))

    def forward(self, x):
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.1)
        return self.model(x - self.seen)


def teacher():
    frozen = children.model().requires_grad_(False)
    return nn.ModuleDict({"student": children.model(), "teacher": frozen})


def plain(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with join(model, optimizer):
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def distil(student, teacher, optimizer, x, y):
    optimizer.zero_grad()
    (cross_entropy(student(x), y) + mse_loss(student(x), teacher(x))).backward()
    optimizer.step()
    for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.data.lerp_(its.data, 0.1)


def follow(model, data, join):
    optimizer = torch.optim.SGD(model["student"].parameters(), lr=0.1)
    with join(model, optimizer):
        for x, y in data:
            distil(model["student"], model["teacher"], optimizer, x, y)


@pytest.mark.parametrize(("make", "loop", "said"), [
    (Running, plain, "1 changed in training ('seen')"),
    (teacher, follow, "4 changed in training ('teacher.0.weight')"),
])  # fmt: skip
def test_what_changes_on_each_member_alone_is_told_once(make, loop, said, caplog):
    trained("fedavg", make, loop)
    told = [each.getMessage() for each in caplog.records if each.name == "edgetrain"]
    assert sorted(line[:2] for line in told) == ["m0", "m1"]
    assert all(said in line for line in told)
    caplog.clear()
    trained("fedavg", make, loop, frozen="own")
    trained("fedavg", children.model, plain)
    assert not [each for each in caplog.records if each.name == "edgetrain"]


def test_a_teacher_goes_on_from_a_checkpoint(tmp_path):
    """But for the last time that it followed, after the step that the checkpoint was taken in."""
    hub = children.HubThread(
        HubSocket("tcp://127.0.0.1:0"), "fedavg", 1, local_steps=3, policy=PATIENT
    )
    keep = edgetrain.Keep(tmp_path, edgetrain.Sparing(0.0, 1.0, 1e15))
    before, found = [], []
    with hub.serving():
        for end in (3, 6, 7):
            model = teacher()
            optimizer = torch.optim.SGD(model["student"].parameters(), lr=0.1)
            address = hub.transport.address
            member = edgetrain.join(
                address, model, optimizer, name="m", checkpoint=keep, frozen="own"
            )
            found.append(bits(model["teacher"]))
            with contextlib.suppress(KeyboardInterrupt), member:
                for number in range(member.steps, end):
                    before.append(bits(model["teacher"]))
                    distil(*model.values(), optimizer, *children.batch(0, number))
                if end < 7:
                    raise KeyboardInterrupt
    assert found == [before[0], before[2], before[5]]
    assert len({each[0] for each in found}) == 3


class Aliased(nn.Module):
    """A parameter, and something else in the same memory."""

    def __init__(self, **kind):
        super().__init__()
        self.trained = nn.Parameter(torch.ones(4, 3))
        if kind["frozen"]:
            self.other = nn.Parameter(self.trained.data[1:], requires_grad=False)
        else:
            self.register_buffer("other", self.trained.data)


@pytest.mark.parametrize("frozen", [True, False])
def test_what_shares_a_trained_parameters_memory_is_refused_by_name(frozen):
    model = Aliased(frozen=frozen)
    with pytest.raises(ConfigError, match=rf"'(other|trained)' and '(other|trained)' {SHARE}"):
        trained("fedavg", lambda: model, plain, members=1)
    model.other = None
    model.register_buffer("whole", torch.zeros(8))
    model.register_buffer("end", model.whole[4:])  # neither is trained
    assert FlatModel(model).elements == 12


def test_a_state_named_as_an_optimizer_is_kept_is_refused(tmp_path):
    model = children.model()
    optimizers = [torch.optim.SGD(model[n].parameters(), lr=0.1) for n in (0, 2)]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 3)
    hub = children.HubThread(HubSocket("tcp://127.0.0.1:0"), "fedavg", 1, policy=PATIENT)
    with hub.serving(), pytest.raises(ConfigError, match=r"state\['optimizer 2'\] is an optimizer"):
        edgetrain.join(
            hub.transport.address, model, optimizers, checkpoint=tmp_path,
            state={"optimizer 2": schedule},
        )  # fmt: skip


def test_float64_is_told_to_be_exchanged_as_float32(caplog):
    def loop(model, data, join):
        plain(model, [(x.double(), y) for x, y in data], join)

    trained("fedavg", lambda: children.model().double(), loop, members=1)
    assert [each.getMessage() for each in caplog.records if each.name == "edgetrain"] == [
        "m0: float64 parameters are exchanged, and kept between rounds, as float32"
    ]
