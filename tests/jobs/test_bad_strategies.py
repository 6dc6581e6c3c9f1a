"""What a user may type by mistake with any strategy: one clear line before anything starts."""

from __future__ import annotations

import pytest

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve

SECURE = "masks are removed from the sum of all members' whole vectors, at one hub"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=fedbuf(4, 0.5)"], "no strategy 'fedbuf' (did you mean 'fedbuff'?)"),
        (["strategy=streaming-diloko(2, 0)"], "(did you mean 'streaming-diloco'?)"),
        (["strategy=fedbuff"], "fedbuff with arguments none (it reads fedbuff(M, a))"),
        (["strategy=fedbuff(2.5, 0)"], "fedbuff: M = 2.5 (allowed are whole numbers from 1"),
        (["strategy=fedbuff(2, -1)"], "fedbuff: a = -1 (allowed are 0 to less than 100)"),
        (["strategy=fedbuff(5, 0.5)"], "a round would wait for more than there are (M = 4, or"),
        (["strategy=fedbuff(2, 0.5)", "merge=median"], "the rule compares at least 3"),
        (["strategy=fedbuff(2, 0.5)", "quorum=2"], "says how many contributions make a round"),
        (["strategy=fedbuff(2, 0.5)", "secure=true"], SECURE),
        (["strategy=ssp(1)", "secure=true"], SECURE),
        (["strategy=async-sgd(5)", "secure=true"], SECURE),
        (["strategy=ssp(-1)"], "ssp: s = -1 (allowed are whole numbers from 0 to 100000 and inf)"),
        (["strategy=ssp(nan)"], "ssp: s = nan"),
        (["strategy=async-sgd(0)"], "async-sgd: fetch = 0 (allowed are whole numbers from 1"),
        (["strategy=ssp(inf)", "final_sync=0.2"], "members are out of step"),
        (["strategy=sync-sgd", "final_sync=0.2"], "it exchanges gradients at every step"),
        (
            ["final_sync=1.5"],
            "strategy.final_sync = 1.5 (allowed is a number or 'auto' from 0 to 1)",
        ),
        (["strategy=sync-sgd", "outer=adam(0.1)"], "its replies are gradients"),
        (["strategy=scaffold | adam(0.1)"], "scaffold: outer = adam(0.1)"),
        (["outer=adm(0.1)"], "no outer rule 'adm' (did you mean 'adam'?)"),
        (["outer=nesterov(0.7, 1)"], "nesterov: m = 1 (allowed are 0 to less than 1)"),
        (["strategy=streaming-diloco(4, 2)"], "alpha = 2 (allowed are 0 to less than 1)"),
        (["strategy=streaming-diloco(4, 0)", "local_steps=6"], "take a multiple of 4"),
    ],
)
def test_a_slip_is_one_clear_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, ["members=4", *words]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_more_fragments_than_blocks_are_refused_before_any_member_starts():
    words = ["strategy=streaming-diloco(50, 0.5)", "local_steps=50"]
    with pytest.raises(ConfigError, match="which has 39 blocks of 256"):
        plan(load(None, words))


@pytest.mark.parametrize(
    "line",
    [
        ["simulate", "strategy=ssp(-1)"],
        ["hub", "strategy=fedbuff(9, 0.5)", "members=4"],
        ["compare", "--simulate", "--strategies", "dga,fedbuf(4, 0.5)"],
        ["plan", "strategy=scaffold", "codec=topk(0.01)"],
    ],
)
def test_verbs_refuse_it_in_one_line(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    said = capsys.readouterr().err
    assert said.startswith("edgetrain")
    assert said.count("\n") == 1
