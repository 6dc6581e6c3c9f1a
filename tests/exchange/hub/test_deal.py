"""Slices dealt to members of any speed: every one counts once, and bits depend on no speed."""

import heapq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.hub.deal import Deal, SliceSums


def batch(deal: Deal, seconds: dict[str, float], round: int = 0) -> float:
    """Seconds that a batch takes members who need these seconds for a slice."""
    deal.begin(round, 0.0)
    queue: list[tuple[float, str, int]] = []
    free_at = dict.fromkeys(seconds, 0.0)

    def hand_out(now: float) -> None:
        for name, slices in deal.give_all(seconds, now).items():
            for slice in slices:
                free_at[name] = max(free_at[name], now) + seconds[name]
                heapq.heappush(queue, (free_at[name], name, slice))

    now = 0.0
    hand_out(now)
    while not deal.is_whole:
        if not queue:  # as the hub's clock ticks
            now += 1.0
            hand_out(now)
            continue
        now, name, slice = heapq.heappop(queue)
        if deal.holds(name, slice):
            deal.accept(name, slice, now)
            deal.sums.add(slice, 1, float(slice), None)
        if not queue or queue[0][0] > now:
            hand_out(now)
    assert deal.sums.mean().loss == (deal.slices - 1) / 2
    return now


EQUAL = {f"m{i}": 1.0 for i in range(8)}
ONE_SLOW = EQUAL | {"m3": 10.0}


def test_copies_keep_a_slow_member_from_holding_up_a_batch():
    deal = Deal(8 * 6, 1)
    equal = batch(deal, EQUAL)
    assert (equal, deal.wasted) == (6.0, 0)
    assert batch(deal, ONE_SLOW, 1) <= 1.3 * equal
    assert 0 < deal.wasted <= 0.1 * deal.slices
    assert deal.wasted == deal.copies
    assert batch(Deal(8 * 6, 0), ONE_SLOW) >= 3 * equal


@given(
    st.lists(st.floats(0.1, 20.0), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(0, 3),
)
def test_a_batch_of_any_members_becomes_whole(speeds, slices, copies):
    deal = Deal(len(speeds) * slices, copies)
    batch(deal, {f"m{i}": seconds for i, seconds in enumerate(speeds)})
    assert deal.wasted == deal.copies <= copies * deal.slices


@given(st.permutations(range(7)), st.integers(0, 1000))
def test_sums_do_not_depend_on_the_order_of_arrival(order, seed):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(7, 5)).astype(np.float32)
    losses, counts = rng.normal(size=7), rng.integers(1, 9, 7)
    found, wanted = SliceSums(), SliceSums()
    for slice in order:
        found.add(slice, int(counts[slice]), float(losses[slice]), vectors[slice])
    for slice in range(7):
        wanted.add(slice, int(counts[slice]), float(losses[slice]), vectors[slice])
    assert found.mean().loss == wanted.mean().loss
    assert found.mean().vector.tobytes() == wanted.mean().vector.tobytes()
    naive = (counts[:, None] * vectors.astype(np.float64)).sum(0) / counts.sum()
    np.testing.assert_allclose(found.mean().vector, naive, rtol=1e-6, atol=1e-7)


def test_what_a_member_had_that_has_gone_is_given_out_again():
    deal = Deal(3, 1)
    deal.begin(0, 0.0)
    assert [deal.give("a", 0.0), deal.give("a", 0.0), deal.give("b", 0.0)] == [0, 1, 2]
    deal.keep_only({"b"})
    assert [deal.give("b", 1.0), deal.give("b", 1.0), deal.give("c", 1.0)] == [0, None, 1]
    assert not deal.holds("a", 0)
    deal.release("b")
    assert deal.give("c", 2.0) == 0


def test_a_slice_is_copied_once_it_is_late():
    deal = Deal(4, 1)
    deal.begin(0, 0.0)
    for name in ("a", "b", "a", "b"):
        deal.give(name, 0.0)
    deal.accept("a", 0, 1.0)
    assert deal.give("a", 9.0) is None  # it has one
    deal.accept("a", 2, 2.0)
    assert deal.give("a", 2.9) is None
    assert deal.give("a", 3.0) == 1
    assert deal.give("c", 99.0) is None  # it has shown no speed
    assert (deal.copies, deal.dealt) == (1, 5)
