"""A fleet in memory whose members are behind gateways: a hub above, and a SitePart of each site."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from fakes.fleet import Disk, Fleet, HubDied, Wire

from edgetrain.exchange.gateway.site import SitePart
from edgetrain.exchange.gateway.way_up import WayUp
from edgetrain.exchange.hub.terms import Policy

Choice = Callable[[], None]


class FakeSite(Fleet):
    """The members of one site and their gateway, which the fleet above sees as a member."""

    def __init__(self, above: SitedFleet, index: int, first: int, count: int, **known) -> None:
        weights = known.pop("weights", None)
        super().__init__(
            members=count,
            weights=None if weights is None else weights[first : first + count],
            policy=Policy(count, fleet=above.total),
            rng=above.rng,
            **known,
        )
        self.above, self.index, self.state = above, index, "joining"
        for member in self.members:
            member.index += first
            member.address = b"member-%d" % member.index
        fresh = self.fresh_hub
        self.fresh_hub = lambda: fresh(SitePart(f"s{index}", self.connect))
        self.hub = self.fresh_hub()
        self._starts = 0
        self._renew()

    def _renew(self) -> None:
        self.address = b"site-%d-%d" % (self.index, self._starts)
        self._starts += 1
        self.wire, self._seen_connections = Wire(self._never), 1

    @staticmethod
    def _never() -> None:
        raise AssertionError("a gateway never waits for the hub above")

    def connect(self) -> WayUp:
        return WayUp(self.wire, self.clock, 1e9, 1e9)

    # -- what the fleet above does -------------------------------------------------------------

    has_begun = True
    waits_in_vain = False

    def choices(self) -> list[Choice]:
        found = [choice for member in self.members for choice in member.choices()]
        if self.wire.to_hub:
            found.append(lambda: self.above.deliver(self))
        is_new = self.wire.connections != self._seen_connections
        if (self.wire.to_member or is_new) and self.state != "done":
            found.append(self.hear)
        return found

    def hear(self) -> None:
        """What has come from above is handled."""
        self.wire.deliver_to_member()
        self.survive(self._hear)
        self._seen_connections = self.wire.connections

    def _hear(self) -> None:
        if self.state == "done":
            return
        while effects := self.hub.part.hear(self.now):
            self.carry_out(effects)
        if self.hub.finished and self.state != "done":
            link = self.hub.part.link
            if link is not None:  # None: the hub above has told it that the job is over
                link.leave("done")
            self.state = "done"
        elif self.hub.started:
            self.state = "training"

    def deliver(self, member) -> None:
        super().deliver(member)
        self.survive(self._hear)

    def tick(self, seconds: float) -> None:
        super().tick(seconds)
        if not self.wire.to_member:  # a beat on its way is no silence
            self._hear()

    def restart_hub(self) -> None:
        """The gateway was killed, and is started again over a connection of its own."""
        self.wire.lose(self.rng)
        for frames in self.wire.to_hub:  # was sent, and arrives
            self.above.stray.append((self.address, frames))
        old = self.address
        self._renew()
        above = self.above
        above.survive(lambda: above.carry_out(above.hub.unreachable(old, above.now)))
        super().restart_hub()

    def end(self) -> None:
        for member in self.members:
            member.end()


class SitedFleet(Fleet):
    """A hub, and behind gateways the members of sites of these sizes."""

    site = FakeSite

    def __init__(
        self,
        strategy: str,
        sites: Sequence[int],
        local_steps: int,
        delay: int | None,
        steps: int,
        *,
        rng: random.Random | None = None,
        disk: Disk | None = None,
        kills: Sequence[int] = (),
        site_disks: Sequence[Disk | None] = (),
        site_kills: Sequence[Sequence[int]] = (),
        **known,
    ) -> None:
        self.total = sum(sites)
        given = {
            "strategy": strategy,
            "local_steps": local_steps,
            "delay": delay,
            "steps": steps,
            **known,
        }
        above = {key: value for key, value in given.items() if key != "weights"}
        policy = Policy(self.total)
        super().__init__(members=0, policy=policy, rng=rng, disk=disk, kills=kills, **above)
        fresh = self.fresh_hub

        def with_gateways():
            hub = fresh()
            hub.terms = replace(hub.terms, gateways=True)
            return type(hub)(
                hub.terms, hub.policy, hub.rounds.merger.rule, *hub.rounds.merger.codecs,
                outer=hub.rounds.merger.outer,
            )  # fmt: skip

        self.fresh_hub = with_gateways
        self.hub = self.fresh_hub()
        self.stray: list = []
        firsts = [sum(sites[:i]) for i in range(len(sites))]
        disks = site_disks or [None] * len(sites)
        deaths = site_kills or [()] * len(sites)
        self.members = [
            self.site(self, i, first, count, disk=disk, kills=kills, **given)
            for i, (first, count, disk, kills) in enumerate(
                zip(firsts, sites, disks, deaths, strict=True)
            )
        ]

    @property
    def everyone(self) -> list:
        """All members of all sites."""
        return [member for site in self.members for member in site.members]

    def advance(self) -> bool:
        if self.stray and self.rng.random() < 0.5:
            from edgetrain.exchange.messages import unpack

            sender, frames = self.stray.pop(0)
            message = unpack(frames)
            self.survive(lambda: self.carry_out(self.hub.handle(sender, message, self.now)))
            return True
        return super().advance()

    def let_time_pass(self) -> None:
        super().let_time_pass()
        for site in self.members:
            site.now = self.now
            site.survive(lambda site=site: site.tick(0.0))
            for member in site.members:
                if member.waits_in_vain:
                    member.go()


__all__ = ["Disk", "FakeSite", "HubDied", "SitedFleet"]
