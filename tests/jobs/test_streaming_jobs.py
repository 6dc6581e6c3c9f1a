"""Jobs whose rounds concern one range of the model each: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from edgetrain.errors import ConfigError
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve


def found(*words):
    return resolve(load(None, ["strategy=streaming-diloco(4, 0.5)", "steps=100", *words]))


def test_a_round_begins_every_part_of_a_fragments_steps():
    assert found("local_steps=20", "delay=6").local_steps == 5
    assert found("delay=6").local_steps == 5
    assert found("delay=auto").local_steps == 5
    assert found("local_steps=40", "delay=auto").local_steps == 10
    hub = hub_of(found("local_steps=20", "delay=6"))
    assert (hub.terms.local_steps, hub.terms.strategy.ranges) == (5, 4)
    assert hub.terms.strategy.spelled == "streaming-diloco(4, 0.5)"


def test_what_is_left_of_each_fragment_at_the_end_counts_as_a_contribution():
    assert found("local_steps=20", "delay=6").rounds == 20 + 3
    assert found("local_steps=24", "delay=6").rounds == 17 + 3


def test_the_short_rounds_of_a_final_sync_count_as_contributions():
    words = "strategy=fedavg", "local_steps=20", "steps=280"
    assert found(*words).rounds == 14
    assert found(*words, "final_sync=0.125").rounds == 13 + 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["local_steps=10"],
            r"local_steps = 10: .* every 10/4 steps \(take a multiple of 4, as 12\)",
        ),
        (["local_steps=2"], r"local_steps = 2: .* \(take a multiple of 4, as 4\)"),
        (["codec=low-rank(2)"], r"low-rank\(2\)' works on whole tensors, and 4 ranges"),
        (["codec=topk(0.1, tensor)"], "works on whole tensors"),
        (["codec=fp32", "reply_codec=*.bias: bf16; int8"], "works on whole tensors"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(words, said):
    with pytest.raises(ConfigError, match=said):
        found(*words)
