"""Members whose frozen layers differ take over the first member's: whoever comes, goes and comes
back, all have the same bits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter

import children
import pytest
import torch
import unseeded_task
from direct import Direct
from loopback import Loopback
from torch import nn

from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.member.checkpoint import Keep, Sparing
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.training.member.keeping import keeping_of
from edgetrain.training.member.member import Member, bind
from edgetrain.training.simulated import simulation


def model_with_frozen_layer(value):
    """Equal in what is trained; a frozen layer and a buffer of this member's own values."""
    model = children.model(0)
    model.append(nn.Linear(3, 3).requires_grad_(False))
    with torch.no_grad():
        model[3].weight.normal_(generator=torch.Generator().manual_seed(value))
    model.register_buffer("table", torch.full((5,), value))
    return model


def fixed_bits(model):
    return bytes(model[3].weight.detach().numpy()) + bytes(model.table.numpy())


def all_bits(model):
    return fixed_bits(model) + bytes(children.flat(model))


class Life:
    """One member in one process, that trains on children.batch(index, …)."""

    def __init__(self, link, value, name, *, folder=None, frozen="first"):
        self.model = model_with_frozen_layer(value)
        optim = children.optimizer("sgd", self.model)
        keeping = None
        if folder is not None:
            keep = Keep(folder, Sparing(0.0, 1.0, 1e15))
            keeping = keeping_of(keep, name, self.model, optim, lambda: 0.0)
        self.index = value % 10
        self.member = Member.join(
            link, bind(self.model, optim, frozen), optim, Request("", name), keeping=keeping
        )
        self.begins_with = fixed_bits(self.model)

    def train(self, steps):
        for number in range(steps):
            self.model.zero_grad()
            x, y = children.batch(self.index, number)
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.member.step()
        return self

    def close(self):
        self.member.close()
        return all_bits(self.model)


def direct(folder):
    return None, Direct(2, "dga", 1, 1).connect


def loopback(folder):
    wires = Loopback()
    return wires, lambda: Link(wires.connect(), time.monotonic)


def sockets(folder):
    hub = HubSocket("tcp://127.0.0.1:0")
    return hub, lambda: Link(MemberSocket(hub.address), time.monotonic)


def encrypted(folder):
    ring = Keyring(folder / "keys")
    ring.init(new_pair)
    pairs = [new_pair() for _ in range(2)]
    for number, pair in enumerate(pairs):
        ring.allow(pair.public, f"pi-{number}")
    hub = HubSocket("tcp://127.0.0.1:0", gate=Gate(ring))

    def connect():
        credentials = Credentials(pairs.pop(), ring.pair().public)
        return Link(MemberSocket(hub.address, credentials=credentials), time.monotonic)

    return hub, connect


@pytest.mark.parametrize("way", [direct, loopback, sockets, encrypted])
def test_members_whose_frozen_layers_differ_train_to_one_model(way, tmp_path):
    transport, connect = way(tmp_path)

    def life(index):
        return Life(connect(), index, f"m{index}").train(4).close()

    served = contextlib.nullcontext()
    if transport is not None:
        served = children.HubThread(transport, "dga", 2, delay=1).serving()
    with served:
        one, other = children.in_threads(lambda: life(1), lambda: life(2))
    assert one == other
    made = [fixed_bits(model_with_frozen_layer(value)) for value in (1, 2)]
    assert one.startswith(tuple(made))


def joined_in_order(connect, values):
    """Members that join one behind the other; all start once the last is there."""
    lives, threads = {}, []
    for value in values:
        link, seen = connect(), threading.Event()
        link.on_welcome = lambda members, seen=seen: seen.set()

        def join(link=link, value=value):
            lives[value] = Life(link, value, f"m{value}")

        threads.append(threading.Thread(target=join, daemon=True))
        threads[-1].start()
        assert seen.wait(30)
    for thread in threads:
        thread.join(30)
    return [lives[value] for value in values]


def test_who_comes_late_or_after_a_restart_of_the_hub_gets_the_first_ones(tmp_path):
    wires = Loopback()

    def connect():
        return Link(wires.connect(), time.monotonic)

    journal = Journal(tmp_path)
    hub = children.HubThread(wires, "dga", 3, journal=journal, policy={"quorum": 1})
    with hub.serving():
        one, two, three = joined_in_order(connect, [1, 2, 3])
        children.in_threads(*[lambda each=each: each.train(2) for each in (one, two, three)])
        three.member.abandon("enough")
        late = Life(connect(), 4, "m4")
        late.member.abandon("enough, too")
        hub.stop()
        for each in (one, two):
            each.member.vanish()
    journal.close()
    wires, journal = Loopback(), Journal(tmp_path)
    for _ in range(9):
        wires.connect()  # so that the newcomer is none of those whom the journal knows
    again = children.HubThread(wires, "dga", 3, journal=journal)
    again.hub.restore(journal.state, journal.records(), time.monotonic())
    with again.serving():
        newcomer = Life(connect(), 5, "m5")
        newcomer.member.vanish()
        again.stop()
    journal.close()
    first = fixed_bits(model_with_frozen_layer(1))
    for each in (one, two, three, late, newcomer):
        assert fixed_bits(each.model) == each.begins_with == first


@pytest.mark.parametrize("strategy", ["dga", "sync-sgd"])
def test_a_member_that_was_killed_has_them_again_whatever_it_was_made_with(tmp_path, strategy):
    wires = Loopback()

    def connect():
        return Link(wires.connect(), time.monotonic)

    journal = Journal(tmp_path / "hub")
    hub = children.HubThread(wires, strategy, 2, journal=journal, policy={"lost_after_s": 60.0})

    def first():
        return Life(connect(), 1, "m1").train(4).close()

    def second():
        life = Life(connect(), 2, "m2", folder=tmp_path / "m2").train(2)
        life.member.vanish()
        back = Life(connect(), 9, "m2", folder=tmp_path / "m2")
        assert back.begins_with == life.begins_with
        return back.train(4 - back.member.steps).close()

    with hub.serving():
        one, two = children.in_threads(first, second)
    journal.close()
    both = len(fixed_bits(model_with_frozen_layer(1)))
    assert one[:both] == two[:both]


MASKED = ("strategy=local-sgd", "secure=true")
PRIVATE = ("strategy=dga", "delay=2", "privacy=member", "noise=0.1")


@pytest.mark.parametrize("more", [MASKED, PRIVATE, (*MASKED, "privacy=member", "noise=0.1")])
def test_masks_and_privacy_leave_them_as_the_first_member_gave_them(tmp_path, more):
    """They are in no contribution: nothing is clipped, no noise is added, no mask is needed."""
    job = load(None, ["task=unseeded_task:unseeded", "members=3", "steps=8", "local_steps=2",
                      "batch=4", "network=rtt-20ms", "frozen=first",
                      "pace_s=0.01", *more])  # fmt: skip
    before = len(unseeded_task.MADE)
    summary = simulation.run(plan(job), tmp_path)
    assert (summary["status"], summary["members_lost"]) == ("finished", [])
    made = [each for each in unseeded_task.MADE[before:] if not each.number.is_meta]
    counted = Counter(unseeded_task.number_of(each) for each in made)
    assert counted.most_common(1)[0][1] >= 3, "three members hold the first one's"


def test_members_that_differ_and_should_not_are_refused_and_the_simulation_ends(tmp_path):
    job = load(None, ["task=unseeded_task:unseeded", "members=3", "steps=8", "batch=4",
                      "network=rtt-20ms", "frozen=equal", "pace_s=0.01"])  # fmt: skip
    with pytest.raises(EdgetrainError, match="other values than the first member's"):
        simulation.run(plan(job), tmp_path)
