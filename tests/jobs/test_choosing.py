"""`strategy = "auto"`: a row for each kind of job that was measured, and a line for those that were
not."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.jobs import choosing
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve

FAR = ("network=wan-200ms", "pace_s=0.05", "strategy=auto")
TEXT = "task=edgetrain.tasks:char_lm"
UNEQUAL = "data.partition=dirichlet(0.3)"
PLAIN = "optimizer={ name = 'sgd', lr = 0.1 }"
MOMENTUM = "optimizer={ name = 'sgd', lr = 0.1, momentum = 0.9 }"
ADAMW = "optimizer={ name = 'AdamW', lr = 0.01 }"


@pytest.mark.parametrize(
    ("words", "row"),
    [
        ([], choosing.EQUAL),
        (["data.partition=iid"], choosing.EQUAL),
        (["network=rtt-40ms"], choosing.NO_TRIP),
        (["network=rtt-40ms, rtt-500ms", "members=2"], choosing.EQUAL),
        ([UNEQUAL], choosing.UNEQUAL),
        ([UNEQUAL, PLAIN], choosing.PLAIN),
        ([UNEQUAL, PLAIN, "network=rtt-500ms", "pace_s=0.02"], choosing.PLAIN_FAR),
        ([UNEQUAL, ADAMW], choosing.ADAPTIVE),
        (["task=mine:task"], choosing.DOUBT),
        ([TEXT, ADAMW], choosing.TEXT),
        ([TEXT, MOMENTUM], choosing.TEXT),
    ],
)
def test_a_job_gets_the_row_that_was_measured_for_it(words, row):
    job, why = choosing.named(load(None, [*FAR, *words]))
    assert job.strategy.name == row.strategy
    assert row.strategy in why
    assert row.because in why
    assert job.strategy.final_sync == "auto"
    resolve(job)


def test_what_a_job_says_stays():
    job, _ = choosing.named(load(None, [*FAR, TEXT, ADAMW, "final_sync=0.2"]))
    assert job.strategy.final_sync == 0.2
    named = load(None, ["strategy=scaffold"])
    assert choosing.named(named) == (named, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["network=none"], "it needs the round trip, and the seconds of a step"),
        (["pace_s=0"], "it needs the round trip, and the seconds of a step"),
        (["device=raspberry-pi-4b:2, laptop:2", "members=4"], "it does not know how much"),
        ([TEXT, PLAIN], "text was not measured with plain SGD"),
        (["network=rtt-x"], "network 'rtt-x'"),
    ],
)
def test_where_it_cannot_know_is_one_clear_line(words, said):
    with pytest.raises(ConfigError, match=said) as refused:
        choosing.named(load(None, [*FAR, *words]))
    assert "\n" not in str(refused.value)


def test_every_row_is_one_that_the_page_names():
    page = (Path(__file__).parents[2] / "docs/how-to/choosing.md").read_text("utf-8")
    table = page[: page.index("**First at")]
    assert all(f"`{row.strategy}`" in table for row in choosing.TABLE)


def test_verbs_say_which_and_why(capsys):
    assert main(["plan", "strategy=auto", "pace_s=0.05"]) == 2
    assert "strategy.name = 'auto' with fleet.network = 'none'" in capsys.readouterr().err
    assert main(["strategies"]) == 0
    assert "strategy=auto chooses" in capsys.readouterr().out
