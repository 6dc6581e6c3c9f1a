"""The table of strategies: what a row says of a strategy is what its half does."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from every_strategy import arguments_of
from fleet import Fleet
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.grid import variants
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import resolve
from edgetrain.strategies import Parameter, Strategy
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.spelling import number, spell, split, split_list

ROWS = list(strategies.TABLE.values())


def half_of(row):
    params = np.zeros(8 if row.has_variates else 4, np.float32)
    row = replace(row, arguments=arguments_of(row))
    return row.member_half(
        strategies.Setting(params, np.ones(4, np.float32), row.local_steps, 2 if row.delays else 0)
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_half_is_what_its_row_says(row):
    half = half_of(row)
    assert half.adjusts_gradient is row.adjusts_gradient
    assert half.moves_params is row.moves_params
    assert row.has_local_steps or half.local_steps == row.local_steps == 1
    assert row.merge_rule().keeps_late is row.keeps_late


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_step_is_quiet_where_the_half_adjusts_the_gradient(row):
    half = half_of(row)
    assert not (half.adjusts_gradient and half.quiet_steps())
    assert (
        half.adjusts_gradient
        or half.quiet_steps()
        == min(row.local_steps, getattr(half, "fetch", 0) or row.local_steps) - 1
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_goes_to_other_processes(row):
    assert pickle.loads(pickle.dumps(row)) == row


# -- arguments ------------------------------------------------------------------------------------


class Shrunk(Displacement):
    """Displaces by `share` of what the optimizer did."""

    def __init__(self, share, setting):
        super().__init__(setting.params, setting.local_steps, setting.delay, setting.memory)
        self.share = np.float32(share)

    def after_step(self):
        if self.share != 1:
            self.params -= (1 - self.share) * (self.params - self.base)
        return super().after_step()


@pytest.fixture
def shrunk(monkeypatch):
    """A strategy with an argument, in the table for one test."""
    row = Strategy(
        name="shrunk",
        summary="for tests",
        source="these tests",
        build=lambda setting, share: Shrunk(share, setting),
        parameters=(Parameter("share", 0.0, 2.0),),
    )
    monkeypatch.setitem(strategies.TABLE, row.name, row)
    return row


def test_a_strategy_takes_arguments_as_codecs_and_merge_rules_do(shrunk):
    found = strategies.find(" shrunk( 0.50 ) ")
    assert (found.name, found.arguments) == ("shrunk", (0.5,))
    assert (found.spelling, found.spelled) == ("shrunk(share)", "shrunk(0.5)")
    assert strategies.find(found.spelled) == found
    assert strategies.find("dga").spelled == strategies.find("dga").spelling == "dga"


def test_a_row_in_the_place_of_another_is_found_from_then_on(monkeypatch):
    row = strategies.find("fedavg")
    monkeypatch.setitem(strategies.TABLE, "fedavg", replace(row, local_steps=9))
    assert strategies.find("fedavg | adam(0.1)").local_steps == 9
    monkeypatch.undo()
    assert strategies.find("fedavg | adam(0.1)").local_steps == row.local_steps == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shrnk(0.5)", "no strategy 'shrnk' (did you mean 'shrunk'?)"),
        ("shrunk(0.5", "no strategy 'shrunk(0.5' (did you mean 'shrunk'?)"),
        ("shrunk", "shrunk with arguments none (it reads shrunk(share))"),
        ("shrunk()", "shrunk: share =  (allowed are 0 to less than 2)"),
        ("shrunk(1, 2)", "shrunk with arguments (1, 2) (it reads shrunk(share))"),
        ("shrunk(2)", "shrunk: share = 2 (allowed are 0 to less than 2)"),
        ("shrunk(-0.1)", "shrunk: share = -0.1 (allowed are 0 to less than 2)"),
        ("shrunk(nan)", "shrunk: share = nan (allowed are 0 to less than 2)"),
        ("shrunk(much)", "shrunk: share = much (allowed are 0 to less than 2)"),
        ("fedavg(5)", "'fedavg' takes no arguments, not (5)"),
        ("dga(5)", "dga: correction = 5 (known: auto, decay, paper, predict, variates)"),
        ("dga(predct)", "dga: correction = predct (did you mean 'predict'?)"),
        ("dga(predict, 5)", "'dga' takes no arguments, not (5)"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_allowed(shrunk, text, said):
    with pytest.raises(ConfigError) as refused:
        strategies.find(text)
    assert str(refused.value) == said


@given(st.floats(0.0, 1e300))
def test_an_argument_is_the_same_at_the_other_end(value):
    assert number("x", "y", spell(value), 0.0, 1e301) == value
    assert split(f"name({spell(value)}, {spell(value)})") == ("name", [spell(value)] * 2)


def test_a_list_of_strategies_has_commas_inside_and_between():
    assert split_list("dga, b(1, 2) ,c(3)") == ["dga", "b(1, 2)", "c(3)"]
    assert split_list("dga") == ["dga"]


def test_a_correction_is_spelled_in_parentheses_or_as_a_key_of_the_job():
    drift = strategies.find("dga(predict)")
    assert (drift.name, drift.correction, drift.spelled) == ("dga", "predict", "dga(predict)")
    assert strategies.find(" dga( auto ) ") == strategies.find("dga")
    assert strategies.find("dga(paper)").spelled == "dga(paper)"
    for words in (["strategy=dga(predict)"], ["correction=predict"]):
        found = resolve(parse({}, words))
        assert found.strategy == drift
        assert hub_of(found).terms.strategy.spelled == "dga(predict)"
    job = parse({}, ["correction=predict", "delay=6"])
    assert [each.strategy.correction for each in variants(job, ["dga", "fedavg"])] == [
        "predict",
        "",
    ]


@pytest.mark.parametrize(
    ("words", "spelled"),
    [
        ([], "dga"),
        (["secure=true"], "dga"),
        (["unit=example", "noise=1"], "dga"),
        (["unit=member", "noise=1"], "dga(paper)"),
        (["merge=median"], "dga(paper)"),
        (["outer=nesterov(0.7, 0.9)"], "dga(paper) | nesterov(0.7, 0.9)"),
        (["merge=median", "correction=predict"], "dga(predict)"),
    ],
)
def test_where_replies_are_no_mean_of_the_members_nothing_is_chosen_from_them(words, spelled):
    assert resolve(parse({}, words)).strategy.spelled == spelled


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], False),
        (["data={ partition = 'dirichlet(0.3)' }"], True),
        (["correction=predict"], True),
        (["data={ partition = 'dirichlet(0.3)' }", "correction=paper"], False),
        (["data={ partition = 'dirichlet(0.3)' }", "local_steps=5"], False),
        (["data={ partition = 'dirichlet(0.3)' }", "optimizer={ name = 'adamw' }"], False),
    ],
)
def test_one_round_in_flight_is_wanted_where_a_drift_may_be_learned(words, expected):
    assert resolve(parse({}, words)).delay.one_in_flight == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["correction=predct"], "dga: correction = predct (did you mean 'predict'?)"),
        (
            ["strategy=sync-sgd", "correction=predict"],
            "sync-sgd: correction = predict: there is no delay to correct (leave it out, or choose "
            "dga)",
        ),
        (
            ["strategy=dga(predict)", "correction=paper"],
            "strategy.name = 'dga(predict)' and strategy.correction = 'paper' (say one of them)",
        ),
        (
            ["correction=predict", "unit=member", "noise=1"],
            "dga(predict) and privacy.unit = 'member': the noise in a reply is larger than the "
            "drift "
            "that members would learn from it (say correction = 'paper')",
        ),
        (
            ["strategy=eager", "unit=member", "noise=1"],
            "eager and privacy.unit = 'member': the noise in a reply is larger than the "
            "drift "
            "that members would learn from it (take local-sgd or dga)",
        ),
    ],
)
def test_a_wrong_correction_is_one_clear_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(parse({}, words))
    assert str(refused.value) == said


def test_members_get_the_arguments_from_the_hub(shrunk):
    hub = hub_of(resolve(parse({}, ["strategy=shrunk(0.50)"])))
    assert hub.terms.strategy.spelled == "shrunk(0.5)"
    fleets = {
        text: Fleet(text, members=3, local_steps=2, delay=0, steps=6).run()
        for text in ("local-sgd", "shrunk(1)", "shrunk(0.5)")
    }
    bases = {text: fleet.members[0].half.base for text, fleet in fleets.items()}
    assert all(member.half.share == 0.5 for member in fleets["shrunk(0.5)"].members)
    assert bases["shrunk(1)"].tobytes() == bases["local-sgd"].tobytes()
    assert bases["shrunk(0.5)"].tobytes() != bases["local-sgd"].tobytes()


def test_the_command_lists_strategies_with_their_arguments(shrunk, capsys):
    assert main(["strategies"]) == 0
    assert "shrunk(share) for tests" in capsys.readouterr().out
    assert main(["strategies", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    assert found["shrunk"]["spelling"] == "shrunk(share)"
    assert list(found) == list(strategies.TABLE)


def test_strategies_with_arguments_are_compared(shrunk):
    job = parse({}, ["local_steps=3", "delay=6"])
    found = variants(job, split_list("sync-sgd, shrunk(0.5),dga"))
    assert [each.strategy.name for each in found] == ["sync-sgd", "shrunk(0.5)", "dga"]
    assert [(each.strategy.local_steps, each.strategy.delay) for each in found] == [
        (0, 0),
        (3, 0),
        (3, 6),
    ]
