"""Members that lose power and start again from their checkpoint: what they go on with, and what
the fleet makes of it."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import time
from itertools import islice
from pathlib import Path

import children
import numpy as np
import pytest
import torch
from command_line import running, write_tiny
from hub_runs import free_port, hub_folder, journal_of, wait_for_rounds
from loopback import Loopback
from torch import nn

from edgetrain import tasks
from edgetrain.errors import ConfigError, HubUnreachable, Refused
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.member.checkpoint import Keep, Sparing
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.runs.folder import read_metrics
from edgetrain.tasks import batches_from
from edgetrain.training import processes
from edgetrain.training.member.keeping import keeping_of
from edgetrain.training.member.member import Member, bind


class Life:
    """One life of one member: its batches are children.batch(index, number)."""

    def __init__(
        self, wires, index, folder=None, *, every=1, optimizer="sgd", job="", model=None, stop=None
    ):
        self.index, self.batches, self.now = index, [], 0
        self.model = model or children.model(0)
        self.optimizer = children.optimizer(optimizer, self.model)
        keeping = None
        if folder is not None:
            keep = Keep(folder, Sparing(float(every), 1.0, 1e15))
            keeping = keeping_of(
                keep, f"m{index}", self.model, self.optimizer, lambda: float(self.now)
            )
        self.keeper = keeping and keeping.keeper
        self.member = Member.join(
            Link(wires.connect(), time.monotonic),
            self.bound(),
            self.optimizer,
            Request("", f"m{index}", job=job),
            keeping=keeping,
            stop=stop,
        )

    def bound(self):
        return bind(self.model, self.optimizer)

    def batch(self, number):
        return children.batch(self.index, number)

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)

    def step(self):
        self.now += 1
        number = self.member.steps
        self.optimizer.zero_grad()
        self.loss(*self.batch(number)).backward()
        self.batches.append(number)
        self.member.step()

    def run(self, steps, until=math.inf):
        """Its steps of a job of so many, or as many as are left `until` its power goes."""
        for _ in range(self.member.begins_at, min(steps, until)):
            self.step()
        if until < steps:
            self.member.vanish()
        else:
            self.member.close()
        return self

    @property
    def bits(self):
        return children.flat(self.model).tobytes()


class Noisy(Life):
    """Draws from torch's own generator, as dropout does. One of them in a process."""

    def loss(self, x, y):
        return super().loss(x, y) * (1 + torch.rand(()))


class Normalised(Life):
    """Its running statistics are the fleet's mean; the inputs of each member lie elsewhere."""

    def __init__(self, *args, **kwargs):
        torch.manual_seed(0)
        layers = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)
        super().__init__(*args, model=nn.Sequential(*layers), **kwargs)

    def bound(self):
        return bind(self.model, self.optimizer, buffers="mean")

    def batch(self, number):
        x, y = super().batch(number)
        return x + (4.0 if self.index else -4.0), y

    @property
    def statistics(self):
        return self.model[0].running_mean.clone(), self.model[0].running_var.clone()


class Double(Life):
    """A model whose bits the flat vector, which is float32, does not have."""

    dtype = torch.float64

    def __init__(self, *args, **kwargs):
        super().__init__(*args, model=children.model(0).to(self.dtype), **kwargs)

    def batch(self, number):
        x, y = super().batch(number)
        return x.to(self.dtype), y


class Half(Double):
    dtype = torch.bfloat16


def fleet(folder, steps, kills, strategy, *, others=1, lives=Life, while_dead=None, every=7, **hub):
    """A member that loses power after so many steps of the job, and others that do not.

    Its lives, the others, the hub.
    """
    wires = Loopback()
    folder.mkdir()
    optimizer = hub.pop("optimizer", "sgd")
    policy = {"lost_after_s": 60.0} | hub.pop("policy", {})
    journal = Journal(folder / "journal")
    rounds = {} if strategy == "sync-sgd" else {"local_steps": 2}
    served = children.HubThread(
        wires, strategy, 1 + others, policy=policy, journal=journal, **(rounds | hub)
    )

    def first():
        found = []
        for kill in [*kills, math.inf]:
            life = lives(wires, 0, folder / "m0", every=every, optimizer=optimizer)
            found.append(life.run(steps, kill))
            if kill < steps and while_dead:
                while_dead(served)
        return found

    with served.serving():
        found, *rest = children.in_threads(
            first,
            *[
                lambda i=i: lives(wires, i, optimizer=optimizer).run(steps)
                for i in range(1, 1 + others)
            ],
        )
    journal.close()
    return found, rest, served


def batches(lives):
    return [(life.batches[0], life.batches[-1]) for life in lives]


GRADIENT_CODECS = ["fp32", "topk(0.2) | q2", "dgc(0.2, 0.9, 3) | q2", "powersgd(1)"]


@pytest.mark.parametrize(("strategy", "how"), [("fedavg", {}), ("dga", {"delay": 5})])
def test_the_mean_of_running_statistics_is_kept(tmp_path, strategy, how):
    """A member that came back with statistics of its own, or none, would move the mean."""
    (*_, last), (other,), _ = fleet(
        tmp_path / "fleet", 80, [23, 60], strategy, lives=Normalised, **how
    )
    for mine, its in zip(last.statistics, other.statistics, strict=True):
        assert mine.tolist() == its.tolist()
    mean, variance = last.statistics
    assert mean.abs().max() < 1.5, "the mean of -4 and 4"
    assert variance.min() > 0.2


@pytest.mark.parametrize(
    ("codec", "optimizer"),
    [*zip(GRADIENT_CODECS, ["adam", "sgd", "sgd", "adam"], strict=True)],
)
def test_synchronous_sgd_ends_with_the_bits_of_a_run_without_a_kill(tmp_path, codec, optimizer):
    settings = {"codec": codec, "optimizer": optimizer}
    if codec.startswith("dgc"):
        settings["reply_codec"] = "dgc(0.2, 0.0, 3) | q2"
    unhurt, _, _ = fleet(tmp_path / "a", 30, [], "sync-sgd", **settings)
    lives, (other,), hub = fleet(tmp_path / "b", 30, [10, 24], "sync-sgd", **settings)
    assert lives[-1].bits == other.bits == unhurt[0].bits
    # Saved at the start and after steps 7, 14 and 21, it takes the steps since then again.
    assert batches(lives) == [(0, 9), (7, 23), (21, 29)]
    rounds = 60 if codec == "powersgd(1)" else 30
    assert [closed.round for closed in hub.closed] == list(range(rounds))
    assert {closed.members for closed in hub.closed} == {("m0", "m1")}


def test_random_numbers_go_on_too(tmp_path):
    torch.manual_seed(5)
    unhurt, _, _ = fleet(tmp_path / "a", 20, [], "sync-sgd", others=0, lives=Noisy)
    torch.manual_seed(5)
    lives, _, _ = fleet(tmp_path / "b", 20, [11], "sync-sgd", others=0, lives=Noisy)
    assert lives[-1].bits == unhurt[0].bits


@pytest.mark.parametrize("lives", [Double, Half])
@pytest.mark.parametrize("optimizer", ["adam", "nadam"])
def test_models_of_other_dtypes_go_on_with_their_bits(tmp_path, lives, optimizer):
    how = {"others": 0, "lives": lives, "optimizer": optimizer}
    unhurt, _, _ = fleet(tmp_path / "a", 20, [], "sync-sgd", **how)
    killed, _, _ = fleet(tmp_path / "b", 20, [11], "sync-sgd", **how)
    assert killed[-1].bits == unhurt[0].bits


STRATEGIES = [
    ("fedavg", {}), ("local-sgd", {"codec": "topk(0.2) | q2"}), ("dga", {"delay": 5}),
    ("dga", {"delay": 4, "codec": "topk(0.2) | q2"}), ("dga-uncorrected", {"codec": "sign"}),
    ("dga(predict)", {"delay": 5}), ("dga(predict)", {"delay": 4, "codec": "topk(0.2) | q2"}),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "settings"), STRATEGIES)
def test_replicas_are_equal_and_no_batch_counts_twice_or_never(tmp_path, strategy, settings):
    lives, others, hub = fleet(tmp_path / "a", 40, [11, 24], strategy, others=2, **settings)
    assert {life.bits for life in [lives[-1], *others]} == {hub.hub.base.tobytes()}
    assert batches(lives)[:2] == [(0, 10), (10, 33 - lives[1].member.begins_at)]
    # Rounds have two steps: what was trained on in the one that was cut short is trained on again.
    given = [len(life.batches) // 2 for life in lives]
    for before, after, rounds in zip(lives, lives[1:], given, strict=False):
        assert after.batches[0] == before.batches[0] + 2 * rounds
    with_it = [closed for closed in hub.closed if "m0" in closed.members]
    at_the_end = settings.get("codec", "").startswith("topk")  # what it still had to send
    assert len(with_it) == sum(given) + at_the_end
    # A round that others have given to does not wait for a member that has to train for it first.
    ahead = settings.get("delay", 0) // 2 + 1
    assert len(hub.closed) - len(with_it) <= 2 * ahead


@pytest.mark.real
@pytest.mark.parametrize(("strategy", "settings"), STRATEGIES[1::2])
def test_the_fleet_may_go_on_meanwhile(tmp_path, strategy, settings):
    def until_missed(served):
        while sum("m0" not in closed.members for closed in served.closed) < 3:
            time.sleep(0.001)

    lives, others, hub = fleet(
        tmp_path / "a", 80, [11], strategy, others=2, while_dead=until_missed,
        policy={"lost_after_s": 0.0}, **settings,
    )  # fmt: skip
    assert {life.bits for life in [lives[-1], *others]} == {hub.hub.base.tobytes()}
    assert lives[1].batches[0] == 10, "the fleet's steps without it are not its own"
    assert lives[1].member.begins_at >= 16
    assert len(lives[1].batches) == 80 - lives[1].member.begins_at
    alone = [closed for closed in hub.closed if "m0" not in closed.members]
    assert len(alone) >= 3
    assert {"gone", "back"} <= {note.event for note in hub.notes if note.member == "m0"}


@pytest.mark.parametrize(("codec", "optimizer"), [("fp32", "adam"), ("topk(0.2) | q2", "sgd")])
def test_killed_right_behind_a_save_nothing_is_lost(tmp_path, codec, optimizer):
    settings = {"codec": codec, "optimizer": optimizer, "local_steps": 2}
    unhurt, _, _ = fleet(tmp_path / "a", 24, [], "local-sgd", **settings)
    lives, (other,), _ = fleet(tmp_path / "b", 24, [8, 16], "local-sgd", **settings)
    assert lives[-1].bits == other.bits
    if codec == "fp32":
        assert lives[-1].bits == unhurt[0].bits
    else:  # the rest is a difference of parameters, which is rounded
        wanted = children.flat(unhurt[0].model)
        np.testing.assert_allclose(children.flat(lives[-1].model), wanted, atol=1e-4)
    assert batches(lives) == [(0, 7), (8, 15), (16, 23)]


# -- what cannot be taken up ----------------------------------------------------------------------


def checkpoint_of(folder, *, job="", optimizer="sgd", model=None, **hub):
    """A hub, and a member that left a checkpoint after five steps."""
    wires = Loopback()
    served = children.HubThread(wires, hub.pop("strategy", "local-sgd"), 1, **hub)
    with served.serving():
        life = Life(wires, 0, folder, optimizer=optimizer, job=job, model=model)
        for _ in range(5):
            life.step()
        life.member.vanish()
    return life


def test_a_checkpoint_of_something_else_is_refused_with_both(tmp_path):
    checkpoint_of(tmp_path, job="a" * 32)
    wires = Loopback()
    other = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"is of the job aaaaaaaaaaaa, this member has bbbbbbb"):
        Life(wires, 0, tmp_path, job="b" * 32)
    with pytest.raises(ConfigError, match=r"is of the optimizer SGD, this member has Adam"):
        Life(wires, 0, tmp_path, job="a" * 32, optimizer="adam")
    with pytest.raises(ConfigError, match=r"is of the model \w{12}, this member has \w{12}"):
        Life(wires, 0, tmp_path, job="a" * 32, model=other)
    assert list(wires.poll(0.0)) == [], "nobody was asked"


def test_masks_and_a_checkpoint_do_not_go_together(tmp_path):
    wires, model = Loopback(), children.model(0)
    optimizer = children.optimizer("sgd", model)
    keeping = keeping_of(Keep(tmp_path), "m0", model, optimizer)
    with pytest.raises(ConfigError, match="masked keeps no checkpoint"):
        Member.join(
            Link(wires.connect(), time.monotonic), bind(model, optimizer), optimizer,
            Request("", secure=True), keeping=keeping,
        )  # fmt: skip
    assert list(wires.poll(0.0)) == [], "nobody was asked"


def test_a_hub_that_does_not_know_it_gets_a_newcomer_and_the_checkpoint_is_put_aside(
    tmp_path, caplog
):
    checkpoint_of(tmp_path)
    wires = Loopback()
    with children.HubThread(wires, members=1).serving():
        life = Life(wires, 0, tmp_path)
        assert life.member.steps == life.member.begins_at == 0
        assert "joining as a newcomer" in caplog.text
        assert len(list(tmp_path.glob("*.old"))) == 2
        life.run(3)
    assert life.batches == [0, 1, 2]
    assert not list(tmp_path.glob("*.checkpoint")), "it is over"


def test_synchronous_sgd_needs_the_replies_since_its_checkpoint(tmp_path):
    wires = Loopback()
    with children.HubThread(
        wires, "sync-sgd", 1, policy={"lost_after_s": 60.0}
    ).serving() as served:
        life = Life(wires, 0, tmp_path, every=4)
        for _ in range(6):
            life.step()
        life.member.vanish()
        with pytest.raises(Refused, match=r"at round 6, the replies after 4 are gone"):
            Life(wires, 0, tmp_path)
        served.stop()


def test_a_damaged_checkpoint_gives_way_and_says_so(tmp_path, caplog):
    wires = Loopback()
    with children.HubThread(wires, members=1, policy={"lost_after_s": 60.0}).serving():
        life = Life(wires, 0, tmp_path)
        for _ in range(5):
            life.step()
        life.member.vanish()
        newest = sorted(tmp_path.glob("*.checkpoint"))[-1]
        newest.write_bytes(newest.read_bytes()[:-3])
        again = Life(wires, 0, tmp_path)
        assert f"{newest} cannot be read" in caplog.text
        assert again.member.steps == 5, "the hub knows of the round since"
        again.run(8)
    assert again.batches == [5, 6, 7]


def test_a_full_disk_does_not_end_training(tmp_path, caplog, monkeypatch):
    def full(file, buffers):
        raise OSError(28, os.strerror(28))

    wires = Loopback()
    with children.HubThread(wires, members=1).serving():
        life = Life(wires, 0, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            for _ in range(4):
                life.step()
        life.run(6)
    assert caplog.text.count("training goes on without it") == 1
    assert life.keeper.saves == 7, "at the start, and those with room again"


def test_what_ends_a_member_decides_whether_its_place_is_kept(tmp_path):
    for error, farewell in (
        (KeyboardInterrupt, False),
        (HubUnreachable, False),
        (ValueError, True),
    ):
        wires = Loopback()
        with children.HubThread(wires, members=1, policy={"lost_after_s": 0.0}).serving() as served:
            life = Life(wires, 0, tmp_path / error.__name__)
            with pytest.raises(error), life.member:
                raise error("so")
        events = [note.event for note in served.notes]
        assert ("left" in events, "gone" in events) == (farewell, not farewell)


# -- the place in the data ------------------------------------------------------------------------


class Bare:
    """A task of somebody's own, which knows nothing of this."""

    name = "bare"

    def batches(self, member, members, batch, seed):
        for number in itertools.count():
            yield (torch.tensor([[member, members, batch, seed, number]] * batch),)


@pytest.mark.parametrize(
    "task",
    [tasks.digits(seed=1), tasks.char_lm(limit_bytes=50_000), Bare()],
    ids=["digits", "text", "bare"],
)
@pytest.mark.parametrize("start", [0, 1, 57, 200])
def test_batches_may_begin_anywhere(task, start):
    whole = list(islice(task.batches(1, 3, 16, 5), start + 3))
    found = list(islice(batches_from(task, 1, 3, 16, 5, start), 3))
    for mine, theirs in zip(found, whole[start:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_is_left_out_is_not_looked_at(monkeypatch):
    task = tasks.digits(seed=1)
    made = []
    real = task.batch_of
    monkeypatch.setattr(task, "batch_of", lambda draw: made.append(1) or real(draw))
    next(batches_from(task, 0, 3, 16, 5, 1000))
    assert len(made) == 1


# -- processes that are killed --------------------------------------------------------------------


@pytest.fixture
def start():
    context = processes.fork_server(["torch", "edgetrain.training.member.member"])
    started = []

    def begin(target, *arguments):
        started.append(processes.start(context, target.__name__, target, *arguments))
        return started[-1]

    yield begin
    processes.stop_all(started)


@pytest.mark.real
def test_a_process_that_is_killed_goes_on_in_another(start, tmp_path):
    hub = children.HubThread(
        HubSocket("tcp://127.0.0.1:0"), "dga", local_steps=2, delay=6, codec="topk(0.3) | q2",
        policy={"lost_after_s": 60.0},
    )  # fmt: skip
    with hub.serving():
        address, out = hub.transport.address, tmp_path / "m0"
        other = start(children.keeps_on, address, tmp_path / "m1", None, 1, 120)
        arguments = (address, out, tmp_path / "kept", 0, 120)
        for rounds in (9, 25):
            life = start(children.keeps_on, *arguments)
            while len(hub.closed) < rounds:
                time.sleep(0.002)
            os.kill(life.process.pid, signal.SIGKILL)
            life.process.join(60)
        life = start(children.keeps_on, *arguments)
        for child in (life, other):
            child.process.join(60)
            assert child.exit_code == 0, child.error
    models = [np.load(f"{tmp_path}/m{i}.npy").tobytes() for i in range(2)]
    assert models == [hub.hub.base.tobytes()] * 2
    written = Path(f"{out}.batches").read_text().split("begins")[1:]
    lives = [[int(line) for line in life.split()] for life in written]
    used, begins = [*itertools.chain(*lives)], [life[0] for life in lives]
    assert len(begins) == 3
    assert begins[2] > begins[1] > begins[0] == 0
    assert sorted(set(used)) == list(range(max(used) + 1)), "none was left out"
    assert all(begin % 2 == 0 for begin in begins)
    # What counted twice or never: nothing. The last round is what was still to be sent.
    with_it = sum("m0" in closed.members for closed in hub.closed)
    assert 2 * (with_it - 1) == max(used) + 1
    assert not list((tmp_path / "kept").glob("*.checkpoint"))


def commanded(cwd: Path, kills: dict[int, signal.Signals]) -> tuple[int, int]:
    """A job of two members, the first of them ended by a signal after so many rounds; what the
    hub's journal ends with. One that is asked to stop has no checkpoint but the one it writes
    then."""
    cwd.mkdir()
    job = write_tiny(
        cwd,
        fleet={"members": 2, "pace_s": 0.01},
        train={"steps": 60, "optimizer": {"name": "adam", "lr": 0.01}},
        strategy={"name": "sync-sgd"},
        hub={"heartbeat_s": 0.2, "fsync": "never", "lost_after_s": 30.0},
        checkpoint={"every_s": 600.0, "share": 1.0, "mb_an_hour": 1e6},
    )
    address = f"tcp://localhost:{free_port()}"
    command = ["member", job, "--hub", address, "--checkpoint", "kept", "--index"]
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(running("hub", job, "--bind", address, cwd=cwd))
        hub.until("members join")
        other = stack.enter_context(running(*command, "1", cwd=cwd))
        for kill, number in kills.items():
            often = ["checkpoint.every_s=0.05"] if number == signal.SIGKILL else []
            with running(*command, "0", *often, cwd=cwd) as member:
                wait_for_rounds(hub_folder(cwd), kill)
                member.process.send_signal(number)
                ended = -number if number == signal.SIGKILL else 128 + number
                assert member.finish() == ended, member.said
        with running(*command, "0", cwd=cwd) as member:
            assert member.finish() == 0, member.said
            assert ("resumed after" in member.said) == bool(kills)
        assert other.finish() == 0, other.said
        assert hub.finish() == 0, hub.said
    events = [e["event"] for e in read_metrics(hub_folder(cwd), "event")]
    assert events.count("back") == len(kills)
    rounds, checksum, counted = journal_of(hub_folder(cwd) / "journal")
    assert len(counted) == len(set(counted)) == 2 * rounds
    return rounds, checksum


@pytest.mark.real
def test_the_command_goes_on_from_its_checkpoint(tmp_path):
    unhurt = commanded(tmp_path / "unhurt", {})
    hurt = {8: signal.SIGTERM, 20: signal.SIGKILL, 32: signal.SIGTERM}
    assert commanded(tmp_path / "hurt", hurt) == unhurt


# -- what it is worth -----------------------------------------------------------------------------


class Digits(Life):
    """Trains on real handwriting, and takes its batches as `edgetrain member` does."""

    task = tasks.digits(seed=3)

    def __init__(self, *arguments, **more):
        torch.manual_seed(1)
        super().__init__(*arguments, model=self.task.model(), **more)
        self._data = batches_from(self.task, self.index, 4, 16, 7, self.member.steps)

    def step(self):
        self.now += 1
        self.optimizer.zero_grad()
        self.task.loss(self.model, next(self._data)).backward()
        self.batches.append(self.member.steps)
        self.member.step()


def test_a_fleet_with_kills_is_as_good_as_one_without(tmp_path):
    settings = {"others": 2, "lives": Digits, "delay": 4, "codec": "topk(0.1) | q2"}
    accuracy = []
    for name, kills in (("unhurt", []), ("hurt", [25, 60, 100])):
        lives, others, _ = fleet(tmp_path / name, 160, kills, "dga", **settings)
        assert {life.bits for life in others} == {lives[-1].bits}
        accuracy.append(Digits.task.evaluate(others[0].model)["accuracy"])
    assert accuracy[0] > 0.92
    assert accuracy[1] > accuracy[0] - 0.02
