"""What a job's members agree on, and how patient its hub is. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.exchange.delay import AT_ONCE, Delay
from edgetrain.exchange.messages import MAX_ELEMENTS
from edgetrain.strategies.closing import ClosingRule, LearnedDeadline, QuorumAndDeadline
from edgetrain.vectors.ranges import WHOLE, Stretch

if TYPE_CHECKING:
    from edgetrain.strategies import Strategy

ANY_JOB = "any job"
"""A journal's word for a hub that accepts members of any job."""


@dataclass(frozen=True)
class Terms:
    """The settings shared by all members of a job (`Welcome` sends them)."""

    strategy: Strategy
    local_steps: int
    """Local steps in a round."""
    delay: Delay = AT_ONCE
    job: str = ""
    """Digest of the job, or "": any job whose model fits."""
    steps: int = 0
    """Steps of each member, which bound an automatic delay; 0: not known."""
    stretch: Stretch = WHOLE
    """The ranges of the vector that this hub has."""
    gateways: bool = False
    """Whether a gateway may join for the members of its site."""

    def closing_rule(self, policy: Policy) -> ClosingRule:
        """The closing rule: the policy's, or an asynchronous strategy's own."""
        if self.strategy.is_synchronous:
            return policy.closing_rule()
        from edgetrain.strategies.arrivals import ArrivalTerms  # where they are out of step

        pace = ArrivalTerms(policy.members, self.local_steps, policy.deadline_s)
        return self.strategy.closing_rule(pace)

    def agreed(self, codec: str, reply_codec: str, masked: bool) -> str:
        """The terms as text, with the names of the codecs: how a journal names its job."""
        delay = None if self.delay.is_measured else self.delay.steps
        return (
            f"{self.strategy.spelled}, every {self.local_steps}, delay {delay}, {codec}, "
            f"{reply_codec}, "
            f"{'masked, ' if masked else ''}{'gateways, ' if self.gateways else ''}"
            f"{'' if self.stretch == WHOLE else f'{self.stretch}, '}"
            f"{f'job {self.job}' if self.job else ANY_JOB}"
        )


def check_same_job(journal: str, own: str) -> None:
    """Raise ConfigError unless a journal's job, in the words of `Terms.agreed`, is this one."""
    if journal != own:
        raise ConfigError(
            f"the journal is of another job: {journal}; this one is {own}",
            "resume with the job file that lies beside the journal",
        )


@dataclass(frozen=True)
class Policy:
    """How patient the hub is."""

    members: int
    """Members that the job waits for at its start, and the most that it has at a time."""
    quorum: int = 1
    """Fewest contributions with which a round closes at its deadline."""
    deadline_s: float = 60.0
    """Seconds from the first whole contribution to a round until it closes without late ones."""
    lost_after_s: float = 5.0
    """Seconds after which rounds stop waiting for an unreachable member."""
    heartbeat_s: float = 1.0
    """Seconds in which the hub sends at least one message to every member."""
    rejoin_s: float = 60.0
    """Seconds that members have to come back after the hub was restarted, once one of them has:
    then rounds go on without the others."""
    empty_after_s: float = 3600.0
    """Seconds that a hub waits while no member is back, after it was restarted or after all were
    lost; at least `rejoin_s`. Then the job is over."""
    most_elements: int = MAX_ELEMENTS
    """Elements of the largest model that a member may bring."""
    status_s: float = 0.0
    """Seconds between two reports of how a member is doing; 0: none is wanted."""
    learns_deadline: bool = False
    """Whether a round closes before `deadline_s`, where contributions usually come sooner."""
    fleet: int = 0
    """Members of the whole job, where this hub is the gateway of a site; 0: `members`."""
    min_members: int = 0
    """Members that are enough to begin with, `start_after_s` after they are here; 0: `members`."""
    start_after_s: float = 0.0
    stand_in: str = ""
    """Name of a member for which there is a place besides `members`; "": there is none."""

    @property
    def alone_s(self) -> float:
        """Seconds that the hub waits while no member is left, or back."""
        return max(self.empty_after_s, self.rejoin_s)

    def closing_rule(self) -> ClosingRule:
        """A fresh rule of when a round closes, of members that are in step."""
        rule = LearnedDeadline if self.learns_deadline else QuorumAndDeadline
        return rule(self.quorum, self.deadline_s)
