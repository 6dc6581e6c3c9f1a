"""Checkpoints and journals written before the package had rooms: this code goes on from them.

Each folder of data/ is from one job with one member (children.model(0), Adam), ended after nine
steps: the hub's journal, the member's newest checkpoint, and the parameters that the old code
reached when it went on to twenty steps.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import children
import numpy as np
import pytest
from loopback import Loopback
from test_checkpoint_fleet import Life

from edgetrain.exchange.hub.journal import Journal

DATA = Path(__file__).parent / "data"
CODEC = "topk(0.2) | q2"
JOBS = {"dga": {"local_steps": 2, "delay": 3}, "sync-sgd": {}}
BEGINS = {"dga": 8, "sync-sgd": 9}
"""With dga the ninth step is in the middle of a round, and is taken again."""


@pytest.mark.parametrize("strategy", JOBS)
def test_an_old_checkpoint_and_journal_lead_to_where_they_did(strategy, tmp_path):
    shutil.copytree(DATA / strategy / "journal", tmp_path / "journal")
    (tmp_path / "m0").mkdir()
    shutil.copy(DATA / strategy / "m0.00000001.checkpoint", tmp_path / "m0")
    wires, journal = Loopback(), Journal(tmp_path / "journal")
    served = children.HubThread(
        wires,
        strategy,
        1,
        codec=CODEC,
        policy={"lost_after_s": 60.0},
        journal=journal,
        **JOBS[strategy],
    )
    served.hub.restore(journal.state, journal.records(), time.monotonic())
    with served.serving():
        life = Life(wires, 0, tmp_path / "m0", optimizer="adam", job="0123456789abcdef")
        assert life.member.begins_at == life.member.steps == BEGINS[strategy]
        life.run(20)
    journal.close()
    assert life.batches == list(range(BEGINS[strategy], 20))
    np.testing.assert_allclose(
        children.flat(life.model), np.load(DATA / strategy / "end.npy"), atol=1e-5
    )
