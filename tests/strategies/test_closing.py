"""Closing rules on rounds that are only described."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.strategies.closing import QuorumAndDeadline


@dataclass(frozen=True)
class Seen:
    """An open round."""

    opened: float
    members: tuple[str, ...] = ()
    missing: tuple[str, ...] = field(default=("z",))

    @property
    def contributions(self) -> int:
        return len(self.members)


@given(
    st.integers(1, 5), st.floats(0, 100), st.floats(0, 100), st.floats(0, 200), st.integers(0, 9)
)
def test_a_round_closes_at_its_deadline_with_a_quorum_and_never_before(
    quorum, deadline_s, opened, waited_s, count
):
    rule = QuorumAndDeadline(quorum, deadline_s)
    now = opened + waited_s
    due = rule.due(Seen(opened, tuple(f"m{i}" for i in range(count))), now)
    assert due == (count >= quorum and now - opened >= deadline_s)


def test_late_contributions_are_of_the_quorum():
    rule = QuorumAndDeadline(3, 10.0)
    assert not rule.due(Seen(0.0, ("a", "b")), 10.0)
    assert rule.due(Seen(0.0, ("a", "b", "b")), 10.0)
