"""Members that come and go: what a hub holds afterwards. A day of it: make test-endurance."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from endurance import churn

from edgetrain.exchange.hub.members import AWAY, MemberRecord


def held():
    """Live objects by type."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


@pytest.mark.real
def test_after_hours_of_churn_a_hub_holds_what_it_held_before(tmp_path):
    others = held()["MemberRecord"]  # of fleets of other tests in this process
    fleet = churn.Churn(tmp_path, pace_s=15.0)
    for _ in range(70):  # as many as it remembers of those that are gone, too
        fleet.minute()
    before, files = held(), fleet.sample(0).descriptors
    for _ in range(45):
        fleet.minute()
    after = held()
    more = {kind: count - before[kind] for kind, count in after.items()}
    assert {kind: count for kind, count in more.items() if count > 30} == {}
    assert (
        after["MemberRecord"] - others
        <= (1 + AWAY + len(fleet.room.hub.rounds.open_rounds.sizes())) * churn.PLACES
    )
    assert fleet.sample(1).descriptors == files
    assert fleet.events["joined"] > 80
    assert fleet.events["back"] > 60
    assert len(list(fleet.folder.iterdir())) < 20
    assert isinstance(next(iter(fleet.room.hub.members)), MemberRecord)
    fleet.close()
