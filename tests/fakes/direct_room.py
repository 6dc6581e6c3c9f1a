"""A job in memory whose members host reducers: real drivers, links, listeners and hubs, a thread
each. Rounds close with the contributions of all, so that bits do not depend on the threads."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from functools import partial

import numpy as np

from edgetrain import codecs, strategies
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.hub.direct import DirectPart, share_out
from edgetrain.exchange.hub.effects import Note, Write
from edgetrain.exchange.hub.journal import Journal, JournalSettings
from edgetrain.exchange.hub.protocol import Hub, HubPart
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.hub.reducer import HostedPart
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import CLIENT
from edgetrain.exchange.peers.dialled import Dialled
from edgetrain.exchange.peers.direct import DirectExchange
from edgetrain.exchange.peers.listener import Listener
from edgetrain.exchange.peers.peering import MappedEnd, Peering
from edgetrain.exchange.peers.reducer_link import ReducerLink
from edgetrain.exchange.seam import Request
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.ranges import Stretch
from tests.fakes.flat_vectors import FlatVectors
from tests.fakes.fleet import noisy_descent
from tests.fakes.patience import patience
from tests.fakes.scenes import RealTime

PATIENCE_S = patience(60.0)


class Died(Exception):
    """A member is killed: its process, its connections, the reducer that it hosts."""


class NotedReducer(HostedPart):
    """Notes what it merged: `counted`, (round, (member, the round it meant)); `began_at`: the first
    round of its own."""

    def __init__(self):
        self.counted, self.began_at = [], 0

    def restore(self, state, now, go_on, records):
        self.began_at = state.round
        go_on(records)

    def _noted(self, effects):
        for effect in effects:
            if isinstance(effect, Write) and isinstance(record := effect.record, Round):
                self.counted += [(record.round, (c.member, c.meant_for)) for c in record.counted]
        return effects

    def handle(self, sender, message, now, go_on):
        return self._noted(super().handle(sender, message, now, go_on))

    def tick(self, now, go_on):
        return self._noted(super().tick(now, go_on))


class DirectRoom:
    """`members` members, of which those in `clients` can be reached by nobody; `closed` are pairs
    (from, to) that do not reach each other, although the second one listens."""

    def __init__(self, strategy, members, steps, *, clients=(), closed=(), star=False,
                 local_steps=2, delay=0, codec="fp32", reply_codec="", elements=5000, ranges=16,
                 merge="mean", policy=None, scene=None):  # fmt: skip
        self.scene = scene or RealTime()
        self.row = strategies.find(strategy)
        self.description = layouts.describe([("w", (elements,), "float32")])
        self.steps, self.elements, self.closed = steps, elements, set(closed)
        self.codecs = codecs.parse(codec), codecs.parse(reply_codec or codec)
        self.terms = Terms(
            self.row,
            local_steps,
            Delay(delay if self.row.delays else 0),
            stretch=Stretch(ranges, 0, ranges),
        )
        self.policy = policy or Policy(members, heartbeat_s=0.2)
        self.merge, self.star, self.journal = merge, star, None
        self.notes, self.reducers = [], []
        self.lead = self.new_lead()
        self.loopback = self.scene.loopback()
        self.listening = {}
        """The listening end of each address."""
        self.initial = np.random.default_rng(99).standard_normal(elements).astype(np.float32)
        self.stopped = threading.Event()
        self.server = self.scene.task(self.serve_lead)
        self.members = [RoomMember(self, i, star, i in clients) for i in range(members)]

    expected: tuple[type[BaseException], ...] = (Died,)
    """Errors with which members may end."""
    patience_s: tuple[float, ...] = ()
    """Of members' links."""

    def new_lead(self):
        if self.star:
            return self.hub(self.terms)
        count = self.terms.stretch.count
        terms = replace(self.terms, stretch=Stretch(count, 0, 0))
        return self.hub(terms, DirectPart(partial(share_out, ranges=count)))

    def keep_journal(self, folder):
        """From the beginning, in this folder."""
        self.journal = Journal(folder, JournalSettings(), warnings.warn)

    def crash_lead(self):
        """Kill the hub that all join, and start it again from its journal."""
        self.stopped.set()
        self.server.join(PATIENCE_S)
        self.reopen()
        self.stopped = threading.Event()
        self.server = self.scene.task(self.serve_lead)
        self.server.start()

    def reopen(self):
        """Another hub goes on by the journal; no connection outlives the one before."""
        self.journal.close()
        self.loopback.restart()
        self.keep_journal(self.journal.folder)
        self.lead = self.new_lead()
        self.lead.tail = self.journal.tail
        if self.journal.state is not None:
            self.lead.restore(self.journal.state, self.journal.records(), self.scene.clock())

    def end_of(self, index, end):
        """A member's end of a connection, for tests to break."""
        return end

    def hub(self, terms, part=None):
        return (part or HubPart()).attach(Hub(
            terms, self.policy, self.row.merge_rule(self.merge), *self.codecs,
            outer=self.row.outer_rule(),
        ))  # fmt: skip

    def before_step(self, member, step):
        """For tests to let something happen."""

    def before_dial(self, member, neighbours):
        """As above."""

    def reducer(self, first, end):
        stretch = replace(self.terms.stretch, first=first, end=end)
        made = self.hub(replace(self.terms, stretch=stretch), NotedReducer())
        self.reducers.append(((first, end), made))
        return made

    def histories(self):
        """The reducers of each stretch, in the order in which they were made."""
        found = {}
        for span, hub in self.reducers:
            found.setdefault(span, []).append(hub)
        return found

    def _observe(self, effect):
        if isinstance(effect, Note):
            self.notes.append(effect)

    def serve_lead(self):
        stop = self.stopped.is_set
        serve(self.lead, self.loopback, self.scene.clock, self._observe, stop, self.journal)

    def run(self):
        """Until all members are done; their parameters, equal on all. Raises their errors."""
        threads = [self.server, *self.members]
        for thread in threads:
            thread.start()
        try:
            for member in self.members:
                member.join(PATIENCE_S)
                if member.error is not None and not isinstance(member.error, self.expected):
                    raise member.error
                assert not member.is_alive()
        finally:
            self.stopped.set()
            self.server.join(PATIENCE_S)
            if self.journal is not None:
                self.journal.close()
        return self.members[0].params


class RoomMember:
    """One member; `params` are its parameters."""

    def __init__(self, room, index, star, client):
        self.room, self.index, self.name_ = room, index, f"m{index}"
        self.scene, self.task = room.scene, room.scene.task(self.run)
        self.machine = room.scene.machine()
        self.start, self.join, self.is_alive = self.task.start, self.task.join, self.task.is_alive
        self.params, self.error = room.initial.copy(), None
        self.address = CLIENT if client else f"tcp://10.0.0.1:{index + 1}"
        self.param_groups = [{"momentum": 0.0}]
        self._flat = FlatVectors(self.params, room.description)
        if star:
            self.exchange = Link(room.loopback.connect(), self.scene.clock)
            return
        listener, clock = None, self.scene.clock
        if not client:
            room.listening[self.address] = self.scene.loopback()
            listener = Listener(room.listening[self.address])
        self.peering = Peering(listener, None, self._dial, clock, self.machine)
        end = room.end_of(index, room.loopback.connect())
        lead = Link(MappedEnd(end, self.peering), clock, *room.patience_s)
        self.exchange = DirectExchange(
            lead, self.peering, lambda end: ReducerLink(end, clock, *room.patience_s),
            room.reducer, self._listen, clock,
        )  # fmt: skip

    def _listen(self):
        address = f"tcp://10.0.0.1:{100 + len(self.room.listening)}"
        there = self.room.listening[address] = self.scene.loopback()
        return Listener(there), address

    def _dial(self, peer, neighbours):
        self.room.before_dial(self, neighbours)
        there = self.room.listening[peer.address]
        blocked = (self.name_, peer.name) in self.room.closed
        end = (self.scene.loopback() if blocked else there).connect()
        end = self.room.end_of(self.index, end)
        return Dialled(
            end, neighbours.hello_to(peer.name), self.scene.clock, sleep=self.scene.sleep
        )

    def run(self):
        try:
            self._run()
        except BaseException as error:
            self.error = error
            self.exchange.vanish()

    def _run(self):
        self.driver = self.enter()
        for step in range(self.room.steps):
            self.room.before_step(self, step)
            self.descend(step)
        self.driver.drain()
        self.driver.leave("done")

    def enter(self):
        """Its driver, once training begins."""
        flat = self._flat
        request = Request(
            layouts.digest(flat.description), self.name_, layout=flat.description,
            address=self.address,
        )  # fmt: skip
        driver = Driver.join(self.exchange, flat, self, request, self.scene.clock)
        self.exchange.base_of = self._base_of
        return driver

    def descend(self, step):
        """Its step of this number."""
        self._flat.gradient[:] = noisy_descent(self.index, step, self.params)
        self.driver.step()

    def _base_of(self):
        half = self.driver.half
        return half.applied, half.base if self.room.row.hub_keeps_base else None

    def step(self):
        self.params -= self._flat.gradient
