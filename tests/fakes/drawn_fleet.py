"""A fleet whose rounds have a sample of its members each."""

from __future__ import annotations

from fleet import FakeMember, Fleet

from edgetrain.errors import Refused
from edgetrain.exchange.hub.drawing import CohortPart
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.vectors import layout as layouts
from tests.fakes.fleet import Recorded

PATIENT = {"lost_after_s": 1e9, "deadline_s": 1e9}


class DrawnMember(FakeMember):
    """A member of a job with a cohort: it goes by the job's steps."""

    observe = None
    """Called with each exchange."""

    def _live(self) -> None:
        fleet, flat = self.fleet, self.flat
        request = Request(
            layouts.digest(flat.description), f"m{self.index}", self.weight, "job",
            flat.description, secure=fleet.secure or False,
        )  # fmt: skip
        link = Recorded(Link(self.way, fleet.clock), self)
        try:
            self.driver = driver = Driver.join(link, flat, self, request, fleet.clock)
            self.state, driver.observe = "training", self.observe
            while driver.progress < self.steps:
                self._pause()
                flat.gradient[:] = fleet.local_step(self.index, driver.steps, self.params)
                driver.step()
            driver.drain()
            self.note_base()
            driver.leave("done")
            self.state = "done"
        except Refused:
            self.state = "refused"
        self.is_over = True


class DrawnFleet(Fleet):
    member = DrawnMember

    def __init__(self, strategy, members, cohort, local_steps, steps, **rest):
        policy = Policy(members, **{**PATIENT, **rest.pop("policy", {})})
        self.cohort, part = cohort, rest.pop("part", CohortPart)
        super().__init__(
            strategy, members, local_steps, 0, steps, policy=policy, bounded=True, **rest
        )
        fresh = self.fresh_hub
        self.fresh_hub = lambda: fresh(part(cohort))
        self.hub = self.fresh_hub()

    @property
    def last(self):
        """The base that all ended with."""
        assert [each.state for each in self.members] == ["done"] * len(self.members)
        (found,) = {each.half.checksum for each in self.members}
        return found
