"""Chaos: schedules by seed, verdicts that can fail, and fleets in which nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import write_tiny
from hypothesis import given
from hypothesis import strategies as st

from chaos import command, schedule, simulated
from chaos.dealings import Dealings, too_late
from chaos.laws import Ended, Merging, Witness, judge
from chaos.schedule import Happening
from edgetrain import codecs
from edgetrain.errors import ConfigError
from edgetrain.exchange.further_messages import Assign
from edgetrain.exchange.hub.deal import SliceSums
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.records import CountedOnce, Round
from edgetrain.exchange.hub.steering import Steering
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.jobs.resolved import look_up
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum

pytestmark = pytest.mark.usefixtures("own_imports")

MERGING = Merging(Mean(), codecs.Dense(), codecs.Dense())
HUBS = ["tcp://a:5555", "tcp://b:5555", "tcp://c:5555"]
INITIAL = np.arange(3, dtype=np.float32)
GIVEN = {
    (member, round): np.full(3, 1 + index + 10 * round, np.float32)
    for index, member in enumerate(("m0", "m1"))
    for round in range(2)
}


@given(st.integers(0, 2**40), st.integers(1, 9), st.integers(0, 30))
def test_a_schedule_is_drawn_by_its_seed(seed, members, count):
    drawn = schedule.draw(seed, members, 50.0, count)
    assert drawn == schedule.draw(seed, members, 50.0, count)
    assert len(drawn) == count
    assert list(drawn) == sorted(drawn, key=lambda happening: happening.at_s)
    for happening in drawn:
        assert 0 <= happening.at_s <= 50
        assert 0 < happening.for_s <= schedule.LONGEST_S[happening.kind]
        assert all(0 <= member < members for member in happening.members)


def records(*, reply=None, counted=None):
    """Two rounds of two members, merged by the mean."""
    found = []
    for round in range(2):
        mean = (GIVEN["m0", round] + GIVEN["m1", round]) / np.float32(2)
        names = (counted or {}).get(round, [("m0", round), ("m1", round)])
        found.append(
            Round(
                round, tuple(CountedOnce(m, r, 1.0) for m, r in names), 0, 0, 0,
                ((reply or {}).get(round, mean).tobytes(),),
            )
        )  # fmt: skip
    return found


def verdict(journal, *, ended=None, steady=("m0", "m1"), twice=None):
    witness = Witness()
    for (member, round), vector in GIVEN.items():
        witness.saw(member, round, 0, vector.tobytes())
        witness.saw(member, round, 0, (twice or {}).get((member, round), vector).tobytes())
    base = INITIAL + np.float32(1.5) + np.float32(11.5)
    good = Ended(2, f"{checksum(base):016x}")
    return judge(
        journal, witness, MERGING, INITIAL, {"m0": good, "m1": good} | (ended or {}), steady
    )


FIRST = Ended(1, f"{checksum(INITIAL + np.float32(1.5)):016x}")


def test_a_clean_journal_breaks_no_law():
    assert verdict(records()) == []
    assert verdict(records(), ended={"m1": FIRST}) == [], "it left when another had still to give"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            lambda: verdict(records(counted={1: [("m0", 1), ("m1", 1), ("m1", 0)]})),
            "m1 counts 2 times in round 0",
        ),
        (
            lambda: verdict(records(counted={1: [("m0", 1)]}), steady=["m1"]),
            r"m1 was there all the time, and its rounds \[1\] are lost",
        ),
        (
            lambda: verdict(records(reply={1: np.zeros(3, np.float32)})),
            "round 1: merged again, its reply is another",
        ),
        (lambda: verdict(records(counted={1: [("m7", 1)]})), "round 1 counts what nobody gave"),
        (lambda: verdict(records(), ended={"m1": Ended(2, "0" * 16)}), "m1 ended with base 0000"),
        (lambda: verdict(records(), ended={"m1": Ended(1, "0" * 16)}), "m1 ended with base 0000"),
        (lambda: verdict(records()[:1]), "m0 ended with base .* not of fewer replies"),
        (
            lambda: verdict(records(), ended=dict.fromkeys(("m0", "m1"), FIRST)),
            "there were 2 rounds, and nobody ended with all of them",
        ),
        (
            lambda: verdict(records(), twice={("m1", 0): np.zeros(3, np.float32)}),
            "m1 sent round 0 twice, differently",
        ),
    ],
)
def test_each_law_can_be_seen_to_break(found, says):
    import re

    broken = found()
    assert any(re.search(says, law) for law in broken), broken


def fleet(folder, hub=None, **strategy):
    job = write_tiny(
        folder,
        fleet={"members": 4, "pace_s": 0.1, "network": "wan-50ms"},
        train={"steps": 120},
        strategy={"name": "dga", "local_steps": 5, "delay": 5, "final_sync": 0} | strategy,
        hub=hub or {"fsync": "never"},
    )
    return plan(reading.load(folder / job), folder)


def seeds(few, all_):
    """Some of `all_` schedules in `make test`, the others in `make test-real`."""
    more = [pytest.param(seed, marks=pytest.mark.real) for seed in range(few, all_)]
    return pytest.mark.parametrize("seed", [*range(few), *more])


ALL = (0, 1, 2, 3)
BROKEN = ("cut", "corrupt-up", "corrupt-down")


def test_without_power_cuts_the_model_is_what_it_is_without_faults(tmp_path):
    """Hubs that crash, links that go, processes that stand still: the same contributions."""
    planned = fleet(tmp_path)
    calm = simulated.run(planned, 0, (), 15.0)
    assert calm.broken == ()
    assert calm.rounds == 24
    happenings = (
        Happening(0.3, "hub", 0.2),
        Happening(2.0, "link", 1.5, (1,)),
        Happening(3.0, "pause", 2.5, (2,)),
        Happening(5.0, "hub", 4.0),
        Happening(9.5, "slow", 2.0, (0,)),
        Happening(9.6, "hub", 0.05),
        Happening(4.2, "disk", 0.6),
        *(Happening(10.0 + i, kind, 0.05, (i,)) for i, kind in enumerate(BROKEN)),
    )
    wild = simulated.run(planned, 0, happenings, calm.seconds)
    assert wild.broken == ()
    assert wild.rounds == calm.rounds
    assert wild.seconds > calm.seconds


def test_a_paused_job_has_the_bits_of_one_that_was_not(tmp_path):
    planned = fleet(tmp_path)
    calm = simulated.run(planned, 0, (), 15.0)
    happenings = (
        Happening(1.0, "control-pause", 3.0),
        Happening(6.0, "control-pause", 10.0),
        Happening(7.0, "hub", 2.0),  # it comes back paused
        Happening(8.0, "cut", 0.1, (1,)),
        Happening(
            8.0, "link", 30.0, (2,)
        ),  # longer than `lost_after_s`: nobody is given up meanwhile
    )
    paused = simulated.run(planned, 0, happenings, calm.seconds)
    assert (calm.broken, paused.broken) == ((), ())
    assert (paused.base, paused.rounds) == (calm.base, calm.rounds)
    assert len(paused.base) == 16
    assert paused.seconds > calm.seconds + 12, "nobody waited"


def test_a_job_that_people_end_keeps_the_laws(tmp_path):
    happenings = (
        Happening(3.0, "control-remove", 1.0, (3,)),
        Happening(4.0, "power", 4.0, (1,)),  # comes back to a job that has ended
        Happening(5.0, "hub", 0.5),
        Happening(5.1, "control-stop", 0.1),  # it is down, and told when it is back
    )
    ended = simulated.run(fleet(tmp_path), 0, happenings, 15.0)
    assert ended.broken == ()
    assert 6 <= ended.rounds < 20


def test_a_hub_that_forgets_the_end_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(Steering, "followed", lambda self, state, records, now: records)
    happenings = (
        Happening(3.5, "partition", 3.0, ALL),
        Happening(4.0, "control-stop", 0.1),  # nobody hears it
        Happening(5.0, "hub", 0.5),
    )
    broken = simulated.run(fleet(tmp_path), 0, happenings, 15.0).broken
    assert any("closed after people ended the job" in law for law in broken), broken


@pytest.mark.parametrize(
    "happenings",
    [
        [Happening(3.0, "partition", 18.0, ALL)],
        [Happening(3.0, "partition", 18.0, (1, 3)), Happening(4.0, "cut", 0.1, (0,))],
        [Happening(3.0, kind, 0.1, (2,)) for kind in ("cut", "corrupt-up")],
        [Happening(3.0, "clock", 40.0)],
        [Happening(3.0, "clock", 40.0, (2,))],
        [Happening(3.0, "kill", 0.2, (2,)), Happening(5.0, "power", 0.2, (1,))],
        [Happening(3.0, "disk", 2.0), Happening(4.0, "hub", 0.3)],
        [Happening(3.0, "control-remove", 0.5, (2,)), Happening(6.0, "control-remove", 0.5, (2,))],
    ],
    ids=lambda happenings: happenings[0].kind,
)
def test_each_kind_breaks_no_law(tmp_path, happenings):
    outcome = simulated.run(fleet(tmp_path), 0, happenings, 15.0)
    assert outcome.broken == ()
    assert outcome.rounds >= 24


def test_a_job_may_go_on_without_its_journal(tmp_path):
    """And a kill while it has none is left out: what that loses the job has chosen to lose."""
    planned = fleet(tmp_path, hub={"fsync": "never", "on_disk_full": "go on"})
    happenings = [Happening(3.0, "disk", 4.0), Happening(4.0, "hub", 0.3)]
    full = simulated.run(planned, 0, happenings, 15.0)
    assert full.broken == ()
    assert full.seconds < 16, "nobody waited for the disk"


@pytest.mark.parametrize("on_disk_full", ["stop", "go on"])
def test_a_full_disk_shows(tmp_path, monkeypatch, on_disk_full):
    """A journal that forgets what did not fit breaks a law."""
    monkeypatch.setattr(Journal, "append", lambda journal, record: None)
    planned = fleet(tmp_path, hub={"fsync": "never", "on_disk_full": on_disk_full})
    broken = simulated.run(planned, 0, [Happening(4.0, "hub", 0.3)], 15.0).broken
    assert any("lost" in law or "not what members" in law for law in broken), broken


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "dga"},
        {"name": "dga", "final_sync": 0.3},
        {"name": "fedavg", "delay": 0},
        {"name": "dga", "codec": "topk(0.5) | q2", "reply_codec": "int8"},
    ],
    ids=str,
)
@seeds(2, 4)
def test_drawn_schedules_break_no_law(tmp_path, strategy, seed):
    planned = fleet(tmp_path, **strategy)
    outcome = simulated.run(planned, seed, schedule.draw(seed, 4, 13.0, 6), 15.0)
    assert outcome.broken == (), [str(happening) for happening in outcome.happenings]


@pytest.mark.parametrize("seed", range(2))
def test_drawn_schedules_of_several_hubs_break_no_law(seed):
    words = ["members=4", "pace_s=0.1", "network=wan-50ms", "steps=60", "local_steps=4", "delay=8"]
    words += ["codec=topk(0.5)|q2", "ranges=3", f"hubs={HUBS}", "fsync=never", "final_sync=0"]
    planned = plan(reading.load(None, words))
    drawn = schedule.draw(seed, 4, 6.0, 6, hubs=3)
    outcome = simulated.run(planned, seed, drawn, 15.0)
    assert outcome.broken == (), [str(happening) for happening in drawn]


DEALT = ["members=4", "pace_s=0.1", "network=wan-50ms", "steps=40", "data.partition=shared(all)"]
DEALT += ["strategy=lbfgs(6, 4, 320)", "batch=16", "fsync=never", "evaluate_every=1000000"]


@seeds(1, 3)
def test_drawn_schedules_of_a_hub_that_hands_out_work_break_no_law(seed):
    planned = plan(reading.load(None, DEALT))
    drawn = schedule.draw(seed, 4, 15.0, 6, schedule.FAULTS)
    outcome = simulated.run(planned, seed, drawn, 15.0)
    assert outcome.broken == (), [str(happening) for happening in drawn]
    assert outcome.rounds == 40


@seeds(1, 2)
def test_drawn_schedules_of_several_hubs_that_hand_out_work_break_no_law(seed):
    planned = plan(reading.load(None, [*DEALT, "steps=25", "ranges=6", f"hubs={HUBS}"]))
    drawn = schedule.draw(seed, 4, 12.0, 6, schedule.FAULTS, hubs=3)
    outcome = simulated.run(planned, seed, drawn, 15.0)
    assert outcome.broken == (), [str(happening) for happening in drawn]
    assert outcome.rounds == 25


@pytest.mark.parametrize("hubs", [[], ["ranges=6", f"hubs={HUBS}"]])
def test_a_slice_that_counts_twice_shows(monkeypatch, hubs):
    add = SliceSums.add

    def twice(sums, slice, samples, loss, gradient):
        add(sums, slice, 2 * samples if not slice else samples, loss, gradient)

    planned = plan(reading.load(None, [*DEALT, "steps=4", *hubs]))
    with monkeypatch.context() as patched:
        patched.setattr(SliceSums, "add", twice)
        patched.setattr("chaos.laws.SliceSums", Honest)
        broken = simulated.run(planned, 0, (), 15.0).broken
    assert any("each slice once" in law for law in broken), broken


class Honest(SliceSums):
    """One whose slices count once, whatever the hub's do."""

    add = SliceSums.add


def test_a_lost_slice_that_goes_out_too_late_shows():
    dealings = Dealings()
    for at, member, slices in ((0.0, "m0", (0, 1)), (0.0, "m1", (2, 3)), (9.0, "m1", (0, 1))):
        dealings.saw_given(member, Assign(0, 4, True, slices), at)
    kill = [Happening(2.0, "kill", 30.0, (0,))]
    assert too_late(dealings, kill, 7.5, 40.0) == []
    assert len(too_late(dealings, kill, 5.0, 40.0)) == 2
    assert too_late(dealings, [*kill, Happening(3.0, "hub", 2.0)], 5.0, 40.0) == []
    assert too_late(dealings, [Happening(2.0, "power", 30.0, (0,))], 5.0, 40.0) == []


def test_a_member_that_only_one_of_several_hubs_has_given_up_joins_again():
    words = ["members=3", "steps=40", "strategy=dga", "local_steps=5", "delay=5", "ranges=3"]
    words += ["pace_s=0.1", "network=wan-50ms", f"hubs={HUBS}", "fsync=never", "final_sync=0"]
    planned = plan(reading.load(None, words))
    happenings = [
        Happening(1.0, "corrupt-down", 0.1, (0,)),  # its lead knows that it is gone, the others not
        Happening(2.0, "power", 7.0, (0,)),
    ]
    outcome = simulated.run(planned, 0, happenings, 5.0)
    assert outcome.broken == ()


def test_each_of_several_hubs_is_struck():
    drawn = [each for seed in range(40) for each in schedule.draw(seed, 4, 50.0, 6, hubs=3)]
    assert {hub for each in drawn if each.kind == "pause" for hub in each.hubs} == {0, 1, 2}
    for each in drawn:
        assert each.hubs or each.members or each.kind in schedule.ORDERS
        assert not (each.hubs and each.members) or each.kind == "partition"


def test_a_member_given_up_before_the_end_is_owed_what_was_answered_and_no_more(tmp_path):
    planned = fleet(tmp_path)
    outcome = simulated.run(planned, 0, [Happening(12.0, "link", 60.0, (0,))], 15.0)
    assert outcome.broken == ()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"name": "sync-sgd", "local_steps": 1, "delay": 0}, "cannot join"),
        ({"merge": "krum(1)"}, "leave it at 'mean'"),
    ],
)
def test_a_job_that_cannot_be_judged_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        Merging.of(look_up(reading.parse({"fleet": {"members": 5}, "strategy": words})))


@pytest.mark.real
def test_everything_loads_as_make_chaos_runs_it():
    root = Path(__file__).parents[2]
    code = "from chaos import among_members, averaging, behind_gateways, in_memory, trials"
    environment = os.environ | {"PYTHONPATH": str(root / "tests")}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True)


def test_the_command_gives_a_verdict(capsys):
    words = ["--schedules", "2", "--json", "steps=40", "--kinds", "hub,link"]
    assert command.main([*words, "--seed", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schedules"] == 2
    assert report["broken"] == []
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert all(kind in text for kind in schedule.PROCESS_KINDS)
    assert command.main(["--kinds", "hubs"]) == 2
    assert "did you mean 'hub'" in capsys.readouterr().err
