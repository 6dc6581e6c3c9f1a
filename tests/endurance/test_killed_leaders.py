"""The leader of a group in a fleet killed with SIGKILL: it is started again, and joins again."""

from __future__ import annotations

import joined_runs
import pytest

from edgetrain.runs.folder import read_metrics

pytestmark = pytest.mark.usefixtures("own_imports")


def test_a_group_comes_back_after_its_leader_was_killed(tmp_path):
    out = joined_runs.run(tmp_path, "data.killed=0", "data.pause=0.1", "steps=400")
    assert (tmp_path / "mark0").exists()
    events = read_metrics(out, "event")
    assert len(joined_runs.bases(events)) == 1, "replicas are equal bit for bit"
    said = [each["event"] for each in events if each.get("about") == "m2"]
    assert said == ["joined", "late", "gone", "joined", "left"], "under the same name"
