"""The way in: three changed lines, over real sockets and processes, and what goes wrong there."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import sys
import time

import children
import numpy as np
import pytest
import torch
from every_strategy import SPELLED
from loopback import Loopback
from torch import nn
from wrong_hubs import FIRST, Plain, at_first

from edgetrain.errors import ConfigError, Diverged, EdgetrainError, HubUnreachable, Refused
from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import (
    Beat,
    Contribute,
    Join,
    Refuse,
    Reply,
    Resume,
    Start,
    Welcome,
    pack,
    unpack,
)
from edgetrain.exchange.seam import Request, Submission
from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.jobs import reading
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import folders_in, read_metrics, read_summary
from edgetrain.tasks.work import optimizer_for
from edgetrain.training import processes
from edgetrain.training.member.joining import JoinedMember, join
from edgetrain.training.member.member import Member, bind
from edgetrain.training.member.train import Place, request_of
from edgetrain.training.stopping import Stop
from edgetrain.vectors.vector import checksum


@pytest.fixture
def processes_of_ours():
    context = processes.fork_server(["torch", "edgetrain.training.member.member"])
    started = []

    def start(target, *arguments):
        started.append(processes.start(context, target.__name__, target, *arguments))
        return started[-1]

    yield start
    processes.stop_all(started)


class Lending(Link):
    """An exchange whose members ask each other for the base."""

    base_of = None


@pytest.mark.parametrize("strategy", ["fedavg", "sync-sgd"])
def test_members_that_exchange_among_themselves_can_give_the_fleets_base(strategy):
    wires = Loopback()
    with children.HubThread(wires, strategy, 1).serving():
        model = children.model(0)
        optim = children.optimizer("sgd", model)
        link = Lending(wires.connect(), time.monotonic)
        with Member.join(link, bind(model, optim), optim, Request("", "m0")) as member:
            model(torch.ones(1, 6)).sum().backward()
            member.step()
            applied, base = link.base_of()
            assert applied == member.half.applied
            assert base is (member.half.base if strategy == "fedavg" else None)


def ended(child):
    child.process.join(60)
    return child.exit_code


def train(transport, index, steps, *, seed=None, request=None, optimizer="sgd", model=None):
    """A member in this process; (parameters, member) after `steps` and close."""
    model = model or children.model(index if seed is None else seed)
    optim = children.optimizer(optimizer, model)
    link = Link(transport, time.monotonic)
    with Member.join(
        link, bind(model, optim), optim, request or Request("", f"m{index}")
    ) as member:
        for step in range(steps):
            optim.zero_grad()
            x, y = children.batch(index, step)
            dtype = next(model.parameters()).dtype
            nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
            member.step()
    return children.flat(model.float()), member


def fleet_of(steps, *settings, **hub):
    """Members as threads over memory; what each ended with, and the hub."""
    wires = Loopback()
    with children.HubThread(wires, members=len(settings), **hub).serving() as served:
        ends = [wires.connect() for _ in settings]
        found = children.in_threads(
            *[lambda i=i: train(ends[i], i, steps, **settings[i]) for i in range(len(settings))]
        )
    return found, served


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.real
def test_two_processes_end_with_one_model(processes_of_ours, tmp_path):
    hub = children.HubThread(HubSocket("tcp://127.0.0.1:0"), "dga", local_steps=2, delay=3)
    with hub.serving():
        outs = [str(tmp_path / f"{i}.npy") for i in range(2)]
        members = [
            processes_of_ours(children.three_lines, hub.transport.address, outs[i], i, 11)
            for i in range(2)
        ]
        assert [ended(child) for child in members] == [0, 0], [child.error for child in members]
    a, b = map(np.load, outs)
    assert a.tobytes() == b.tobytes() == hub.hub.base.tobytes()
    assert [closed.members for closed in hub.closed] == [("m0", "m1")] * 6
    assert hub.hub.finished
    assert {note.event for note in hub.notes} == {"joined", "started", "left"}


@pytest.mark.real
def test_a_member_killed_does_not_stop_the_other(processes_of_ours, tmp_path):
    hub = children.HubThread(
        HubSocket("tcp://127.0.0.1:0"), "local-sgd", policy={"lost_after_s": 0.3}
    )
    with hub.serving():
        outs = [str(tmp_path / f"{i}.npy") for i in range(2)]
        members = [
            processes_of_ours(children.three_lines, hub.transport.address, outs[i], i, 9)
            for i in range(2)
        ]
        hub.on_close = lambda closed: (
            os.kill(members[1].process.pid, signal.SIGKILL) if closed.round == 3 else None
        )
        assert ended(members[0]) == 0, members[0].error
        assert ended(members[1]) == -signal.SIGKILL
    assert np.load(outs[0]).tobytes() == hub.hub.base.tobytes()
    assert hub.closed[-1].members == ("m0",)
    assert [c.round for c in hub.closed] == list(range(9))
    assert ("gone", "m1") in [(note.event, note.member) for note in hub.notes]


@pytest.mark.real
def test_a_refusal_reaches_the_process_as_one_line(processes_of_ours, tmp_path):
    transport = HubSocket("tcp://127.0.0.1:0")
    hub = children.HubThread(transport, members=1, policy={"lost_after_s": 5.0})
    with hub.serving():
        other = nn.Linear(2, 2)
        with join(transport.address, other, torch.optim.SGD(other.parameters(), 0.1)) as member:
            child = processes_of_ours(
                children.three_lines, transport.address, str(tmp_path / "x"), 0, 1
            )
            assert ended(child) == 2
            assert "the hub refused: model: the job's model is" in child.error
            assert "with 6 parameters" in child.error
            assert "with 83" in child.error
            first = (
                "the first tensor that differs is 'float32 2x2 weight' and 'float32 8x6 0.weight'"
            )
            assert first in child.error
            assert member.traffic().sent_bytes > 0
            member.abandon("it has seen enough")


def test_a_hub_with_several_addresses_is_joined_at_the_one_that_answers(unused_address):
    transport, model = HubSocket("tcp://127.0.0.1:0"), nn.Linear(2, 2)
    hub = children.HubThread(transport, members=1)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    with hub.serving(), join([unused_address, transport.address], model, optim):
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
    assert len(hub.closed) == 1
    with pytest.raises(ConfigError, match=r"hub = \[\]"):
        join([], model, optim)


@pytest.mark.real
@pytest.mark.parametrize("first", FIRST)
def test_a_loop_joins_its_hub_whatever_is_at_the_first_address(first, tmp_path):
    ring, own, model = Keyring(tmp_path / "hub"), Keyring(tmp_path / "own"), nn.Linear(2, 2)
    for each in (ring, own):
        each.init(new_pair)
    ring.allow(own.pair().public, "pi-1")
    transport = HubSocket("tcp://127.0.0.1:0", gate=Gate(ring))
    hub = children.HubThread(transport, members=1, policy={"lost_after_s": 60.0})
    optim = torch.optim.SGD(model.parameters(), 0.1)
    known = {"name": "pi-1", "keys": tmp_path / "own", "hub_key": str(tmp_path / "hub" / "key")}
    with (
        at_first(first, tmp_path) as wrong,
        hub.serving(),
        join([wrong, transport.address], model, optim, **known),
    ):
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
    assert [closed.members for closed in hub.closed] == [("pi-1",)]


@pytest.mark.real
@pytest.mark.parametrize("code", ["job", "model", "session"])
def test_a_loop_without_keys_joins_behind_a_hub_that_refuses_it(code):
    transport, model = HubSocket("tcp://127.0.0.1:0"), nn.Linear(2, 2)
    hub = children.HubThread(transport, members=1, policy={"lost_after_s": 60.0})
    optim = torch.optim.SGD(model.parameters(), 0.1)
    with (
        contextlib.closing(Plain(code)) as other,
        hub.serving(),
        join([other.address, transport.address], model, optim),
    ):
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
    assert len(hub.closed) == 1


@pytest.fixture
def unused_address():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as there:
        port = there.getsockname()[1]
    return f"tcp://127.0.0.1:{port}"


# -- the loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SPELLED)
def test_every_strategy_trains_to_one_model(strategy):
    (found, hub) = fleet_of(
        7, {}, {}, {}, strategy=strategy, local_steps=2 if "sync" not in strategy else 1
    )
    parameters = {params.tobytes() for params, _ in found}
    assert len(parameters) == 1
    assert {member.steps for _, member in found} == {7}
    assert {member.index for _, member in found} == {0, 1, 2}
    assert not hub.hub.rounds.open_rounds.sizes()


LOSSY = {
    "dga": ["topk(0.25)", "topk(0.2, tensor) | q2", "small(3): fp32; low-rank(1)", "sign"],
    "local-sgd": ["*.bias: bf16; topk(0.1) | q2", "randk(0.5)"],
    "sync-sgd": ["powersgd(1)", "dgc(0.2, 0.9, 3) | q2", "low-rank(1, 2) | bf16"],
}


@pytest.mark.parametrize(
    ("strategy", "codec"), [(name, codec) for name, named in LOSSY.items() for codec in named]
)
def test_a_lossy_codec_keeps_members_equal(strategy, codec):
    rounds = {"local_steps": 1} if strategy == "sync-sgd" else {"local_steps": 2}
    rounds |= {"delay": 4} if strategy == "dga" else {}
    reply = {"reply_codec": "dgc(0.2, 0.0, 3) | q2"} if codec.startswith("dgc") else {}
    found, hub = fleet_of(12, {}, {}, strategy=strategy, codec=codec, **rounds, **reply)
    assert found[0][0].tobytes() == found[1][0].tobytes()
    if strategy != "sync-sgd":
        assert found[0][0].tobytes() == hub.hub.base.tobytes()
    started = children.flat(children.model(0))
    assert np.abs(found[0][0] - started).max() > 1e-3


def test_alone_a_member_that_sends_little_trains_as_without_a_fleet():
    """What is not sent stays in its parameters; it is given up when training ends."""
    wires, model, plain = Loopback(), children.model(0), children.model(0)
    optim, other = children.optimizer("sgd", model), children.optimizer("sgd", plain)
    codec = {"codec": "topk(0.1) | q2", "reply_codec": "fp32"}
    with children.HubThread(wires, "dga", 1, local_steps=2, delay=3, **codec).serving():
        link = Link(wires.connect(), time.monotonic)
        with Member.join(link, bind(model, optim), optim, Request("", "m0")) as member:
            for step in range(12):
                for each, steps in ((model, member), (plain, other)):
                    each.zero_grad()
                    x, y = children.batch(0, step)
                    nn.functional.cross_entropy(each(x), y).backward()
                    steps.step()
                np.testing.assert_allclose(children.flat(model), children.flat(plain), atol=1e-5)
            assert np.abs(member.half.base - children.flat(plain)).max() > 1e-3
        assert children.flat(model).tobytes() == member.half.base.tobytes()


def test_a_half_precision_member_and_its_likes_agree_on_the_master():
    models = [children.model(i).to(torch.bfloat16) for i in range(2)]
    found, hub = fleet_of(6, {"model": models[0]}, {"model": models[1]}, local_steps=2)
    assert found[0][0].tobytes() == found[1][0].tobytes()
    assert found[0][1].flat.params.tobytes() == hub.hub.base.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_looking_at_the_fleets_model_changes_nothing(dtype):
    def train(looks):
        wires, model = Loopback(), children.model(0).to(dtype)
        optim = children.optimizer("sgd", model)
        with children.HubThread(wires, "dga", 1, local_steps=4, delay=6).serving():
            link = Link(wires.connect(), time.monotonic)
            with Member.join(link, bind(model, optim), optim, Request("", "m0")) as member:
                for step in range(14):
                    x, y = children.batch(0, step)
                    optim.zero_grad()
                    nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
                    member.step()
                    for _ in range(looks):
                        before = [p.detach().clone() for p in model.parameters()]
                        with member.fleet_model():
                            shown = children.flat(model.to(dtype))
                        expected = torch.from_numpy(member.half.base.copy()).to(dtype).float()
                        np.testing.assert_array_equal(shown.astype(np.float32), expected)
                        assert all(map(torch.equal, before, model.parameters()))
        return member.flat.params.tobytes()

    assert train(looks=2) == train(looks=0)


def test_samples_may_be_counted_in_whole_numbers():
    found, hub = fleet_of(
        2, {"request": Request("", "m0", 3)}, {"request": Request("", "m1", 1)}, strategy="fedavg"
    )
    assert [closed.weight for closed in hub.closed] == [4.0, 4.0]
    assert len(found) == 2


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "many", None])
def test_a_weight_that_cannot_be_is_named(weight):
    model = children.model(0)
    optim = children.optimizer("sgd", model)
    with pytest.raises(ConfigError, match=r"weight = .*1e-9 to 1e15: how many samples"):
        join("tcp://localhost:1", model, optim, weight=weight)


def test_a_processor_that_flushes_tiny_numbers_is_refused_before_anything_is_sent():
    wires, model = Loopback(), children.model(0)
    optim = children.optimizer("sgd", model)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        link = Link(wires.connect(), time.monotonic)
        with pytest.raises(ConfigError, match=r"float32 below 1.2e-38 .*set_flush_denormal"):
            Member.join(link, bind(model, optim), optim, Request("", "m0"))
    finally:
        torch.set_flush_denormal(False)


def test_sparse_adam_is_refused_where_gradients_are_exchanged():
    def train(strategy):
        wires, model = Loopback(), nn.Embedding(6, 2, sparse=True)
        optim = torch.optim.SparseAdam(model.parameters(), 0.1)
        with children.HubThread(wires, strategy, 1).serving():
            link = Link(wires.connect(), time.monotonic)
            with Member.join(link, bind(model, optim), optim, Request("", "m0")) as member:
                optim.zero_grad()
                model(torch.tensor([1, 4])).sum().backward()
                member.step()
        return children.flat(model)

    assert np.isfinite(train("fedavg")).all()
    with pytest.raises(ConfigError, match="dense vectors, and SparseAdam takes none"):
        train("sync-sgd")
    with pytest.raises(ConfigError, match=r"SparseAdam.*use adam"):
        optimizer_for(nn.Linear(2, 2), {"name": "SparseAdam"})


def test_an_optimizer_that_wants_a_closure_is_refused_before_it_joins():
    wires, model = Loopback(), nn.Linear(2, 2)
    optim = torch.optim.LBFGS(model.parameters())
    with children.HubThread(wires, "dga", 1).serving():
        link = Link(wires.connect(), time.monotonic)
        with pytest.raises(ConfigError, match=r"LBFGS computes the loss again.*use adam or sgd"):
            Member.join(link, bind(model, optim), optim, Request("", "m0"))


@pytest.mark.parametrize("strategy", ["sync-sgd", "dga"])
def test_a_grad_scaler_exchanges_and_skips_as_it_steps_and_skips_alone(strategy):
    def train(model, optim, scaler):
        for step in range(6):
            optim.zero_grad()
            x, y = children.batch(0, step)
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if step == 3 else 1)).backward()
            scaler.unscale_(optim)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optim)
            scaler.update()
        return scaler.get_scale()

    def made():
        model = children.model(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        return model, children.optimizer("sgd", model), scaler

    plain, optim, scaler = made()
    assert train(plain, optim, scaler) == 32.0
    wires, (model, optim, scaler) = Loopback(), made()
    with children.HubThread(wires, strategy, 1).serving():
        link = Link(wires.connect(), time.monotonic)
        flat = bind(model, optim)
        with JoinedMember.join(link, flat, optim, Request("", "m0")) as member:
            member.follow(flat, [optim])
            assert train(model, optim, scaler) == 32.0
            assert member.steps == 6, "the step that was skipped is one of the member's"
            with pytest.raises(EdgetrainError, match=r"no optimizer .*scaler.step\(optimizer\)"):
                scaler.step(member)
    np.testing.assert_allclose(children.flat(model), children.flat(plain), atol=1e-6)


class Held:
    """As much of a task as says who holds how much."""

    def samples(self, member, members):
        return 10 * (member + 1) ** 2


def test_weights_follow_the_data_that_each_member_holds():
    job = reading.parse({"fleet": {"members": 3}})
    requests = [request_of(resolve(job), Place(i, "host"), Held()) for i in range(3)]
    requests = [dataclasses.replace(request, job="") for request in requests]
    settings = [{"request": request} for request in requests]
    _, hub = fleet_of(2, *settings, strategy="fedavg")
    assert [closed.weight for closed in hub.closed] == [10 + 40 + 90] * 2
    _, hub = fleet_of(2, *settings, strategy="local-sgd")
    assert [closed.weight for closed in hub.closed] == [3, 3], "where all count the same"


def test_all_start_from_the_first_members_parameters():
    found, _ = fleet_of(0, {"seed": 5}, {"seed": 6})
    assert found[0][0].tobytes() == found[1][0].tobytes()
    assert found[0][0].tobytes() in {
        children.flat(children.model(seed)).tobytes() for seed in (5, 6)
    }


@pytest.mark.parametrize("codec", ["fp32", "topk(0.25) | q2"])
def test_an_automatic_delay_is_agreed_on(codec):
    found, hub = fleet_of(60, {}, {}, strategy="dga", local_steps=1, delay=None, codec=codec)
    assert hub.hub.rounds.delay.delay > 0
    assert len({params.tobytes() for params, _ in found}) == 1


# -- what goes wrong ------------------------------------------------------------------------------


def test_an_optimizer_over_other_parameters_is_refused_before_anything_is_sent():
    wires = Loopback()
    model = children.model()
    for others, lacks in ((children.model().parameters(), 4), ([model[0].weight], 3)):
        optimizer = torch.optim.SGD(others, 0.1)
        link = Link(wires.connect(), time.monotonic)
        with pytest.raises(ConfigError, match=f"lacks {lacks} of the model's 4 parameters"):
            Member.join(link, bind(model, optimizer), optimizer, Request(""))
    assert list(wires.poll(0.0)) == []


def test_another_model_is_refused_with_both_sizes():
    wires = Loopback()
    with children.HubThread(wires, members=1).serving() as hub:
        model = children.model()
        optimizer = children.optimizer("sgd", model)
        link = Link(wires.connect(), time.monotonic)
        first = Member.join(link, bind(model, optimizer), optimizer, Request("", "a"))
        other = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        link = Link(wires.connect(), time.monotonic)
        with pytest.raises(Refused, match=r"with 83 parameters, the member's .* with 6") as caught:
            Member.join(link, bind(other, optimizer), optimizer, Request(""))
        assert caught.value.code == "model"
        first.close()
    assert hub.hub.finished


def with_frozen_layer(value):
    model = children.model(0)
    model.append(nn.Linear(3, 3).requires_grad_(False))
    model.append(nn.BatchNorm1d(3))
    with torch.no_grad():
        model[3].weight.fill_(value)
        model[4].running_mean.fill_(value)
    return model


def test_frozen_weights_that_differ_are_refused_unless_each_member_has_its_own():
    wires, refused = Loopback(), []

    def train(index, frozen="equal"):
        model = with_frozen_layer(index + 1.0)
        optim = children.optimizer("sgd", model)
        link = Link(wires.connect(), time.monotonic)
        try:
            request = Request("", f"m{index}")
            with Member.join(link, bind(model, optim, frozen), optim, request) as member:
                member.step()
        except Refused as refusal:
            assert frozen == "equal"
            refused.append(refusal)
            return train(index, "own")
        return children.flat(model[3])

    with children.HubThread(wires, "fedavg", 2).serving():
        found = children.in_threads(lambda: train(0), lambda: train(1))
    assert [refusal.code for refusal in refused] == ["fixed"]
    assert "frozen='own' if each" in str(refused[0])
    assert found[0][0] != found[1][0]
    with pytest.raises(ConfigError, match="allowed are equal, first, own"):
        bind(children.model(0), torch.optim.SGD(children.model(0).parameters(), 0.1), "any")


@pytest.mark.parametrize("strategy", ["sync-sgd", "dga"])
def test_a_layer_unfrozen_while_training_is_named(strategy):
    wires, model = Loopback(), with_frozen_layer(1.0)
    optim = children.optimizer("sgd", model)

    def train():
        link = Link(wires.connect(), time.monotonic)
        with Member.join(link, bind(model, optim), optim, Request("", "m0")) as member:
            member.step()
            model[3].requires_grad_(True)
            member.step()

    says = r"'3\.weight' has been unfrozen .*join again"
    served = children.HubThread(wires, strategy, 1).serving()
    with served, pytest.raises(ConfigError, match=says):
        train()


def test_a_compiled_and_a_plain_copy_of_a_model_train_together():
    class Wrapped(nn.Module):
        """Names its parameters as torch.compile and DistributedDataParallel do."""

        def __init__(self, inner, name):
            super().__init__()
            self.add_module(name, inner)
            self.inner = name

        def forward(self, x):
            return getattr(self, self.inner)(x)

    models = [
        {"model": Wrapped(children.model(0), "_orig_mod")},
        {"model": Wrapped(children.model(0), "module")},
        {},
    ]
    found, _ = fleet_of(3, *models)
    assert len({params.tobytes() for params, _ in found}) == 1


def test_an_unreachable_hub_is_named():
    model = children.model()
    address = HubSocket("tcp://127.0.0.1:0")
    address.close()
    with pytest.raises(HubUnreachable, match=f"nothing listens at {address.address}"):
        join(address.address, model, children.optimizer("sgd", model), timeout_s=2.0)


def joined(script):
    """A link over a script, and a member that has joined through it."""
    model = children.model()
    optimizer = children.optimizer("sgd", model)
    link = Link(script, script.clock)
    flat = bind(model, optimizer)
    return link, Member.join(link, flat, optimizer, Request(""), script.clock)


class Script:
    """A hub that says what was written down; afterwards time passes and nothing comes."""

    def __init__(self, *said):
        self.said = [pack(message) for message in said]
        self.heard = []
        self.now = 0.0
        self.coming = 0
        self.growing = 0
        self.closed = 0

    def send(self, frames):
        self.heard.append(unpack(frames))

    def receive(self, timeout_s):
        if self.said:
            return self.said.pop(0)
        self.now += timeout_s
        if self.growing > 0 and timeout_s:
            self.growing -= 1
            self.coming += 1
        return None

    def received_bytes(self):
        return self.coming

    def traffic(self):
        return Traffic(0, 0, 0, 0.0)

    def clock(self):
        return self.now

    def close(self):
        self.closed += 1


def welcome(**other):
    said = {
        "name": "m0", "index": 0, "members": 1, "strategy": "local-sgd", "local_steps": 1,
        "delay": 0, "codec": "fp32", "reply_codec": "fp32", "heartbeat_s": 1.0, "upload": False,
    }  # fmt: skip
    return Welcome(**(said | other))


def scripted(*said, patience_s=30.0):
    model = children.model()
    optimizer = children.optimizer("sgd", model)
    script = Script(*said)
    link = Link(script, script.clock, patience_s)
    return script, lambda: Member.join(
        link, bind(model, optimizer), optimizer, Request(""), script.clock
    )


def start(**other):
    said = {
        "applied": 0, "round": 0, "delay": 0, "keep": True,
        "checksum": checksum(children.flat(children.model())),
    }  # fmt: skip
    return Start(**(said | other))


def test_a_hub_that_never_answers_is_given_up_after_the_time_that_was_asked_for():
    script, make = scripted(patience_s=3.0)
    with pytest.raises(HubUnreachable, match="silent for 4 s"):
        make()
    assert [type(message) for message in script.heard] == [Join]
    assert script.closed == 1


def test_a_hub_that_falls_silent_is_given_up_after_twenty_beats():
    script, make = scripted(welcome(heartbeat_s=2.0), start())
    member = make()
    with pytest.raises(HubUnreachable, match="silent for 41 s"):
        member.step()
    assert script.now == pytest.approx(41)


def test_beats_and_bytes_on_their_way_are_signs_of_life():
    script, make = scripted(welcome(), start())
    member = make()
    script.growing = 100
    with pytest.raises(HubUnreachable, match="silent for 21 s"):
        member.step()
    assert script.now == pytest.approx(121)


def test_a_base_that_arrived_damaged_is_noticed():
    _, make = scripted(welcome(), start(checksum=1))
    with pytest.raises(Diverged, match="arrived damaged"):
        make()


@pytest.mark.parametrize(
    ("refuse", "error"),
    [(Refuse("session", "who?"), Refused), (Refuse("diverged", "1 and 2"), Diverged)],
)
def test_a_refusal_in_training_is_raised(refuse, error):
    script, make = scripted(welcome(), start(), Beat())
    member = make()
    script.said.append(pack(refuse))
    with pytest.raises(error, match=r"who\?|1 and 2"):
        member.step()


def test_whoever_is_not_known_any_more_comes_back_and_sends_again_what_was_not_answered():
    script = Script(welcome(), start())
    link, member = joined(script)
    script.said += [pack(Refuse("unknown", "who?"))] * 2
    with pytest.raises(HubUnreachable):
        member.step()
    *_, resume = script.heard
    assert (resume.applied, resume.submitted, resume.oldest) == (0, 0, 0)
    assert resume.session == script.heard[0].session > 0
    script.said += [
        pack(Start(0, 1, 0, 0, True, 0, attempt=9)),  # an answer to something else
        pack(welcome(epoch=3)),
        pack(Start(0, 1, 0, 0, True, 0, attempt=1)),
        pack(Reply(0, 0, 1, 1, 0, 0, True, children.flat(children.model()).tobytes())),
    ]
    link.wait(0)
    assert isinstance(script.heard[-1], Contribute)
    assert script.heard[-1].round == 0
    assert link.epoch == 3


def test_coming_back_needs_no_package_for_masks(monkeypatch):
    monkeypatch.setitem(sys.modules, "edgetrain.exchange.masks.masker", None)
    script = Script(welcome(), start(), Refuse("unknown", "who?"))
    link, member = joined(script)
    script.said += [pack(welcome(epoch=1)), pack(Start(0, 0, 0, 0, True, 0, attempt=1))]
    with pytest.raises(HubUnreachable):  # there is no reply, but it has come back
        member.step()
    assert isinstance(script.heard[-1], Contribute)
    assert link.epoch == 1


class Cut(Script):
    """A script over a transport that can connect again."""

    def __init__(self, *said):
        super().__init__(*said)
        self.reconnected = []
        self.connections, self.addresses = 1, {"": ""}

    def reconnect(self):
        self.reconnected.append(self.now)
        self.connections = 1

    def traffic(self):
        return Traffic(0, 0, 0, 0.5)


@pytest.mark.parametrize("round_trip_s", [0.001, 0.6, 8.0])
def test_patience_follows_the_round_trip(round_trip_s):
    cut = Cut(welcome(heartbeat_s=0.5), start())
    cut.traffic = lambda: Traffic(0, 0, 0, round_trip_s)
    _, member = joined(cut)
    with pytest.raises(HubUnreachable):
        member.step()
    assert cut.reconnected[0] == pytest.approx(4 * (0.5 + round_trip_s), abs=1.1)


def test_after_silence_the_connection_is_made_anew_with_growing_pauses():
    cut = Cut(welcome(), start())
    _, member = joined(cut)
    with pytest.raises(HubUnreachable, match="silent for 601 s"):
        member.step()
    pauses = np.diff([0.0, *cut.reconnected])
    assert pauses[0] == pytest.approx(4 * 1.5, abs=1.1), "four beats and four round trips"
    assert all(b >= a for a, b in itertools.pairwise(pauses))
    assert pauses[-1] == pytest.approx(60, abs=1.1)
    assert sum(isinstance(m, Resume) for m in cut.heard) == len(cut.reconnected)


def test_a_hub_that_does_not_answer_is_away_until_it_does():
    cut, link, member = renewable()
    away = []
    link.interrupt = lambda: away.append((cut.now, link.away_s))
    with pytest.raises(HubUnreachable):
        member.step()
    asked = cut.reconnected[0]
    assert not any(seconds for now, seconds in away if now < asked), "a question comes first"
    assert all(seconds == now for now, seconds in away if now > asked)
    cut.said += [pack(welcome()), pack(Start(0, 1, 0, 0, True, 0, len(cut.reconnected)))]
    link.poll()
    assert link.away_s == 0.0


def test_a_member_that_waits_for_others_knows_how_many_are_there():
    seen = []
    script = Script(welcome(), Beat(here=1), Beat(here=3), start())
    model = children.model()
    optimizer = children.optimizer("sgd", model)
    link, stop = Link(script, script.clock), Stop()
    stop.alive = lambda: seen.append(link.members_here)
    Member.join(link, bind(model, optimizer), optimizer, Request(""), script.clock, stop=stop)
    assert [count for count, _ in itertools.groupby(seen)] == [0, 1, 3]


def renewable(*said):
    """A member that trains over a transport that can connect again, and its link."""
    cut = Cut(welcome(), start(), *said)
    return cut, *joined(cut)


def resumes(cut):
    return [message for message in cut.heard if isinstance(message, Resume)]


def test_over_another_connection_than_before_it_says_where_it_is():
    cut, link, _ = renewable()
    link.poll()
    assert not resumes(cut)
    cut.connections += 1
    cut.said.append(pack(Beat()))
    link.poll()
    link.poll()
    assert len(resumes(cut)) == 1
    assert cut.reconnected == []


def test_two_connections_between_two_looks_are_not_taken_for_the_first():
    cut, _, member = renewable()
    anew = cut.reconnect

    def broken_at_once():
        anew()
        cut.connections = 2  # the one that carried its question, and the one after

    cut.reconnect = broken_at_once
    with pytest.raises(HubUnreachable):
        member.step()
    assert len(resumes(cut)) == 2 * len(cut.reconnected) > 0


REPLY = children.flat(children.model()).tobytes()


@pytest.mark.parametrize(
    ("rounds", "asks"),
    [
        ([(0, 0, 1), (1, 0, 1)], False),
        ([(1, 0, 1)], True),
        ([(0, 0, 1), (2, 0, 1)], True),
        ([(0, 1, 2)], True),
        ([(0, 0, 2), (1, 0, 2)], True),
    ],
)
def test_a_reply_before_one_that_should_have_come_first_is_a_loss(rounds, asks, monkeypatch):
    cut, link, _ = renewable()
    each = -(-len(REPLY) // 4 // rounds[0][2])
    monkeypatch.setattr(link.inbox.codec, "part_elements", each)
    for round, part, parts in rounds:
        payload = REPLY[4 * each * part : 4 * each * (part + 1)]
        cut.said.append(pack(Reply(round, part, parts, 1, 0, 0, True, payload)))
    link.poll()
    assert bool(resumes(cut)) == asks


def test_a_contribution_to_a_round_that_is_not_settled_is_kept_until_it_is_merged():
    cut, link, member = renewable()
    for round in range(2):
        link.submit(Submission(round, member.flat.params, 1.0, 0, 0))
        cut.said.append(pack(Reply(round, 0, 1, 1, 0, 0, round == 1, REPLY)))
    link.poll()
    assert link.outbox.kept == (0,)
    cut.said.append(pack(Beat(0, 0)))
    link.poll()
    assert link.outbox.kept == (0,)
    cut.said.append(pack(Beat(0, 1)))
    link.poll()
    assert link.outbox.kept == ()


def test_a_join_that_nobody_answers_is_sent_again_over_another_connection():
    cut = Cut()
    model = children.model()
    optimizer = children.optimizer("sgd", model)
    with pytest.raises(HubUnreachable, match="silent for"):
        Member.join(Link(cut, cut.clock), bind(model, optimizer), optimizer, Request(""), cut.clock)
    joins = [message for message in cut.heard if isinstance(message, Join)]
    assert len(joins) == 1 + len(cut.reconnected) == 2
    assert len({join.session for join in joins}) == 1


def test_leaving_in_an_error_says_which():
    script, make = scripted(welcome(), start())
    with pytest.raises(RuntimeError), make():
        raise RuntimeError("out of\nmemory")
    assert script.heard[-1].reason == "RuntimeError: out of memory"
    assert script.closed == 1


def test_no_step_after_draining_and_close_works_twice():
    script, make = scripted(welcome(), start())
    member = make()
    member.drain()
    with pytest.raises(EdgetrainError, match="drained"):
        member.step()
    member.close()
    member.close()
    assert script.closed == 1
    assert not any(isinstance(message, Contribute) for message in script.heard)


def test_parameters_that_are_not_finite_stop_the_member_before_they_reach_the_hub():
    script, make = scripted(welcome(), start())
    member = make()
    member.flat.params[0] = np.nan
    with pytest.raises(Diverged, match="not finite after step 1"):
        member.step()
    assert not any(isinstance(message, Contribute) for message in script.heard)


def test_a_link_needs_no_socket_and_no_model():
    script = Script(welcome(upload=True), start())
    params = np.arange(5, dtype=np.float32)
    found = Link(script, script.clock).join(Request("model"), params, checksum(params))
    assert found.name == "m0"
    assert bytes(script.heard[1].payload) == params.tobytes()


# -- a run folder of one's own --------------------------------------------------------------------


def take_six_steps(member, model, optim):
    for step in range(6):
        children.backward(model, optim, 0, step)
        member.step()


def test_a_loop_of_ones_own_has_a_run_folder(tmp_path):
    wires = Loopback()
    with children.HubThread(wires, members=1, local_steps=2).serving():
        model = children.model(0)
        optim = children.optimizer("sgd", model)
        link = Link(wires.connect(), time.monotonic)
        with Member.join(link, bind(model, optim), optim, Request("", "m0", job="mine")) as member:
            member.record(tmp_path / "runs")
            take_six_steps(member, model, optim)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-mine-m0")
    steps, exchanges = (list(read_metrics(folder, kind)) for kind in ("step", "exchange"))
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["round"] for line in exchanges] == [0, 1, 2]
    assert all(line["loss"] is None for line in steps)
    summary = read_summary(folder)
    assert (summary["steps"], summary["strategy"], summary["members"]) == (6, "local-sgd", 1)
    assert summary["status"] == "finished"
    parts = sum(summary[f"{part}_s"] for part in ("compute", "wait", "overhead", "eval", "end"))
    assert 0 < parts <= summary["seconds_per_step"] + 1e-6
    assert summary["began"].endswith("Z")
    assert folders_in(tmp_path / "runs") == [folder]


@pytest.mark.parametrize("codec", ["fp32", "topk(0.1) | q2"])
def test_exchanges_say_what_they_sent_and_received(codec, tmp_path):
    """As it was encoded, all parts of it, without headers."""
    wires = Loopback()
    with children.HubThread(wires, members=1, local_steps=2, codec=codec).serving():
        model = children.model(0)
        optim = children.optimizer("sgd", model)
        flat = bind(model, optim)
        link = Link(wires.connect(), time.monotonic)
        with Member.join(link, flat, optim, Request("", "m0", job="mine")) as member:
            member.record(tmp_path / "runs")
            take_six_steps(member, model, optim)
    (folder,) = (tmp_path / "runs").iterdir()
    lines = list(read_metrics(folder, "exchange"))
    assert [line["round"] for line in lines[:3]] == [0, 1, 2]
    assert all(line["decode_s"] >= 0 for line in lines)
    for key in ("sent_bytes", "received_bytes"):
        payloads = [line[key] for line in lines]
        if codec == "fp32":
            assert payloads == [4 * flat.elements] * 3
        else:
            assert all(0 < each < 4 * flat.elements for each in payloads)


def test_a_folder_that_cannot_be_written_is_said_before_the_hub_is_asked(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="runs"):
        join("tcp://127.0.0.1:1", children.model(0), None, runs=tmp_path / "runs")
