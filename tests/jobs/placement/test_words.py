"""Placements as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.jobs.placement.words import LOOPED, SCHEDULES, SPLIT, V_SHAPED, Placement, parse


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=2 pipline=2", "did you mean 'pipeline'"),
        ("data", "it reads data=2"),
        ("data=two", "a whole number"),
        ("data=0", "1 to 4096"),
        ("data=2 data=4", "twice"),
        ("data=4 shard=3", "shard=3 does not divide data=4 (shard=1)"),
        ("data=2 zero=3", "shard=1 with zero=3"),
        ("zero=4", "0, 1, 2 or 3"),
        ("zero=1", "shard=1 with zero=1"),
        ("pipeline=2 schedule=1fb1", "did you mean '1f1b'"),
        ("pipeline=2 schedule=interleaved microbatches=3", "microbatches="),
        ("pipeline=2 schedule=dualpipev microbatches=2", "at least 4"),
        ("pipeline=2 stages=2", "schedule=interleaved"),
        ("stages=2", "leave stages out"),
        ("data=2 shard=2 zero=3 pipeline=2 schedule=zbv microbatches=4", "are wrong (zero=2"),
        ("pipeline=3 cuts=4", "2 places that increase"),
        ("pipeline=3 cuts=4,2", "2 places that increase"),
        ("recompute=maybe", "yes or no"),
        ("recompute=3-1", "layers as in 0-3,7"),
        ("sequence=4 ulysses=3", "ulysses=3 does not divide sequence=4 (ulysses=1)"),
        ("norms=split", "tensor=2, whose ranks share the norms"),
        ("tensor=2 norms=splat", "did you mean 'split'"),
    ],
)
def test_what_cannot_be_is_one_clear_line(text, said):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert said in str(caught.value)


@st.composite
def placements(draw):
    shard = draw(st.sampled_from([1, 2, 4]))
    pipeline = draw(st.integers(1, 4))
    schedule = draw(st.sampled_from(sorted(SCHEDULES))) if pipeline > 1 else "1f1b"
    tensor, ulysses = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    several = schedule in LOOPED or schedule in V_SHAPED
    return Placement(
        data=shard * draw(st.integers(1, 3)),
        shard=shard,
        zero=draw(st.sampled_from([1, 2] if schedule in SPLIT else [1, 2, 3])) if shard > 1 else 0,
        pipeline=pipeline,
        tensor=tensor,
        norms=draw(st.sampled_from(["whole", "split"])) if tensor > 1 else "whole",
        sequence=ulysses * draw(st.integers(1, 3)),
        ulysses=ulysses,
        schedule=schedule,
        stages=2 if several else 1,
        microbatches=2 * pipeline * draw(st.integers(1, 3)),
        recompute=draw(
            st.booleans()
            | st.sets(st.integers(0, 9), min_size=1).map(lambda each: tuple(sorted(each)))
        ),
    )


@settings(max_examples=100, deadline=None)
@given(placements())
def test_what_is_written_is_read_again(placement):
    placement.check()
    assert parse(str(placement)) == placement
    held = [s for rank in range(placement.pipeline) for s in placement.stages_of(rank)]
    assert sorted(held) == list(range(placement.all_stages))


def test_the_shortest_words():
    assert str(parse("pipeline=2 microbatches=4")) == "pipeline=2 microbatches=4 schedule=1f1b"
    assert parse("data=4 shard=2").zero == 3
    assert str(Placement()) == "data=1"
