"""Noise under masks: what comes out is the sum of what was clipped and noised, and nothing wraps
around modulo 2^32, however large the noise is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_room import Room
from test_secure_laws import PHASES

from edgetrain.errors import ConfigError
from edgetrain.exchange.masks.fixed_point import FixedPoint
from edgetrain.exchange.masks.terms import default_threshold
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import check, resolve
from edgetrain.tasks.draws import seeded
from edgetrain.vectors.noise import Gaussian

MEMBERS, ELEMENTS = 10, 20


def noised(seed: int, clip: float, noise: float, size: float) -> dict[str, np.ndarray]:
    """What each member would send: its contribution, clipped and noised."""
    draws = np.random.default_rng(seed)
    found = {}
    for i in range(MEMBERS):
        vector = (size * draws.standard_normal(ELEMENTS)).astype(np.float32)
        out = np.empty_like(vector)
        Gaussian(clip, noise).released(vector, seeded(seed, f"m{i}"), out)
        found[f"m{i}"] = out
    return found


def through_masks(contributions, clip_range, phases):
    """One round of ten members of whom some drop out; who counted, the mean, elements cut."""
    when = {phase: [n for n, p in phases.items() if p == phase] for phase in PHASES}
    room = Room(MEMBERS, default_threshold(MEMBERS), ELEMENTS, clip_range)
    room.set_up(advertise=when["advertise"], share=when["share"])
    room.gone |= set(when["contribute"])
    counted = room.able(0)
    for name in counted:
        room.give(name, 0, contributions[name])
    end = room.unmask(0, when["unmask"])
    assert end is not None
    assert end.vector is not None, end.reason
    return counted, end.vector, {name: room.maskers[name].cut for name in counted}


@st.composite
def drop_outs(draw):
    """Three of ten, each in a phase of its own choice."""
    gone = draw(st.permutations([f"m{i}" for i in range(MEMBERS)]))[:3]
    return {name: draw(st.sampled_from(PHASES)) for name in gone}


@given(
    drop_outs(),
    st.integers(0, 2**32),
    st.floats(0.01, 100),
    st.floats(0.0, 4.0),
    st.floats(0.01, 1000),
    st.floats(0.25, 64),
)
def test_the_mean_is_that_of_the_same_noised_contributions(phases, seed, clip, noise, size, room):
    """`room` is the clip_range in deviations of the noise (or lengths): from far too little to
    plenty."""
    clip_range = float(np.clip(room * max(clip * noise, clip / 4), 2.0**-20, 2.0**20))
    sent = noised(seed, clip, noise, size)
    counted, mean, cut = through_masks(sent, clip_range, phases)
    assert len(counted) >= MEMBERS - 3
    fixed = FixedPoint(clip_range, MEMBERS)
    step = 1.0 / fixed.scale
    within = [np.clip(sent[name].astype(float), -clip_range, clip_range) for name in counted]
    exact = sum(within) / len(counted)
    # Half a step of rounding each, one of the range's end, and what float32 loses.
    bound = fixed.error(len(counted), len(counted)) + step + np.abs(exact) * 2.0**-23
    assert (np.abs(mean - exact) <= bound).all()
    for name in counted:  # each element that was cut is counted, and none that was not
        over = np.abs(sent[name].astype(float))
        assert (over > clip_range + step).sum() <= cut[name] <= (over > clip_range - step).sum()


@given(drop_outs(), st.sampled_from([2.0**-20, 0.1, 8.0, 2.0**20]), st.floats(1.1, 2.0**100))
@settings(max_examples=20)
def test_all_as_far_out_as_can_be_do_not_wrap_around(phases, clip_range, far):
    """Added up modulo 2^32 without being cut they would come out with another sign."""
    out = np.where(np.arange(ELEMENTS) % 2, far * clip_range, -far * clip_range).astype(np.float32)
    counted, mean, cut = through_masks({f"m{i}": out for i in range(MEMBERS)}, clip_range, phases)
    np.testing.assert_allclose(mean, np.sign(out) * clip_range, rtol=1e-6)
    assert cut == dict.fromkeys(counted, ELEMENTS)


NOISY = ["strategy=dga", "secure=true", "unit=member", "clip=1", "noise=2", "members=10"]


def test_a_span_that_cannot_hold_the_noise_is_refused_with_one_that_can():
    with pytest.raises(
        ConfigError, match=r"strategy.clip_range = 8 .* deviation 2: .* 11 "
    ) as refused:
        check(resolve(parse({}, [*NOISY, "clip_range=8"])))
    assert "clip_range = 11" in refused.value.hint
    check(resolve(parse({}, [*NOISY, "clip_range=11"])))
    check(resolve(parse({}, [*NOISY, "clip_range=8", "secure=false"])))
    check(resolve(parse({}, [*NOISY, "clip_range=8", "noise=0"])))


def test_with_that_span_next_to_nothing_is_cut():
    rng, cut = random.Random(5), 0
    for _ in range(5):
        sent = noised(rng.getrandbits(32), 1.0, 2.0, 100.0)
        cut += sum(through_masks(sent, 11.0, {})[2].values())
    assert cut == 0
