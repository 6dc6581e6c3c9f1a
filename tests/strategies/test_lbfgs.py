"""L-BFGS against a naive NumPy two-loop, bit for bit, and against torch's own."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import BadMessage
from edgetrain.strategies.lbfgs import UNUSABLE, Lbfgs, joined

SIZE = 12


def problem(seed: int, curved: bool = False, dtype=torch.float32):
    """A loss of `SIZE` parameters, quadratic or Rosenbrock's, and its float32 gradient; what they
    are computed in."""
    rng = np.random.default_rng(seed)
    square = rng.normal(size=(SIZE, SIZE))
    matrix = torch.tensor(square @ square.T / SIZE + 0.1 * np.eye(SIZE), dtype=dtype)
    aim = torch.tensor(rng.normal(size=SIZE), dtype=dtype)

    def loss(x):
        if curved:
            return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
        return 0.5 * x @ matrix @ x - aim @ x

    def both(point):
        x = torch.tensor(point, dtype=dtype, requires_grad=True)
        value = loss(x)
        value.backward()
        return value.item(), x.grad.numpy().astype(np.float32)

    return loss, both


def run(search: Lbfgs, both, rounds: int, base=None, last: bool = False):
    """The losses of the points that a search looks at, and the base after them."""
    base = np.full(SIZE, 0.5, np.float32) if base is None else base
    losses = []
    for each in range(rounds):
        loss, gradient = both(base)
        wanted = gradient if search.wants_gradient else None
        losses.append(loss)
        base = base + search.move(base, loss, wanted, last and each == rounds - 1)
    return losses, base


def started(history: int = 10, search: str = "wolfe") -> Lbfgs:
    found = Lbfgs(history, search)
    found.start(SIZE)
    return found


@pytest.mark.parametrize("curved", [False, True])
def test_wolfe_looks_at_the_points_that_torch_looks_at(curved):
    loss, both = problem(0, curved)
    x = torch.full((SIZE,), 0.5, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [x], lr=1, max_iter=20, max_eval=100, history_size=10, line_search_fn="strong_wolfe"
    )
    theirs = []

    def closure():
        optimizer.zero_grad()
        value = loss(x)
        value.backward()
        theirs.append(value.item())
        return value

    optimizer.step(closure)
    ours, _ = run(started(), both, 12)
    assert ours == pytest.approx(theirs[:12], rel=1e-5)


def naive(both, history: int, rounds: int):
    """Textbook L-BFGS with Armijo backtracking, as Lbfgs is documented: the points it looks at."""
    x = np.full(SIZE, 0.5, np.float32)
    s, y, points = [], [], []
    loss, g = both(x)
    points.append(x)
    while len(points) < rounds:
        q, alphas = g.astype(np.float64), []
        for si, yi in zip(reversed(s), reversed(y), strict=True):
            alphas.append(np.sum(si * q) / np.sum(si.astype(np.float64) * yi))
            q = q - alphas[-1] * yi
        if s:
            last, grown = s[-1].astype(np.float64), y[-1].astype(np.float64)
            q = q * (np.sum(last * grown) / np.sum(grown * grown))
        for si, yi, alpha in zip(s, y, reversed(alphas), strict=True):
            beta = np.sum(yi * q) / np.sum(si.astype(np.float64) * yi)
            q = q + (alpha - beta) * si
        d = (-q).astype(np.float32)
        slope = float(np.sum(g.astype(np.float64) * d))
        t = first = 1.0 if s else min(1.0, 1.0 / float(np.abs(g).sum()))
        there = x
        while True:
            there = there + (x + np.float32(t) * d - there)
            points.append(there)
            value, gradient = both(there)
            if value <= loss + 1e-4 * t * slope:
                break
            bend = value - loss - t * slope
            t = min(max(-slope * t * t / (2 * bend), 0.1 * t), 0.5 * t)
        points += [there] * (t != first)  # its gradient is asked for by itself
        s, y = [*s, there - x][-history:], [*y, gradient - g][-history:]
        x, g, loss = there, gradient, value
    return points[:rounds]


@pytest.mark.parametrize("history", [1, 3, 10])
def test_armijo_is_the_textbook_s_bit_for_bit(history):
    _, both = problem(1, curved=True)
    seen = []

    def watched(point):
        seen.append(point)
        return both(point)

    run(started(history, "armijo"), watched, 25)
    wanted = naive(both, history, 25)
    assert [each.tobytes() for each in seen] == [each.tobytes() for each in wanted]


@given(st.integers(0, 30), st.sampled_from(["armijo", "wolfe"]), st.integers(0, 50))
def test_a_restored_search_goes_on_with_the_same_bits(rounds, kind, seed):
    _, both = problem(seed, curved=seed % 2 == 0)
    whole = started(3, kind)
    _, base = run(whole, both, rounds)
    other = started(3, kind)
    other.restore({name: np.array(array) for name, array in whole.state().items()})
    assert other.wants_gradient == whole.wants_gradient
    losses, end = run(whole, both, 12, base)
    again, there = run(other, both, 12, base)
    assert (again, there.tobytes()) == (losses, end.tobytes())


@given(st.sampled_from(["armijo", "wolfe"]), st.integers(0, 50), st.integers(1, 40))
def test_the_last_round_ends_at_the_best_point_of_its_line(kind, seed, rounds):
    _, both = problem(seed, curved=True)
    losses, end = run(started(5, kind), both, rounds, last=True)
    assert both(end)[0] <= losses[0] * (1 + 1e-6)


def test_a_loss_that_is_no_number_turns_the_search_back():
    search = started(5, "armijo")
    base, gradient = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    base = base + search.move(base, 1.0, gradient, False)
    first = search.t
    base = base + search.move(base, UNUSABLE, np.zeros(SIZE, np.float32), False)
    assert 0 < search.t < first
    assert not search.wants_gradient
    assert np.isfinite(base).all()


def test_a_pair_of_no_use_is_skipped_and_said():
    search = started(5, "armijo")
    base, gradient = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    base = base + search.move(base, 1.0, gradient, False)
    base = base + search.move(base, 0.5, 2 * gradient, False)  # it fell, and got steeper
    assert "skipped" in search.remarks[0]
    assert not [name for name in search.state() if name.startswith("s")]


def test_nothing_moves_at_a_minimum():
    search = started()
    base = np.ones(SIZE, np.float32)
    assert not search.move(base, 1.0, np.zeros(SIZE, np.float32), False).any()
    assert search.phase == "over"
    assert "zero" in search.remarks[0]
    assert not search.move(base, 1.0, None, False).any()


def test_a_state_that_is_none_is_refused():
    for state in ({}, {"numbers": np.zeros(3)}, {"numbers": np.array([1.0] * 7)}):
        with pytest.raises(BadMessage):
            started().restore(state)


def cut(search: Lbfgs, part: slice, history: int, kind: str) -> Lbfgs:
    """The same search with a stretch of its vectors."""
    found = started(history, kind)
    whole = ("numbers", "told")
    state = search.state().items()
    found.restore({name: array if name in whole else array[part] for name, array in state})
    return found


@given(st.sampled_from(["armijo", "wolfe"]), st.integers(0, 50), st.booleans(), st.integers(1, 4))
def test_searches_of_a_stretch_each_go_where_one_of_all_goes(kind, seed, curved, hubs):
    """From each point of a run, by the others' products alone; the hubs decide the same."""
    _, both = problem(seed, curved)
    search, base = started(4, kind), np.full(SIZE, 0.5, np.float32)
    borders = np.linspace(0, SIZE, hubs + 1).astype(int)
    parts = [slice(*each) for each in itertools.pairwise(borders)]
    for _ in range(20):
        wants, (loss, gradient) = search.wants_gradient, both(base)
        each = [(cut(search, part, 4, kind), part) for part in parts]
        shares = [piece.products(base[part], gradient[part]) for piece, part in each if wants]
        assert all(share.size == search.products_count for share in shares)
        told = joined([np.append(loss, share) for share in shares])[1:] if wants else None
        steps = [
            piece.move(base[part], loss, gradient[part] if wants else None, False, told)
            for piece, part in each
        ]
        step = search.move(base, loss, gradient if wants else None, False)
        assert np.concatenate(steps) == pytest.approx(
            step, rel=1e-5, abs=1e-5 * float(abs(step).max())
        )
        for piece, _ in each:
            assert (piece.phase, piece.remarks) == (search.phase, search.remarks)
            assert piece.t == pytest.approx(search.t)
        assert len({piece.t for piece, _ in each}) == 1
        base = base + step
