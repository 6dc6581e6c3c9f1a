"""Strangers and an insider take neither a hub's memory nor its members' time, and are logged."""

from __future__ import annotations

import os

import pytest

from endurance import attacks

FRAMES = int(os.environ.get("FRAMES", "100000"))
EACH_S = float(os.environ.get("EACH_S", "4"))
DESCRIPTORS = int(os.environ.get("DESCRIPTORS", "0"))
ONLY = os.environ.get("ATTACKS", ",".join(attacks.ATTACKS))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it forks, with threads
def test_members_of_an_attacked_hub_go_on_as_fast(tmp_path, printed):
    """`ratio` is of this machine's cores, too: attackers and attacked share them."""
    chosen = [name.strip() for name in ONLY.split(",")]
    assert set(chosen) <= set(attacks.ATTACKS), f"known are {', '.join(attacks.ATTACKS)}"
    assert printed(attacks.attack_all, tmp_path, chosen, FRAMES, EACH_S, DESCRIPTORS) == []
