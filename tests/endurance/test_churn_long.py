"""A day of members that come and go, and hundreds of them over sockets: a hub holds no more."""

from __future__ import annotations

import os

from endurance import churn

HOURS = int(os.environ.get("HOURS", "24"))
JOINS = int(os.environ.get("JOINS", "500"))


def test_a_hub_holds_no_more_after_a_day(alone):
    assert alone(churn.day, HOURS) == []


def test_a_hub_holds_no_more_after_hundreds_of_joins_over_sockets(alone):
    assert alone(churn.crowd, JOINS) == []
