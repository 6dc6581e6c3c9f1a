"""Merge rules at work: in a hub, in a job, in the run folder and where people look."""

from __future__ import annotations

import json

import numpy as np
import pytest
from merging_room import ELEMENTS, Room, closed, filled, is_reply_to

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.effects import Closed, Note, Send
from edgetrain.exchange.messages import NO_WEIGHT, Refuse
from edgetrain.exchange.transport import Traffic
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import resolve
from edgetrain.runs import folder as runs
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.reports import comparison
from edgetrain.runs.reports.live.frame import member_columns
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.runs.summary import summarise
from edgetrain.strategies import merging
from edgetrain.strategies.merging.rule import Mean
from edgetrain.training.hub_recorder import HubRecorder


def test_a_round_is_merged_by_the_rule_and_says_who_was_cut():
    room = Room(merging.parse("norm-bound(2x)"), "abcd")
    for name, value in zip("abc", (1, 2, 3), strict=True):
        assert closed(room.contribute(name, 0, filled(value))) == []
    (found,) = closed(room.contribute("d", 0, filled(-40)))
    assert found.members == ("a", "b", "c", "d")
    ((name, share, reason),) = found.cuts
    assert (name, share) == ("d", 1.0)
    assert reason == "length 133, the limit is 16.6"
    np.testing.assert_allclose(room.hub.base, filled(2.0), rtol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean(0.4)"])
def test_a_contribution_without_weight_is_in_the_round_and_in_no_merge(rule):
    """Of a member that took no step, and is in step with the others all the same."""
    room = Room(merging.parse(rule), "abcd")
    effects = room.contribute("d", 0, filled(0), weight=NO_WEIGHT)
    for name, value in zip("abc", (1, 2, 3), strict=True):
        assert closed(effects) == []
        effects = room.contribute(name, 0, filled(value))
    assert closed(effects)[0].members == ("a", "b", "c", "d")
    assert {e.message.members for e in effects if is_reply_to("a", e)} == {4}
    np.testing.assert_allclose(room.hub.base, filled(2.0), rtol=1e-6)
    for name in "abcd":
        effects = room.contribute(name, 1, filled(5), weight=NO_WEIGHT)
    assert {e.message.members for e in effects if is_reply_to("a", e)} == {0}
    np.testing.assert_allclose(room.hub.base, filled(2.0), rtol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "median", "multi-krum(0, 2)", "norm-clip(1)"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_who_sends_what_is_no_number_is_expelled_and_the_others_go_on(rule, poison):
    room = Room(merging.parse(rule), "abc")
    bad = filled(1.0)
    bad[ELEMENTS - 2] = poison
    effects = room.contribute("b", 0, bad)
    effects += room.contribute("a", 0, filled(1.0))
    effects += room.contribute("c", 0, filled(1.0))
    (refused,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Refuse)]
    assert refused.to == b"b"
    assert refused.message.code == "payload"
    assert "not a finite number" in refused.message.reason
    assert [e.member for e in effects if isinstance(e, Note) and e.event == "refused"] == ["b"]
    (found,) = closed(effects)
    assert found.members == ("a", "c")
    assert np.isfinite(room.hub.base).all()


def test_finite_contributions_whose_sum_is_not_expel_nobody():
    room = Room(Mean(), "ab")
    huge = filled(1.0)
    huge[3] = 3e38
    room.contribute("a", 0, huge)
    (found,) = closed(room.contribute("b", 0, huge))
    assert found.members == ("a", "b")


def test_one_member_has_one_voice_however_many_rounds_it_is_late():
    room = Room(merging.parse("median"), "abcd", quorum=3)
    for name in "abc":
        room.contribute(name, 0, filled(1.0))
    effects = room.hub.tick(11.0)
    assert closed(effects)[0].missing == ("d",)
    room.known += [e.message.checksum for e in effects if is_reply_to("a", e)]
    room.contribute("d", 0, filled(50.0), 11.0)  # late: counts in round 1 …
    room.contribute("d", 1, filled(60.0), 11.0)  # … but this one is newer
    for name, value in zip("ab", (2.0, 4.0), strict=True):
        room.contribute(name, 1, filled(value), 11.0)
    (found,) = closed(room.contribute("c", 1, filled(6.0), 11.0))
    assert found.members == ("a", "b", "c", "d", "d")
    assert found.weight == 4
    reasons = {reason: share for name, share, reason in found.cuts if name == "d"}
    assert reasons["a newer one of the same member counts in this round"] == 1.0
    np.testing.assert_array_equal(room.hub.base, filled(1.0 + 5.0))


# -- in a job -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sync-sgd", "local-sgd", "dga"])
def test_a_job_names_its_rule_for_gradients_and_displacements(strategy):
    job = parse({}, [f"strategy={strategy}", "merge=trimmed-mean(0.25)"])
    assert job.strategy.merge == "trimmed-mean(0.25)"
    rule = hub_of(resolve(job)).rounds.merger.rule
    assert rule.share == 0.25
    assert rule.keeps_late == (strategy != "sync-sgd")
    assert job.digest() != parse({}, [f"strategy={strategy}"]).digest()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["merge=medain"], "no merge rule 'medain' (did you mean 'median'?)"),
        (
            ["merge=median", "strategy=fedavg"],
            "'median' and fedavg: the rule counts each member once",
        ),
        (["merge=krum(3)"], "strategy.merge = 'krum(3)': it needs at least 9 members"),
        (
            ["merge=median", "codec=topk(0.1)"],
            "codec = 'topk(0.1)': the middle of mostly zeros is zero",
        ),
        (["merge=trimmed-mean(0.6)"], "share = 0.6 (allowed are 0 to less than 0.5)"),
    ],
)
def test_what_cannot_be_merged_is_said_before_anything_starts(overrides, said):
    with pytest.raises(ConfigError) as caught:
        resolve(parse({}, overrides))
    assert said in str(caught.value)


def test_the_command_lists_merge_rules(capsys):
    assert main(["strategies"]) == 0
    text = capsys.readouterr().out
    assert all(row.spelling in text for row in merging.TABLE.values())
    assert main(["strategies", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["merge"]] == list(merging.TABLE)
    assert "dga" in [row["name"] for row in found["strategies"]]


# -- in the run folder and on the screen ----------------------------------------------------------

CUTS = (("m1", 1.0, "length 9, the limit is 2"), ("m2", 0.25, "short"), ("hub", 0.0, "a remark"))


def recorded(tmp_path):
    folder = runs.create(tmp_path, "cuts")
    recorder = HubRecorder(folder, lambda: 0.0, lambda: Traffic(0, 0, 0, 0.0))
    recorder(Note("started", "hub", "3 members"))
    for round in range(2):
        recorder(Closed(round, ("m0", "m1", "m2"), (), 3.0, 0.1, 0, CUTS))
    recorder(Closed(2, ("m0", "m1", "m2"), (), 3.0, 0.1, 0))
    recorder.close()
    for name in ("m0", "m1", "m2"):
        with MetricsLog(runs.metrics_path(folder), name, lambda: 1.0, 0.0) as log:
            log.step(
                step=1, round=1, loss=1.0, wait_s=0.1, compute_s=0.1, overhead_s=0.1,
                sent_bytes=1, received_bytes=1, cpu_s=0.1, peak_bytes=1,
            )  # fmt: skip
    return folder


def test_who_was_cut_is_in_the_run_folder(tmp_path):
    folder = recorded(tmp_path)
    first, _, last = runs.read_metrics(folder, "round")
    assert first["cuts"] == [list(cut) for cut in CUTS]
    assert "cuts" not in last
    summary = summarise(folder)
    assert summary["contributions_cut"] == {"m1": 2.0, "m2": 0.5}
    notes = comparison.compare([summary | {"status": "finished", "members_lost": []}]).notes
    assert any("cut m1 (2 rounds), m2 (0.5 rounds)" in note for note in notes)


def test_who_was_cut_is_on_the_screen(tmp_path):
    watch = FolderWatch(recorded(tmp_path))
    watch.read()
    state = watch.state()
    assert {m.name: m.cut for m in state.members} == {"m0": 0.0, "m1": 2.0, "m2": 0.5}
    assert "cut" in [c.heading for c in member_columns(state.members)]
    spared = [m for m in state.members if not m.cut]
    assert spared
    assert "cut" not in [c.heading for c in member_columns(spared)]
