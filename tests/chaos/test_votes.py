"""Hub and replica, kept apart as it needs to make both go on; and the mistakes that would do it."""

from __future__ import annotations

import copy

import pytest

from chaos import in_memory
from chaos.in_memory import HUB, SECOND, ChaosTown
from chaos.test_in_memory import planned
from edgetrain.exchange.hub.copies import CopyStream
from edgetrain.exchange.hub.replica import Replica
from edgetrain.exchange.member.standby import Ballot

pytestmark = pytest.mark.usefixtures("own_imports")

WORDS = ("members=3", "hub.quorum=2", "strategy.delay=0", "steps=200", "hub.rejoin_s=10",
         "hub.deadline_s=5")  # fmt: skip


def apart(town: ChaosTown, side: str, others: str) -> None:
    """From now on nothing gets through between these machines, and what is under way waits."""
    for one in side.split():
        for other in others.split():
            town.apart_now[frozenset((one, other))] = 1


def joined(town: ChaosTown, side: str, others: str) -> None:
    for one in side.split():
        for other in others.split():
            town.apart_now[frozenset((one, other))] = 0


def until(town: ChaosTown, true, most_s: float = 60.0) -> None:
    began = town.now
    while not true():
        assert town.now - began < most_s, "it never came to this"
        town.turn()


def let_pass(town: ChaosTown, seconds: float) -> None:
    end = town.now + seconds
    until(town, lambda: town.now >= end, 2 * seconds)


def members_back_at_the_hub_behind_their_votes(town: ChaosTown) -> None:
    """They let the replica take over, do not hear that it has, and hear their hub again."""
    apart(town, HUB, "m0 m1 m2 replica")
    until(town, lambda: town.took_over_at is not None)
    apart(town, SECOND, "m0 m1")
    joined(town, HUB, "m0 m1")
    let_pass(town, 20.0)


def a_hub_that_dies_behind_an_out(town: ChaosTown) -> None:
    """The replica is out, the hub goes on without it, and then the hub is gone."""
    apart(town, HUB, SECOND)
    until(town, lambda: town.first.hub.part.replica == "out")
    began = town.first.hub.round
    until(town, lambda: town.first.hub.round > began + 1)
    apart(town, HUB, "m0 m1 m2")
    let_pass(town, 8.0)


def a_vote_from_before(town: ChaosTown) -> None:
    """A member voted, went back, and agrees to an out; another one votes."""
    apart(town, HUB, "m0 replica")
    until(town, lambda: town.replica.votes)
    held = town.replica.position
    joined(town, HUB, "m0 replica")
    m0 = town.members[0]
    until(town, lambda: town.all_know and m0.way.ballot.link > held + 1)
    apart(town, HUB, "m2 replica")
    let_pass(town, 15.0)


def a_hub_with_one_member(town: ChaosTown) -> None:
    apart(town, HUB, "m1 m2 replica")
    apart(town, SECOND, "m0")
    let_pass(town, 20.0)


def a_replica_with_one_member(town: ChaosTown) -> None:
    apart(town, HUB, "m0 replica")
    apart(town, SECOND, "m1 m2")
    let_pass(town, 15.0)


def forget_the_takeover(patch) -> None:
    real = Ballot.accept_offer
    patch.setattr(Ballot, "accept_offer", lambda self, message: real(copy.copy(self), message))


def forget_the_out(patch) -> None:
    real = Ballot.accept_offer

    def accept(self, message):
        fresh = Ballot()
        fresh.link = self.link
        return real(fresh, message)

    patch.setattr(Ballot, "accept_offer", accept)


def keep_votes(patch) -> None:
    real = Replica.handle_hub

    def handle(self, message, now):
        votes = set(self.votes)
        found = real(self, message, now)
        self.votes |= votes
        return found

    patch.setattr(Replica, "handle_hub", handle)


def let_one_put_it_out(patch) -> None:
    patch.setattr(CopyStream, "since_held", lambda self, now: (frozenset(now), 1))


def let_one_take_over(patch) -> None:
    real = Replica.handle_member

    def handle(self, sender, message, now):
        found = real(self, sender, message, now)
        self.taken = bool(self.votes)
        return found

    patch.setattr(Replica, "handle_member", handle)


CASES = [
    (members_back_at_the_hub_behind_their_votes, forget_the_takeover),
    (a_hub_that_dies_behind_an_out, forget_the_out),
    (a_vote_from_before, keep_votes),
    (a_hub_with_one_member, let_one_put_it_out),
    (a_replica_with_one_member, let_one_take_over),
]


def broken(scene) -> list[str]:
    """The laws of hub and replica that broke in this scene."""
    town = ChaosTown(planned(*WORDS), 4)
    until(town, lambda: town.hub.started and town.hub.round > 1 and town.all_know)
    scene(town)
    for member in town.members:
        member.end()
    return in_memory.broken_books(town)


@pytest.mark.parametrize(("scene", "mistake"), CASES, ids=lambda each: each.__name__)
def test_both_never_go_on_and_a_planted_mistake_shows(scene, mistake, monkeypatch):
    assert broken(scene) == []
    mistake(monkeypatch)
    assert broken(scene) != []
