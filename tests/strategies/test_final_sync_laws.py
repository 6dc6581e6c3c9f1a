"""Laws of runs with a final sync: real members and a real hub, in any order of events."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from fleet import Disk, Fleet, noisy_descent
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.exchange.delay import CHOSEN
from edgetrain.exchange.hub.final_sync import EVERY as SHORT
from edgetrain.exchange.hub.final_sync import FinalSync

SHAPES = {
    "members": st.integers(1, 4),
    "local_steps": st.integers(1, 10),
    "delay": st.integers(0, 14),
    "steps": st.integers(1, 40),
    "rng": st.randoms(use_true_random=False),
}


SIZES = {key: shape for key, shape in SHAPES.items() if key != "rng"}


def ended(fleet):
    fleet.run()
    assert [m.state for m in fleet.members] == ["done"] * len(fleet.members)
    first = fleet.members[0]
    for member in fleet.members:
        assert member.params.tobytes() == first.params.tobytes()
        assert first.half.base[: first.params.size].tobytes() == first.params.tobytes()
        assert member.checksums == first.checksums
    assert fleet.hub.base.tobytes() == first.half.base.tobytes()
    return first.params


@given(
    name=st.sampled_from(
        ["local-sgd", "fedavg", "dga", "dga(paper)", "dga(predict)", "dga(variates)"]
    ),
    final_sync=st.sampled_from([CHOSEN, 0.1, 0.4, 1.0]),
    codec=st.sampled_from(["fp32", "topk(0.3) | q2"]),
    **SHAPES,
)
def test_replicas_end_equal_bit_for_bit(
    name, final_sync, codec, members, local_steps, delay, steps, rng
):
    ended(
        Fleet(name, members, local_steps, delay, steps, rng=rng, final_sync=final_sync, codec=codec)
    )


@given(name=st.sampled_from(["dga", "dga(paper)", "dga(predict)"]), **SHAPES)
def test_a_final_sync_of_all_steps_is_local_sgd_with_its_rounds(
    name, members, local_steps, delay, steps, rng
):
    synced = Fleet(name, members, local_steps, delay + 1, steps, rng=rng, final_sync=1.0)
    assert ended(synced).tobytes() == ended(Fleet("local-sgd", members, SHORT, 0, steps)).tobytes()


@given(name=st.sampled_from(["local-sgd", "dga"]), wanted=st.integers(1, 12), **SHAPES)
def test_a_final_sync_of_none_is_a_run_without_one(
    name, wanted, members, local_steps, delay, steps, rng
):
    """Bit for bit, also where one could be chosen and members are not far apart."""
    for fixed in (delay, None):
        more = {"rng": rng, "wanted_delay": wanted, "bounded": True}
        without = ended(Fleet(name, members, local_steps, fixed, steps, **more, final_sync=0.0))
        plain = Fleet(name, members, local_steps, fixed, steps, **more)
        assert ended(plain).tobytes() == without.tobytes()
    if local_steps <= 7:
        plain = Fleet("local-sgd", members, local_steps, 0, steps)
        chosen = Fleet("local-sgd", members, local_steps, 0, steps, rng=rng, final_sync=CHOSEN)
        assert ended(chosen).tobytes() == ended(plain).tobytes()


def naive(members, local_steps, delay, steps, final_sync, initial):
    """From the formula alone: w += mean_r - own_r, D steps after the round; at the final sync every
    member takes what all have, and rounds have the final sync's steps and wait."""
    base = initial.astype(np.float64)
    local, flights = [base.copy() for _ in range(members)], deque()
    start = [base.copy() for _ in range(members)]
    for step in range(1, steps + 1):
        for m in range(members):
            local[m] = local[m] - noisy_descent(m, step - 1, local[m].astype(np.float32))
        if step == final_sync.begins or step > final_sync.begins:
            delay, local_steps = 0, SHORT
        since = step - final_sync.begins if step > final_sync.begins else step
        if since % local_steps == 0 or step in (final_sync.begins, steps):
            own = [now - then for now, then in zip(local, start, strict=True)]
            flights.append((step, own, np.mean(own, axis=0)))
            start = [now.copy() for now in local]
        while flights and step - flights[0][0] >= delay:
            _, own, mean = flights.popleft()
            base = base + mean
            for m in range(members):
                local[m] = local[m] + mean - own[m]
                start[m] = start[m] + mean - own[m]
    for _, _, mean in flights:
        base = base + mean
    return base


@pytest.mark.parametrize(("local_steps", "delay"), [(9, 4), (5, 12), (6, 6), (12, 0), (8, 20)])
@pytest.mark.parametrize("final_sync", [0.2, 0.5])
def test_it_is_the_formula(local_steps, delay, final_sync):
    """With more than one round in flight the last replies come up to K steps early."""
    fleet = Fleet("dga(paper)", 3, local_steps, delay, 70, final_sync=final_sync)
    found = ended(fleet)
    end = FinalSync.of(final_sync, 70)
    if delay < local_steps or delay % local_steps == 0:
        wanted = naive(3, local_steps, delay, 70, end, fleet.initial)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
    closed = [(c.local_steps, c.delay) for c in fleet.closed]
    assert closed[-1] == (SHORT, 0)
    assert [c.final_sync for c in fleet.closed] == sorted(c.final_sync for c in fleet.closed)


@settings(max_examples=20)
@given(
    snapshot_every=st.sampled_from([0, 3]),
    fuses=st.lists(st.integers(1, 60), max_size=3),
    seed=st.integers(0, 1000),
    **SIZES,
)
def test_a_hub_that_is_killed_at_any_instant_lands(
    snapshot_every, fuses, seed, members, local_steps, delay, steps
):
    what = "dga(paper)", members, local_steps, delay, steps
    calm = ended(Fleet(*what, final_sync=0.4))
    disk = Disk(snapshot_every)
    fleet = Fleet(*what, rng=random.Random(seed), disk=disk, kills=fuses, final_sync=0.4).run()
    (params,) = {m.params.tobytes() for m in fleet.members}
    assert fleet.hub.base.tobytes() == params
    if not snapshot_every:  # otherwise a newer base may have come in place of lost replies
        assert params == calm.tobytes()


@settings(max_examples=20)
@given(fuses=st.lists(st.integers(1, 60), max_size=2), seed=st.integers(0, 1000), **SIZES)
def test_members_that_say_how_long_they_train_land(fuses, seed, members, local_steps, delay, steps):
    """In loops of their own; and a hub that was restored hears it again."""
    what = "dga(paper)", members, local_steps, delay, steps
    known = ended(Fleet(*what, final_sync=CHOSEN))
    told = Fleet(
        *what,
        rng=random.Random(seed),
        disk=Disk(),
        kills=fuses,
        final_sync=CHOSEN,
        tells_steps=True,
    ).run()
    assert {m.params.tobytes() for m in told.members} == {known.tobytes()}


def test_a_member_that_trains_for_another_number_of_steps_is_refused():
    fleet = Fleet("dga", 2, 9, 9, 60, final_sync=CHOSEN, tells_steps=True)
    fleet.members[1].steps = 59
    while all(member.state == "joining" for member in fleet.members):
        fleet.advance()
    (why,) = [note.reason for note in fleet.notes if note.event == "refused"]
    assert why in (
        "steps: the run has 60 steps, the member's 59",
        "steps: the run has 59 steps, the member's 60",
    )
