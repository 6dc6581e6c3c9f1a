"""A member's link to a hub that hands out work: slices come in, answers go out; and its links to
several such hubs.

An answer is sent once and forgotten. What a broken connection took along is no loss: as a member
comes back, the hub gives it slices anew, and this link forgets those that it had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from edgetrain.exchange.further_messages import Assign, Computed, Products
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.ranges import PAUSE_S, RangedExchange
from edgetrain.exchange.messages import MOST_FIGURE, Message
from edgetrain.exchange.seam import CatchUp, RoundReply
from edgetrain.vectors.vector import Buffer, Vector, all_finite


class Slice(NamedTuple):
    """A slice to compute at the base as it is."""

    number: int
    of: int
    """Slices of the batch."""
    gradient: bool
    """Wanted are loss and gradient; otherwise the loss alone."""


class WorkLink(Link):
    """A Link whose member answers work in place of contributing: see `Link`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tasks: deque[tuple[int, Slice]] = deque()
        """What is to be computed, each with the number of replies in the base that it is for."""
        self._is_over = False
        self.on_products: Callable[[Products], None] = lambda products: None
        """Called with numbers of this hub that are for others."""

    @property
    def is_over(self) -> bool:
        """Whether no reply and no work will come any more: the hub has said that the base stays."""
        return self._is_over and self.ready <= self._session.applied

    def wait(self, round: int) -> RoundReply | CatchUp:
        """See Link. With a reply its round is over for this member, too."""
        reply = super().wait(round)
        self._session.next_round = max(self._session.next_round, self._session.applied)
        return reply

    def next_work(self) -> Slice | None:
        """The next slice at the base that was given out; waits for one. None: a reply has come
        first, the fleet went on, or it is over. Raises what `wait` does."""
        self.poll()
        while self.has_more_work:
            if (task := self.pop_task()) is not None:
                return task
            self._act(self._next())
        return None

    @property
    def has_more_work(self) -> bool:
        """Whether work may come before the next reply."""
        return not (self.ready > self._session.applied or self.is_over)

    def pop_task(self) -> Slice | None:
        """The next slice at the base, if one has come."""
        tasks, applied = self._tasks, self._session.applied
        while tasks and tasks[0][0] < applied:
            tasks.popleft()
        return tasks.popleft()[1] if tasks and tasks[0][0] == applied else None

    def carry(self, products: Products) -> None:
        """Give this hub numbers of another one, unless this member is on its way back."""
        if self._session.state == "training":
            self._send(products)

    def answer(
        self, task: Slice, samples: int, loss: float, gradient: Vector | None, checksum: int
    ) -> None:
        """Say what a slice of `samples` came to at the base with this checksum: its mean loss, and
        gradient if that was wanted, which is encoded before this returns. A loss or a gradient that
        is not finite is said to be so."""
        applied = self._session.applied
        if self._session.state != "training":
            return
        is_finite = abs(loss) < MOST_FIGURE and (gradient is None or all_finite(gradient))
        loss = loss if is_finite else MOST_FIGURE
        payloads: list[Buffer] = [b""]
        if gradient is not None:
            # A copy: it is on its way while the next slice is computed.
            own = gradient.copy() if is_finite else np.zeros_like(gradient)
            payloads = self.outbox.codec.encode(own)
        for part, payload in enumerate(payloads):
            self._send(
                Computed(
                    applied, task.number, samples, loss, part, len(payloads), checksum, payload
                )
            )

    def _ask(self, epoch: int) -> None:
        self._tasks.clear()
        super()._ask(epoch)

    def _act(self, message: Message) -> None:
        """See Link. Work that comes while this member is on its way back is not for it any more."""
        if isinstance(message, Products):
            self.on_products(message)
            return
        if not isinstance(message, Assign):
            super()._act(message)
            return
        if self._session.state == "training":
            self._is_over = not message.slices
            each = (Slice(slice, message.of, message.gradient) for slice in message.slices)
            self._tasks.extend((message.round, task) for task in each)


class RangedWork(RangedExchange):
    """A RangedExchange with hubs that hand out work: the lead does, and each hub gets its part of
    an answer; another hub, whose part was lost, may ask for it by itself. Numbers of the lead are
    carried to all other hubs, theirs to the lead."""

    def __init__(self, links: Sequence[WorkLink]) -> None:
        super().__init__(links)
        self._works = links
        self._asks = links[0]
        """The link that the newest slice came over."""
        for link in links:
            others = links[1:] if link is links[0] else links[:1]
            link.on_products = partial(_carry, others)
            link.longest_pause_s = PAUSE_S

    @property
    def is_over(self) -> bool:
        """See WorkLink: as the lead says."""
        return self._works[0].is_over

    def next_work(self) -> Slice | None:
        """See WorkLink."""
        lead = self._works[0]
        self.poll()
        while lead.has_more_work:
            for link in self._works:
                if (task := link.pop_task()) is not None:
                    self._asks = link
                    return task
            lead.take_next()
        return None

    def answer(
        self, task: Slice, samples: int, loss: float, gradient: Vector | None, checksum: int
    ) -> None:
        """See WorkLink: to the hub that asked; a gradient that the lead asked for to all."""
        is_for_all = self._asks is self._works[0] and gradient is not None
        if gradient is not None and not all_finite(gradient):
            loss = MOST_FIGURE
        for number, link in enumerate(self._works):
            if is_for_all or link is self._asks:
                own = None if gradient is None else gradient[link.own]
                link.answer(task, samples, loss, own, self._known[number])


def _carry(others: Sequence[WorkLink], products: Products) -> None:
    for link in others:
        link.carry(products)
