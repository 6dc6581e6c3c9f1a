"""A job in memory whose members average among themselves: real drivers, links, listeners and a hub,
a thread each. A member can be killed, and a pair of members be cut apart, at any message."""

from __future__ import annotations

import time

import numpy as np

from edgetrain.errors import Refused
from edgetrain.exchange.further_messages import RunRound, Segment
from edgetrain.exchange.hub.collective import CollectivePart
from edgetrain.exchange.hub.effects import Send, Write
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.peers.dialled import Dialled
from edgetrain.exchange.peers.listener import Listener
from edgetrain.exchange.peers.peering import Peering
from edgetrain.exchange.peers.together import CollectiveExchange
from tests.fakes.direct_room import PATIENCE_S, Died, DirectRoom, RoomMember
from tests.fakes.fleet import noisy_descent
from tests.fakes.loopback import Loopback

LOST_S = 3.0
"""Seconds of silence after which members count another one as lost, where some are cut apart."""


class Noted(CollectivePart):
    """Notes what it merged: (member, the round it meant), by round; and the numbers of attempts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counted, self.attempts = {}, []

    def _noted(self, effects):
        for effect in effects:
            if isinstance(effect, Write) and isinstance(record := effect.record, Round):
                self.counted[record.round] = [(c.member, c.meant_for) for c in record.counted]
            if isinstance(effect, Send) and isinstance(run := effect.message, RunRound):
                self.attempts.append(run.attempt)
        return effects

    def handle(self, sender, message, now, go_on):
        return self._noted(super().handle(sender, message, now, go_on))

    def tick(self, now, go_on):
        return self._noted(super().tick(now, go_on))


class Wire(Dialled):
    """Segments go to another member as copies, as over a network. `on_send` is called for each; it
    may raise, or return False: lost."""

    on_send = None

    def send(self, frames):
        if frames[0] != Segment.kind:
            super().send(frames)
        elif self.on_send():
            super().send([frames[0], *map(bytearray, frames[1:])])


class CollectiveRoom(DirectRoom):
    """As a DirectRoom, with a `topology`. `dies`: by member, the segment at which it is killed.
    `cuts`: (a, b): the segment of a's from which on nothing goes either way between the two.
    `crashes`: (member, segment of its) before which the hub is killed and started again, once
    training has begun. `reborn`: members that are killed join anew."""

    def __init__(
        self, topology, strategy, members, steps, *, dies=(), cuts=(), crashes=(), reborn=False,
        **other,
    ):  # fmt: skip
        self.topology, self.counted, self.attempts, self.reborn = topology, {}, [], reborn
        super().__init__(strategy, members, steps, star=True, ranges=1, **other)
        self.dies, self.cuts, self.apart = dict(dies), dict(cuts), set()
        self.crashes = set(crashes)
        clients = other.get("clients", ())
        self.members = [CollectiveMember(self, i, i in clients) for i in range(members)]

    def new_lead(self):
        noted = Noted(self.topology, self.terms.stretch.count)
        noted.counted, noted.attempts = self.counted, self.attempts
        return self.hub(self.terms, noted)

    def by_hand(self):
        """The base after all rounds that the hub has counted, in float64."""
        base, taken, local_steps = self.initial.astype(np.float64), {}, self.terms.local_steps
        for round in sorted(self.counted):
            gains = []
            for name, meant_for in self.counted[round]:
                assert meant_for == round
                member, params = int(name[1:]), base.astype(np.float32)
                for step in range(local_steps):
                    params -= noisy_descent(member, taken.get(member, 0) + step, params)
                taken[member] = taken.get(member, 0) + local_steps
                gains.append(params.astype(np.float64) - base)
            base = base + sum(gains) / len(gains)
        return base


class CollectiveMember(RoomMember):
    """One member of a CollectiveRoom."""

    def __init__(self, room, index, client):
        super().__init__(room, index, True, client)
        self.sent, self.lives, self.entry = 0, 1, None
        self.exchange.vanish()
        self._connect(client)

    def _connect(self, client=False):
        room, listener = self.room, None
        if not client:
            self.address = f"tcp://10.0.0.{self.lives}:{self.index + 1}"
            room.listening[self.address] = Loopback()
            listener = Listener(room.listening[self.address])
        peering = Peering(listener, None, self._dial)
        self.exchange = CollectiveExchange(
            room.loopback.connect(),
            peering,
            time.monotonic,
            lost_s=LOST_S if room.cuts else PATIENCE_S,
            outer=room.row.outer_rule(),
        )

    def run(self):
        super().run()
        while self.room.reborn and isinstance(self.error, Died):
            self._come_again()

    def _come_again(self):
        """As a newcomer of the same name, from other parameters, until the hub lets it in. It takes
        the steps that the fleet still has to take, behind those of its own that were counted."""
        room, self.error = self.room, None
        self.lives += 1
        self.params[:] = 7.0
        self._connect()
        try:
            driver = self.driver = self.enter()
            self.entry = driver.entry
            counted = [n for given in room.counted.values() for n, _ in given]
            first = room.terms.local_steps * counted.count(self.name_) - driver.progress
            while driver.progress < room.steps:
                self.descend(first + driver.progress)
            driver.drain()
            driver.leave("done")
        except BaseException as error:
            refused = isinstance(error, Refused) and error.code == "name"
            self.error = Died() if refused else error
            self.exchange.vanish()

    def _dial(self, peer, neighbours):
        end = self.room.listening[peer.address].connect()
        wire = Wire(end, neighbours.hello_to(peer.name))
        wire.on_send = lambda: self._may_send(peer.name)
        return wire

    def _may_send(self, to):
        room, own = self.room, self.index
        self.sent += 1
        if (own, self.sent) in room.crashes and room.lead.started:
            room.crash_lead()
        if self.lives == 1 and self.sent >= room.dies.get(own, np.inf):
            raise Died
        room.apart |= {
            frozenset(pair) for pair, at in room.cuts.items() if pair[0] == own and self.sent >= at
        }
        return frozenset({own, int(to[1:])}) not in room.apart
