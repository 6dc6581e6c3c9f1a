"""The exchange behind an optimizer's own step: what a loop may do, and what it is told not to."""

from __future__ import annotations

import time
from contextlib import contextmanager

import children
import numpy as np
import pytest
import torch
from loopback import Loopback
from torch import nn

from edgetrain.errors import ConfigError, Diverged, EdgetrainError
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.work import Tuning, tune
from edgetrain.training.member.joining import JoinedMember
from edgetrain.training.member.member import bind
from edgetrain.training.member.optimizers import plain_optimizers

STRATEGIES = ("sync-sgd", "fedprox(0.5)", "fedavg", "dga")


@contextmanager
def alone(strategy="fedavg", optimizers=None, model=None, **hub):
    """A member that is the whole fleet: (model, its optimizer, member)."""
    wires, model = Loopback(), model or children.model(0)
    optims = optimizers(model) if optimizers else [children.optimizer("sgd", model)]
    with children.HubThread(wires, strategy, 1, **hub).serving():
        flat = bind(model, optims)
        link = Link(wires.connect(), time.monotonic)
        joined = JoinedMember.join(link, flat, optims[0], Request("", "m0"))
        with joined.follow(flat, optims) as member:
            yield model, optims if optimizers else optims[0], member


def compute(model, optimizer, step=0, index=0):
    """A batch's gradient."""
    optimizer.zero_grad()
    x, y = children.batch(index, step)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def number(member):
    """Whose data it has: places are given in the order of arrival."""
    return int(member.name[1:])


def fleet(strategy, loops, **hub):
    """Members as threads, each of which runs its loop(model, optimizer, member); what each ended
    with, and the hub."""
    wires = Loopback()

    def train(index, loop):
        model = children.model(0)
        optim = children.optimizer("sgd", model)
        flat, link = bind(model, optim), Link(wires.connect(), time.monotonic)
        with JoinedMember.join(link, flat, optim, Request("", f"m{index}")) as member:
            member.follow(flat, [optim])
            loop(model, optim, member)
        return children.flat(model), member

    with children.HubThread(wires, strategy, len(loops), **hub).serving() as served:
        found = children.in_threads(*[lambda i=i: train(i, loops[i]) for i in range(len(loops))])
    return found, served


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bare_step_exchanges_as_the_members_does(strategy):
    def train(call):
        def loop(model, optim, member):
            for step in range(7):
                compute(model, optim, step, number(member))
                (optim if call == "optimizer" else member).step()

        local_steps = 1 if strategy == "sync-sgd" else 2
        return fleet(strategy, [loop, loop], local_steps=local_steps)

    (found, hub), (expected, _) = train("optimizer"), train("member")
    for (params, member), (wanted, _) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(params, wanted)
        assert member.steps == 7
    assert {member for closed in hub.closed for member in closed.members} == {"m0", "m1"}


def test_a_compiled_step_exchanges_as_a_plain_one_does():
    class Plain(torch.optim.Optimizer):  # torch's own make the compiler load all it has
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    def train(compiled):
        with alone(local_steps=1, optimizers=lambda m: [Plain(m.parameters())]) as (
            model,
            found,
            member,
        ):
            optim = found[0]
            step = torch.compile(optim.step, backend="eager") if compiled else optim.step
            for number in range(3):
                compute(model, optim, number)
                step()
            assert member.steps == 3
        return children.flat(model)

    np.testing.assert_array_equal(train(True), train(False))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_closure_runs_before_the_exchange(strategy):
    def loops(uses_closure):
        def loop(model, optim, member):
            for step in range(5):
                if uses_closure:
                    loss = optim.step(lambda step=step: compute(model, optim, step, number(member)))
                    assert loss > 0
                else:
                    compute(model, optim, step, number(member))
                    optim.step()

        return [loop, loop]

    found, _ = fleet(strategy, loops(True))
    expected, _ = fleet(strategy, loops(False))
    for (params, _), (wanted, _) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(params, wanted)


class Inherits(torch.optim.SGD):
    """Steps within a step."""

    def step(self, closure=None):
        """Through the class above."""
        return super().step(closure)


def test_a_subclass_that_calls_its_parent_takes_one_step():
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch's wrapper around the parent's step
    with alone(optimizers=lambda m: [Inherits(m.parameters(), 0.1)]) as (model, (optim,), member):
        for step in range(3):
            compute(model, optim, step)
            optim.step()
        assert member.steps == member.half.round == 3


class Fails(torch.optim.SGD):
    """Raises in the middle of a step, if told to."""

    fails = False

    def step(self, closure=None):
        """Or not."""
        if self.fails:
            raise ZeroDivisionError
        return super().step(closure)


def test_after_a_step_that_raised_the_next_one_exchanges():
    with alone(optimizers=lambda m: [Fails(m.parameters(), 0.1)]) as (model, (optim,), member):
        compute(model, optim)
        optim.fails = True
        with pytest.raises(ZeroDivisionError):
            optim.step()
        with pytest.raises(ZeroDivisionError):
            optim.step(lambda: 1 / 0)
        optim.fails = False
        optim.step()
        assert member.steps == member.half.round == 1


@pytest.mark.parametrize("first", ["member", "optimizer"])
def test_both_calls_in_a_loop_are_refused_before_the_second_step(first):
    with alone() as (model, optim, member):
        one, other = (member, optim) if first == "member" else (optim, member)
        compute(model, optim)
        one.step()
        before = children.flat(model)
        with pytest.raises(EdgetrainError, match="two steps for one batch"):
            other.step()
        np.testing.assert_array_equal(children.flat(model), before)
        one.step()
        assert member.steps == 2


def test_a_step_while_looking_at_the_fleets_model_is_refused():
    with alone("dga", local_steps=2, delay=2) as (model, optim, member):
        for _ in range(3):
            compute(model, optim)
            optim.step()
        before = children.flat(model)
        for step in (optim.step, member.step):
            with member.fleet_model(), pytest.raises(EdgetrainError, match=r"within fleet_model"):
                step()
        np.testing.assert_array_equal(children.flat(model), before)
        optim.step()


def test_a_member_without_a_step_says_so_and_the_model_stays():
    with alone() as (model, optim, member):
        other = torch.optim.SGD(model.parameters(), 0.1)
        compute(model, optim)
        with pytest.raises(EdgetrainError, match="SGD that did not join"):
            other.step()
        with pytest.raises(EdgetrainError, match=r"took no step.*optimizer that the loop steps"):
            member.close()


def test_after_close_the_optimizer_and_the_tensors_are_ordinary(tmp_path):
    with alone() as (model, optim, member):
        compute(model, optim)
        optim.step()
        torch.save(member.state_dict(), tmp_path / "copies")
        torch.save({"0.bias": model[0].bias.detach()}, tmp_path / "views")
    copies = torch.load(tmp_path / "copies", weights_only=True)
    assert {name: t.untyped_storage().nbytes() for name, t in copies.items()} == {
        name: 4 * t.numel() for name, t in model.state_dict().items()
    }
    assert (tmp_path / "views").stat().st_size > 83 * 4
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for p in model.parameters()}  # fmt: skip
    assert sorted(storages.values()) == sorted(4 * p.numel() for p in model.parameters())
    compute(model, optim)
    optim.step()
    assert member.steps == 1


def test_a_loop_that_failed_leaves_an_ordinary_optimizer_behind():
    def fail(model, optim, member):
        compute(model, optim)
        optim.step()
        member.abandon("enough")
        with pytest.raises(EdgetrainError, match="has left the fleet: no step may follow"):
            optim.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), alone() as (model, optim, member):
        fail(model, optim, member)
    before = children.flat(model)
    optim.step()
    assert np.abs(children.flat(model) - before).max() > 0
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == {
        4 * p.numel() for p in model.parameters()
    }


# -- several optimizers -------------------------------------------------------------------------


def halves(model):
    return [torch.optim.Adam(model[0].parameters(), 0.01), children.optimizer("sgd", model[2])]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers_step_as_they_would_alone(strategy, together):
    """Alone in its fleet a member trains as without one; fedprox pulls towards a base that is where
    the step began."""
    plain = children.model(0)
    others = halves(plain)

    def train(model, optims):
        for step in range(6):
            for optim in optims:
                optim.zero_grad()
            x, y = children.batch(0, step)
            if together:
                nn.functional.cross_entropy(model(x), y).backward()
            for optim, layer in zip(optims, (model[0], model[2]), strict=True):
                if not together:
                    layer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward(inputs=[*layer.parameters()])
                optim.step()

    train(plain, others)
    with alone(strategy, optimizers=halves) as (model, optims, member):
        train(model, optims)
        assert member.steps == 6
        assert member.half.round == (12 if strategy == "sync-sgd" else 6)
    np.testing.assert_allclose(children.flat(model), children.flat(plain), atol=1e-6)


def test_several_optimizers_with_a_lossy_gradient_are_refused():
    lossy = {"optimizers": halves, "codec": "topk(0.1)"}
    with (
        pytest.raises(ConfigError, match=r"2 optimizers, sync-sgd and a lossy codec"),
        alone("sync-sgd", **lossy),
    ):
        pass


def test_what_is_no_optimizer_is_named():
    optim = children.optimizer("sgd", children.model(0))
    for given, words in (("adam", "optimizer = str"), ([], "0 opt"), ([optim, optim], "2 opt")):
        with pytest.raises(ConfigError, match=words):
            plain_optimizers(given)

    class Around(torch.optim.Optimizer):
        """As Accelerate's and Lightning's: nothing of its own."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

    class Private(torch.optim.Optimizer):
        """As Opacus': without what torch calls hooks by."""

        def __init__(self, optimizer):
            self.original_optimizer = optimizer

    assert plain_optimizers(Around(Around(optim))) == (optim,)
    assert plain_optimizers(Around(Private(optim))) == (optim,)


def test_parameters_that_are_not_the_models_are_refused_by_shape():
    model, margin = children.model(0), nn.Parameter(torch.zeros(3, 4))
    optim = torch.optim.SGD([*model.parameters(), margin], 0.1)
    with pytest.raises(ConfigError, match=r"1 parameters that are not the model's.*\(3, 4\)"):
        bind(model, optim)
    margin.requires_grad_(False)
    bind(model, optim)


# -- between backward and step ------------------------------------------------------------------


def test_clipping_sees_the_fleets_gradient():
    """Gradients 10 and -0.5 to length 1: the mean, 4.75, is cut, as in DDP and `train.clip`."""

    def train(exchanges):
        wires = Loopback()

        def run(index):
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            optim = torch.optim.SGD(model.parameters(), lr=1.0)
            flat, link = bind(model, optim), Link(wires.connect(), time.monotonic)
            with JoinedMember.join(link, flat, optim, Request("", f"m{index}")) as member:
                member.follow(flat, [optim])
                (model.weight * (10.0 if number(member) else -0.5)).sum().backward()
                if exchanges:
                    member.exchange_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optim.step()
            return model.weight.item()

        with children.HubThread(wires, "sync-sgd", 2).serving():
            return children.in_threads(lambda: run(0), lambda: run(1))

    assert train(True) == pytest.approx([-1.0, -1.0], abs=1e-6)
    assert train(False) == pytest.approx([-0.25, -0.25], abs=1e-6), "each cuts its own"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", ["step", "member", "closure", "scaler", "accumulates"])
def test_gradients_exchanged_before_clipping_step_as_a_jobs_do(strategy, way):
    """Bit for bit `train.clip`, which works within the optimizer's step."""

    def jobs(model, optim, member):
        tune(optim, Tuning(clip=0.3))
        for step in range(4):
            backward(model, optim, member, step)
            optim.step()

    def own(model, optim, member):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=way == "scaler")

        def exchange():
            member.exchange_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)

        def closure(step):
            loss = backward(model, optim, member, step)
            exchange()
            return loss

        for step in range(4):
            if way == "closure":
                assert optim.step(lambda step=step: closure(step)) > 0
                continue
            backward(model, optim, member, step, scaler)
            scaler.unscale_(optim)
            exchange()
            if way == "member":
                member.step()
            else:
                scaler.step(optim)
            scaler.update()

    def backward(model, optim, member, step, scaler=None):
        optim.zero_grad()
        parts = 2 if way == "accumulates" else 1
        for part in range(parts):
            x, y = children.batch(number(member), step * parts + part)
            loss = nn.functional.cross_entropy(model(x), y) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    (found, _), (wanted, hub) = fleet(strategy, [own] * 2), fleet(strategy, [jobs] * 2)
    assert [params.tobytes() for params, _ in found] == [params.tobytes() for params, _ in wanted]
    assert len(hub.closed) == 4


@pytest.mark.parametrize("strategy", ["sync-sgd", "fedavg"])
def test_each_of_several_optimizers_exchanges_its_own_gradients_before_its_step(strategy):
    def train(early):
        with alone(strategy, optimizers=halves) as (model, optims, member):
            for step in range(3):
                for each in optims:
                    compute(model, each, step)
                    if early:
                        member.exchange_gradients(each)
                    each.step()
                compute(model, optims[0], step)
                if early:
                    member.exchange_gradients()
                for each in optims:
                    each.step()
            rounds = member.half.round
        return children.flat(model), rounds

    (found, rounds), (wanted, expected) = train(True), train(False)
    np.testing.assert_array_equal(found, wanted)
    assert rounds == expected


def test_gradients_that_cannot_be_exchanged_now_are_told_in_a_line():
    with alone("sync-sgd", model=children.model(0)) as (model, optim, member):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        compute(model, optim)
        with pytest.raises(ConfigError, match="this SGD did not join"):
            member.exchange_gradients(torch.optim.SGD(model.parameters(), 0.1))
        member.exchange_gradients()
        with pytest.raises(ConfigError, match=r"exchanged already.*once a step"):
            member.exchange_gradients()
        optim.step()
        compute(model, optim, 1)
        member.exchange_gradients()
        with pytest.raises(ConfigError, match=r"before they were computed.*in the closure"):
            optim.step(lambda: compute(model, optim, 1))
        optim.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(children.batch(0, 2)[0]),
                                                 children.batch(0, 2)[1])).backward()  # fmt: skip
        member.exchange_gradients()
        with pytest.raises(ConfigError, match=r"or unscaled.*behind scaler.unscale_"):
            scaler.step(optim)
        assert member.steps == 1
        before = children.flat(model)
        compute(model, optim, 3)
        model[0].weight.grad[0, 0] = float("nan")
        member.exchange_gradients()
        with pytest.raises(Diverged, match="not finite"):
            optim.step()
        np.testing.assert_array_equal(children.flat(model), before)


# -- a scaler that skips ------------------------------------------------------------------------


def with_scaler(bad, early=False):
    """A loop with a scaler, in which the gradient of one batch of member 1 is not finite."""

    def loop(model, optim, member):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(6):
            optim.zero_grad()
            x, y = children.batch(number(member), step)
            loss = nn.functional.cross_entropy(model(x), y)
            is_bad = bad and number(member) == 1 and step == 2
            scaler.scale(loss * (float("inf") if is_bad else 1)).backward()
            scaler.unscale_(optim)
            if early:
                member.exchange_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optim)
            scaler.update()
        assert member.steps == 6

    return loop


@pytest.mark.parametrize("early", [False, True])
def test_under_sync_sgd_a_skipped_step_takes_the_others_mean(early):
    """What all would do if member 1 had not been there for that batch."""
    found, hub = fleet("sync-sgd", [with_scaler(True, early)] * 3)
    assert len({params.tobytes() for params, _ in found}) == 1
    assert [closed.weight for closed in hub.closed] == [3, 3, 2, 3, 3, 3]

    model = children.model(0)
    optim = children.optimizer("sgd", model)
    for step in range(6):
        grads = []
        for index in range(3):
            compute(model, optim, step, index)
            if not early:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (index, step) != (1, 2):
                grads.append([p.grad.clone() for p in model.parameters()])
        for p, *each in zip(model.parameters(), *grads, strict=True):
            p.grad = sum(each) / len(each)
        if early:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
    np.testing.assert_allclose(found[0][0], children.flat(model), atol=1e-6)


@pytest.mark.parametrize("strategy", ["fedavg", "dga"])
def test_a_skipped_step_is_a_step_that_does_not_move(strategy):
    found, hub = fleet(strategy, [with_scaler(True)] * 2, local_steps=2)
    assert found[0][0].tobytes() == found[1][0].tobytes()
    assert [closed.members for closed in hub.closed] == [("m0", "m1")] * 3, "nobody is behind"
    fair, _ = fleet(strategy, [with_scaler(False)] * 2, local_steps=2)
    assert np.abs(found[0][0] - fair[0][0]).max() > 1e-4


# -- unequal numbers of steps -------------------------------------------------------------------


def steps_of(count, waits=True):
    def loop(model, optim, member):
        for step in range(count):
            compute(model, optim, step, number(member))
            optim.step()
        if waits:
            member.wait_for_fleet()
            assert set(member.state_dict()) == set(model.state_dict())
            with pytest.raises(EdgetrainError, match="has waited for the fleet"):
                optim.step()

    return loop


@pytest.mark.parametrize(("strategy", "local_steps", "delay"), [
    ("sync-sgd", 1, 0), ("fedavg", 1, 0), ("fedavg", 3, 0), ("dga", 2, 5), ("dga", 4, 2),
    ("dga(predict)", 3, 3), ("fedprox(0.5)", 2, 0), ("scaffold", 2, 0),
])  # fmt: skip
def test_members_that_wait_for_the_fleet_end_with_one_model(strategy, local_steps, delay):
    found, hub = fleet(
        strategy, [steps_of(n) for n in (4, 9, 7)], local_steps=local_steps, delay=delay
    )
    assert len({params.tobytes() for params, _ in found}) == 1
    assert [member.steps for _, member in found] == [4, 9, 7]
    if strategy != "sync-sgd":
        params = found[0][0]
        assert params.tobytes() == hub.hub.base[: params.size].tobytes()


def test_rounds_of_the_others_are_their_mean_alone():
    """After the first member's last step the second trains as if it were alone."""
    found, hub = fleet("fedavg", [steps_of(2), steps_of(5, waits=False)])
    assert [closed.weight for closed in hub.closed][:5] == [2, 2, 1, 1, 1]
    stays, _ = fleet("fedavg", [steps_of(2, waits=False), steps_of(5, waits=False)])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[1][0], stays[1][0])
    assert np.abs(stays[0][0] - stays[1][0]).max() > 1e-3, "who leaves sooner lacks the rest"


def test_a_member_says_that_the_fleet_shrank_before_it_ended(caplog):
    fleet("fedavg", [steps_of(2, waits=False), steps_of(5, waits=False)])
    said = [record.getMessage() for record in caplog.records if "went on" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("m1: the fleet went on for 3 rounds with fewer than its 2 members")


# -- tensors that cannot be bound ---------------------------------------------------------------


def test_lazy_meta_and_shared_tensors_are_refused_before_anything_moves():
    shared = torch.zeros(3, 4)
    cases = {
        "has no shape yet": nn.Sequential(nn.LazyLinear(3)),
        "on the meta device": nn.Linear(3, 2, device="meta"),
        "elements of 'a' and 'a' share": nn.ParameterDict({"a": torch.zeros(1, 3).expand(4, 3)}),
        "elements of 'a' and 'b' share": nn.ParameterDict({"a": shared, "b": shared[1:]}),
        "memory that processes share": nn.Linear(3, 2).share_memory(),
    }
    for words, model in cases.items():
        with pytest.raises(ConfigError, match=words):
            FlatModel(model)
    columns = nn.ParameterDict({"a": shared[:, :2], "b": shared[:, 2:]})
    assert FlatModel(columns).elements == 12
