"""Running statistics of normalisation layers: the members' mean, or each member's own."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import children
import numpy as np
import pytest
import safetensors.torch
import torch
from command_line import write_tiny
from loopback import Loopback
from torch import nn

import edgetrain
from edgetrain import strategies
from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.jobs.job import Privacy
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, metrics_path, read_metrics, read_summary
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.tasks import held, weights
from edgetrain.tasks.flat import FlatModel, with_parameters
from edgetrain.training.member.member import Member, bind
from edgetrain.training.member.train import Place, train
from edgetrain.training.simulated import simulation
from edgetrain.vectors.noise import length

MEANS = (-4.0, 4.0)
"""Where the inputs of the two members lie: each alone measures statistics that suit only itself."""


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def statistics(model):
    return torch.cat([model[0].running_mean, model[0].running_var]).numpy().copy()


def batch(member, step):
    x, y = children.batch(member, step)
    return x + MEANS[member], y


# -- in the vector --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_behind_the_parameters(dtype):
    model = normalised()
    model[1].to(dtype)
    flat = FlatModel(model, statistics=True)
    assert flat.is_storage == (dtype is torch.float32)
    assert flat.elements - flat.trained == 18
    assert len(flat.layout) == 6
    names = "0.running_mean", "0.running_var", "0.running_square"
    assert flat.description.decode().endswith("".join(f"float32 6 {name}\n" for name in names))
    np.testing.assert_array_equal(flat.params[flat.trained :], [0.0] * 6 + [1.0] * 6 + [0.0] * 6)
    x = torch.randn(5, 6) + 3
    model[0](x)
    flat.pull_params()
    np.testing.assert_array_equal(flat.params[flat.trained : -6], statistics(model))
    np.testing.assert_allclose(flat.params[-6:], 0.1 * x.mean(0).square(), rtol=1e-5)
    assert flat.params[flat.trained] != 0
    flat.gradient[flat.trained :] = 7  # of a strategy that pulls parameters to the round's start
    flat.pull_gradient()
    assert not flat.gradient[flat.trained :].any()
    flat.params[flat.trained :] = 2
    flat.push_params()
    assert set(statistics(model)) == {2.0}
    assert model[0].num_batches_tracked == 1


def test_a_look_shows_no_negative_variance_and_changes_nothing():
    model = normalised()
    flat = FlatModel(model, statistics=True)
    before, shown = statistics(model), flat.params.copy()
    shown[-18:] = -3
    with flat.holding(shown):
        assert set(model[0].running_mean.tolist()) == {-3.0}
        assert set(model[0].running_var.tolist()) == {0.0}
    np.testing.assert_array_equal(statistics(model), before)
    other = with_parameters(model, shown)
    assert set(other[0].running_mean.tolist()) == {-3.0}


def test_without_them_the_vector_is_what_it_was():
    flat = FlatModel(normalised())
    assert flat.elements == flat.trained
    assert b"running" not in flat.description


# -- a fleet --------------------------------------------------------------------------------------


def fleet(buffers, strategy="dga", steps=60, **how):
    """Two members of data that differ; each one's model at the end, the base, and its figures."""
    wires = Loopback()

    def train(index):
        model = normalised()
        optim = torch.optim.SGD(model.parameters(), 0.05)
        flat = bind(model, optim, buffers=buffers)
        link = Link(wires.connect(), time.monotonic)
        with Member.join(link, flat, optim, Request("", f"m{index}")) as member:
            for step in range(steps):
                optim.zero_grad()
                x, y = batch(index, step)
                nn.functional.cross_entropy(model(x), y).backward()
                member.step()
        return model, member

    with children.HubThread(wires, strategy, 2, **how).serving():
        return children.in_threads(lambda: train(0), lambda: train(1))


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("fedavg", {"local_steps": 2}),
        ("dga", {"local_steps": 2, "delay": 5}),
        ("fedprox(0.1)", {"local_steps": 3}),
    ],
)
def test_all_members_end_with_the_mean_of_what_they_measured(strategy, how):
    (one, a), (other, b) = fleet("mean", strategy, **how)
    assert children.flat(one).tobytes() == children.flat(other).tobytes()
    assert statistics(one).tobytes() == statistics(other).tobytes()
    assert a.half.base.tobytes() == b.half.base.tobytes()
    assert np.abs(statistics(one)[:6]).max() < 1.5, "the mean of -4 and 4"
    assert (statistics(one)[6:] > 0.2).all()


def away(member, step):
    """Of variance 1 about -6 or 6: of all data it is 37."""
    rng = torch.Generator().manual_seed(1000 * member + step)
    x = torch.randn(32, 6, generator=rng)
    return x + (-6.0, 6.0)[member], torch.randint(0, 3, (32,), generator=rng)


@pytest.mark.parametrize(
    ("strategy", "momentum", "how"),
    [
        ("fedavg", 0.1, {"local_steps": 1}), ("fedavg", None, {"local_steps": 20}),
        ("dga", 0.1, {"local_steps": 2, "delay": 5}),
        ("dga", 0.1, {"local_steps": 5, "delay": 5, "codec": "topk(0.1)"}),
    ],
)  # fmt: skip
def test_the_fleets_variance_is_that_of_all_data(strategy, momentum, how, monkeypatch):
    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 3))

    here = globals()
    monkeypatch.setitem(here, "batch", away)
    monkeypatch.setitem(here, "normalised", layers)
    (one, a), _ = fleet("mean", strategy, steps=60, **how)
    base = a.half.base.copy()
    with FlatModel(found := layers(), frozen="own", statistics=True).holding(base):
        shown = statistics(found)
    np.testing.assert_allclose(shown[6:], 37.0, rtol=0.05)
    assert statistics(with_parameters(layers(), base)).tobytes() == shown.tobytes(), "simulated"
    assert (statistics(one)[6:] < 1.5).all(), "a member normalises by what it measured itself"


@pytest.mark.parametrize("outer", ["momentum(1, 0.9)", "nesterov(0.7, 0.9)", "adam(0.1)"])
def test_an_outer_rule_leaves_the_mean_of_statistics_as_it_is(outer):
    """A variance that an optimizer moves by steps of 0.1 is soon negative."""
    (one, a), (other, b) = fleet("mean", f"fedavg | {outer}", local_steps=2)
    (alone, plain), _ = fleet("mean", "fedavg", local_steps=2)
    assert statistics(one).tobytes() == statistics(other).tobytes() == statistics(alone).tobytes()
    assert a.half.base.tobytes() == b.half.base.tobytes()
    flat = FlatModel(normalised(), statistics=True)
    assert a.half.base[flat.trained :].tobytes() == plain.half.base[flat.trained :].tobytes()
    assert not (a.half.base[: flat.trained] == plain.half.base[: flat.trained]).all()


class Wide:
    """A task whose vector has parts enough for several reducers, and steps that move nothing."""

    name, metric, better, target = "wide", "loss", "lower", None

    def samples(self, member, members):
        return 8

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3000), nn.BatchNorm1d(3000))

    def batches(self, member, members, batch, seed):
        for step in itertools.count():
            yield (away(member % 2, step)[0],)

    def loss(self, model, batch):
        return 0.0 * model(*batch).square().mean()

    def evaluate(self, model):
        return {"loss": 0.0}


@pytest.mark.parametrize("where", ["star", "direct", "ring"])
def test_whoever_reduces_an_outer_rule_leaves_statistics_alone(where, tmp_path):
    found = []
    for outer in ("sgd(1)", "momentum(1, 0.9)"):
        folder = create(tmp_path, outer[:3])
        words = [f"task={held.spelled(Wide)}", f"strategy=fedavg | {outer}", "members=4"]
        words += ["batch=32", "steps=20", "local_steps=4", "pace_s=0.1", f"topology={where}"]
        planned = plan(load(None, [*words, *["ranges=2"] * (where == "direct")]))
        assert simulation.run(planned, folder)["status"] == "finished"
        kept = safetensors.torch.load_file(folder / weights.FILE)
        found.append({name: value for name, value in kept.items() if "running" in name})
    plain, stepped = found
    assert len(plain) == 4
    assert plain["0.running_var"].mean() > 20
    for name, value in plain.items():
        torch.testing.assert_close(stepped[name], value)


def test_a_layer_of_another_kind_has_the_mean_of_variances():
    """A name does not make a layer one of normalisation."""
    model, other = normalised(), normalised()
    del other[0].momentum
    sizes = [FlatModel(each, statistics=True).elements for each in (model, other)]
    assert sizes[0] - sizes[1] == 6


def test_an_own_loop_ends_with_the_variance_of_all_data():
    hub = children.HubThread(HubSocket("tcp://127.0.0.1:0"), "fedavg", 2, local_steps=5)

    def train(index):
        model = normalised()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with edgetrain.join(hub.transport.address, model, optimizer, buffers="mean") as member:
            for step in range(40):
                optimizer.zero_grad()
                x, y = away(member.index, step)
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            state = member.state_dict()
        return model, state

    with hub.serving():
        ends = children.in_threads(lambda: train(0), lambda: train(1))
    for model, state in ends:
        np.testing.assert_allclose(statistics(model)[6:], 37.0, rtol=0.1)
        assert torch.equal(state["0.running_var"], model[0].running_var)
    assert statistics(ends[0][0]).tobytes() == statistics(ends[1][0]).tobytes()


def test_local_statistics_are_each_members_own():
    (one, _), (other, _) = fleet("local", local_steps=2, delay=5)
    assert children.flat(one).tobytes() == children.flat(other).tobytes()
    assert statistics(one)[:6].mean() < -3
    assert statistics(other)[:6].mean() > 3


def test_strategies_that_exchange_gradients_have_no_use_for_them():
    wires, model = Loopback(), normalised()
    optim = torch.optim.SGD(model.parameters(), 0.05)
    flat = bind(model, optim, buffers="mean")
    with children.HubThread(wires, "sync-sgd", 1).serving():
        link = Link(wires.connect(), time.monotonic)
        with pytest.raises(ConfigError, match=r"sync-sgd exchanges gradients.*buffers='local'"):
            Member.join(link, flat, optim, Request("", "m0"))
    with pytest.raises(ConfigError, match="allowed are mean and local"):
        bind(model, optim, buffers="some")


# -- privacy --------------------------------------------------------------------------------------


class Layer(nn.Linear):
    """A layer that changes, in a way of its own, what is not trained."""

    def __init__(self, change, dtype=torch.float32, persistent=True):
        super().__init__(3, 3)
        self.change = change
        self.calls = 0
        self.register_buffer("seen", torch.zeros(3, dtype=dtype), persistent=persistent)
        self.register_buffer("running_mean", torch.zeros(3))
        self.teacher = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, x):
        self.calls += 1
        if self.training:
            with torch.no_grad():
                self.change(self, x.detach())
        return super().forward(x)


def replaced(name):
    return lambda layer, x: setattr(layer, name, x.mean(0))


LEAKS = {
    "BatchNorm": lambda: nn.BatchNorm1d(3),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
    ),
    "mean": lambda: Layer(lambda layer, x: layer.seen.lerp_(x.mean(0), 0.1)),
    "replaced": lambda: Layer(replaced("seen")),
    "its own running mean": lambda: Layer(replaced("running_mean")),
    "one element": lambda: Layer(lambda layer, x: layer.seen[1:2].copy_(x[:1, 1])),
    "counts": lambda: Layer(lambda layer, x: layer.seen.add_((x > 0).sum(0)), torch.int64),
    "teacher": lambda: Layer(lambda layer, x: layer.teacher.lerp_(layer.weight, 0.1)),
    "spectral": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
}
FINE = {
    "GroupNorm": lambda: nn.GroupNorm(1, 3),
    "untracked": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "not kept": lambda: Layer(replaced("seen"), persistent=False),
}


class Shifted:
    """Inputs of the first member lie at `shift`: other data of the member that is protected."""

    name, metric, better, target = "shifted", "loss", "lower", None

    def __init__(self, layer, shift=0.0):
        self.layer, self.shift = layer, shift

    def model(self):
        return nn.Sequential(self.layer(), nn.Linear(3, 2))

    def samples(self, member, members):
        return 8

    def batches(self, member, members, batch, seed):
        rng = torch.Generator().manual_seed(member)
        while True:
            x = torch.randn(batch, 3, generator=rng)
            yield (x + self.shift * (member == 0),)

    def loss(self, model, batch):
        return model(*batch).square().mean()

    def evaluate(self, model):
        return {"loss": 0.0}


def private(task, *words):
    job = ["members=2", "steps=4", "batch=4", "pace_s=0.1", "noise=0", "clip=0.01"]
    if not any(word.startswith("privacy=") for word in words):
        words = ("privacy=member", *words)
    return plan(load(None, [f"task={held.spelled(task)}", *job, *words]))


def unnoised(folder, planned):
    """What a run's model holds besides what is contributed, and counts."""
    ends = ("running_mean", "running_var") if planned.buffers == "mean" else ()
    kept = safetensors.torch.load_file(folder / weights.FILE)
    trained = dict(task_of(planned.job).model().named_parameters())
    return {
        name: value.tolist()
        for name, value in kept.items()
        if not (name in trained and trained[name].requires_grad) and not name.endswith(ends)
    }


ARGUMENTS = {
    "fedprox": "(0.1)", "streaming-diloco": "(2, 0.5)", "fedbuff": "(2, 0.5)", "ssp": "(1)",
    "async-sgd": "(1)",
}  # fmt: skip
PRIVATE = [
    f"{name}{ARGUMENTS.get(name, '')}{' | alike' * row.weighted}"
    for name, row in strategies.TABLE.items()
    if name not in ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
]
"""Every strategy, without weights, with which none is private; of those whose members do what
fedavg's do, because only the hub's outer rule is another, fedavg."""


@pytest.mark.parametrize("strategy", PRIVATE)
def test_nothing_leaves_a_private_member_that_is_not_clipped(strategy, tmp_path, monkeypatch):
    """With other data nothing else is other: contributions are no longer than the clip."""
    sent, submit = [], Link.submit

    def seen(link, submission):
        sent.append(length(submission.vector))
        return submit(link, submission)

    monkeypatch.setattr(Link, "submit", seen)
    ways = itertools.product(
        ["BatchNorm", "mean", "GroupNorm"], ["mean", "local"], ["member", "hub"]
    )
    for number, (kind, buffers, where) in enumerate(ways):
        words = f"strategy={strategy}", f"buffers={buffers}", f"where={where}"
        left = []
        for shift in (0.0, 6.0):
            sent.clear()
            try:
                planned = private(Shifted((LEAKS | FINE)[kind], shift), *words)
            except ConfigError:
                break
            folder = tmp_path / f"{number} {shift}"
            folder.mkdir()
            simulation.run(planned, folder)
            left.append(unnoised(folder, planned))
            assert where == "hub" or (sent and max(sent) <= 0.01)
        if strategy in ("dga", "local-sgd"):
            assert bool(left) == (kind == "GroupNorm" or (kind, buffers) == ("BatchNorm", "mean"))
        if strategy == "sync-sgd":
            assert bool(left) == (kind == "GroupNorm")
        assert not left or left[0] == left[1]


@pytest.mark.parametrize("unit", ["member", "example"])
@pytest.mark.parametrize("kind", LEAKS | FINE)
def test_what_has_no_noise_is_refused_before_training(kind, unit):
    words = f"privacy={unit}", "buffers=local", "privacy.sampling=shuffle"
    if kind in FINE and (unit, kind) not in [("example", "untracked"), ("example", "not kept")]:
        private(Shifted(FINE[kind]), *words)
    elif kind in LEAKS or unit == "example":
        with pytest.raises(ConfigError, match=f"privacy.unit = '{unit}': ") as refused:
            private(Shifted((LEAKS | FINE)[kind]), *words)
        assert "\n" not in str(refused.value)


def late(layer, x):
    """Behind the two steps in which a private job is rehearsed."""
    if layer.calls > 4:
        layer.seen.copy_(x.mean(0))


@pytest.mark.parametrize(("change", "kept"), [(late, False), (lambda layer, x: None, True)])
def test_what_changes_late_and_has_no_noise_is_in_no_file(change, kept, tmp_path):
    planned = private(Shifted(lambda: Layer(change), 6.0), "members=1", "steps=8", "pace_s=0")
    log = MetricsLog(metrics_path(tmp_path), "m0", lambda: 0.0, 0.0)
    hub = children.HubThread(HubSocket("tcp://127.0.0.1:0"), planned.strategy.spelled, 1)
    with hub.serving():
        address = hub.transport.address
        train(planned, Place(0, "host"), address, lambda name, at: log, keeps_model=True)
    events = read_metrics(tmp_path, "event")
    said = [line["reason"] for line in events if line["event"] == "error"]
    assert (tmp_path / weights.FILE).exists() == kept == (not said)
    assert kept or "training changes '0.seen', which is in no contribution" in said[0]


def test_a_loop_of_ones_own_ends_where_something_has_no_noise():
    hub = children.HubThread(HubSocket("tcp://127.0.0.1:0"), "sync-sgd", 1)
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with hub.serving():
        table = Privacy("member", clip=1.0, noise=0.0)
        member = edgetrain.join(hub.transport.address, model, optimizer, privacy=table)

        def train():
            for number in range(2):
                children.backward(model, optimizer, 0, number)
                optimizer.step()

        with pytest.raises(ConfigError, match=r"changes '0.running_mean'.*without noise"):
            train()
        member.close()


def test_the_hub_is_not_told_the_words_of_a_private_members_error():
    hub = children.HubThread(HubSocket("tcp://127.0.0.1:0"), "sync-sgd", 1)
    model = children.model(0)
    optimizer = children.optimizer("sgd", model)
    table = Privacy("member", clip=1.0, noise=0.0)
    with (
        hub.serving(),
        pytest.raises(KeyError),
        edgetrain.join(hub.transport.address, model, optimizer, privacy=table),
    ):
        raise KeyError("Ada Lovelace")
    assert "KeyError" in str(hub.notes)
    assert "Ada" not in str(hub.notes)


# -- a job ----------------------------------------------------------------------------------------

SKEWED = """
import torch
from tiny import Tiny as Even


class Tiny(Even):
    def model(self):
        return torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))

    def batches(self, member, members, batch, seed):
        for (x,) in super().batches(member, members, batch, seed):
            yield (x + 8.0 * member,)

    def evaluate(self, model):
        return {"loss": float(model[0].running_mean.mean())}
"""


@pytest.mark.real
def test_a_jobs_figures_are_with_the_mean_and_its_table_says_so(
    tmp_path, own_imports, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    Path("skewed.py").write_text(SKEWED)
    Path("job.toml").write_text('task = "skewed:Tiny"\n')
    words = ["simulate", "job.toml", "members=2", "steps=80", "pace_s=0.1", "lr=0.01"]
    found = {}
    for more in (["strategy=fedavg"], ["strategy=fedavg", "buffers=local"], ["strategy=sync-sgd"]):
        assert main([*words, *more]) == 0
        said = capsys.readouterr().out
        (run,) = Path("runs").iterdir()
        summary = read_summary(run)
        run.rename(" ".join(more))
        found[" ".join(more)] = summary["buffers"], summary["final"]["loss"], said
    how, figure, said = found["strategy=fedavg"]
    assert (how, round(figure)) == ("mean", 4)
    assert "fedavg: normalisation statistics are the members' mean" in said
    how, figure, said = found["strategy=fedavg buffers=local"]
    assert (how, round(figure)) == ("local", 0)
    assert "fedavg: normalisation statistics are each member's own" in said
    how, figure, said = found["strategy=sync-sgd"]
    assert (how, round(figure)) == ("local", 0)
