"""What a job's members agree on, and how patient its hub is. Values only; who acts on them is the
hub.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY_JOB = "any job"
"""What a journal says of a hub that takes members whatever job they run."""


@dataclass(frozen=True)
class Terms:
    """What all members of a job share; `Welcome` hands it to them."""

    strategy: str
    contributes: str
    weighted: bool
    every: int
    delay: int | None
    """Local steps, or None: measured."""
    job: str = ""
    """Digest of the job, or "": any job whose model fits."""

    def agreed(self, codec: str, reply_codec: str, masked: bool) -> str:
        """All of it in words, with the names of the codecs: what a journal says of its job."""
        return (
            f"{self.strategy}, every {self.every}, delay {self.delay}, {codec}, {reply_codec}, "
            f"{'masked, ' if masked else ''}{f'job {self.job}' if self.job else ANY_JOB}"
        )


@dataclass(frozen=True)
class Policy:
    """How patient the hub is."""

    members: int
    """The job starts when so many have joined, and this is also how many may be in."""
    quorum: int = 1
    """Contributions without which a round does not close at its deadline."""
    deadline_s: float = 60.0
    """From the first whole contribution to a round; then it closes without the late ones."""
    gone_s: float = 5.0
    """A member that cannot be reached for so long is no longer waited for."""
    beat_s: float = 1.0
    """The hub sends at least one message to everyone in this time."""
    return_s: float = 60.0
    """After a restart, or when all were lost, members have so long to come back."""
