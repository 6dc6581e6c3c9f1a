"""Clipping and noise: what is released, and that nothing else is. The accountant is tried apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fleet import noisy_descent
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from edgetrain import strategies
from edgetrain.errors import ConfigError
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.job import Privacy
from edgetrain.jobs.lookup import task_of, work_of
from edgetrain.jobs.on_member import refuse_checkpoint
from edgetrain.jobs.privacy.promise import Promise, said
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import resolve
from edgetrain.strategies import merging
from edgetrain.strategies.merging.private import PrivateMean
from edgetrain.strategies.merging.rule import Mean
from edgetrain.tasks.draws import seeded
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.private_work import shares
from edgetrain.training.member.member import Member, release_of
from edgetrain.vectors.noise import Gaussian, chosen, length, normal, share, system

ANY = arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)
FINITE = arrays(np.float32, 17, elements=st.floats(-(2.0**99), 2.0**99, width=32))
CLIPS = st.floats(1e-6, 1e6)


def released(vector, clip, noise=0.0, source=None):
    out = np.full_like(vector, np.nan)
    Gaussian(clip, noise).released(vector, source or seeded(0), out)
    return out


class Plain:
    """A contribution that is not encoded."""

    def __init__(self, vector, weight=1.0):
        self.vector, self.weight = vector, weight

    def read(self, out):
        out[:] = self.vector

    def add(self, weight, out):
        out += np.float32(weight) * self.vector


# -- what is released ------------------------------------------------------------------------------


@given(ANY, CLIPS)
def test_whatever_comes_what_is_released_is_no_longer_than_the_clip(vector, clip):
    assert length(released(vector, clip)) <= clip


@given(ANY)
def test_what_is_short_enough_is_released_bit_for_bit(vector):
    vector = np.nan_to_num(vector, posinf=1.0, neginf=-1.0)
    for clip in (math.inf, length(vector) or 1.0):
        assert released(vector, clip).tobytes() == (vector + np.float32(0)).tobytes() or (
            released(vector, clip).tobytes() == vector.tobytes()
        )


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_counts_as_nothing_and_the_noise_is_there_all_the_same(poison):
    vector = np.full(1000, poison, np.float32)
    assert not released(vector, 1.0).any()
    noised = released(vector, 1.0, 2.0)
    assert np.isfinite(noised).all()
    assert noised.std() == pytest.approx(2.0, rel=0.1)


def test_elements_whose_squares_overflow_are_clipped_like_others():
    vector = np.full(10, 3e38, np.float32)
    assert length(released(vector, 5.0)) == pytest.approx(5.0)


@given(FINITE, CLIPS)
def test_clipping_keeps_the_direction(vector, clip):
    out = released(vector, clip).astype(np.float64)
    scale = min(1.0, clip / (length(vector) or 1.0))
    np.testing.assert_allclose(out, scale * vector.astype(np.float64), rtol=1e-5, atol=1e-38)


@given(st.lists(ANY.map(lambda v: np.resize(v, 9)), min_size=1, max_size=8), CLIPS, st.data())
def test_one_member_moves_the_sum_by_at_most_the_clip(vectors, clip, data):
    """The sensitivity that the accountant takes for granted: with one's part, or with nothing in
    its place."""
    who = data.draw(st.integers(0, len(vectors) - 1))
    parts = [released(vector, clip).astype(np.float64) for vector in vectors]
    without = [part * (i != who) for i, part in enumerate(parts)]
    moved = np.linalg.norm(np.sum(parts, 0) - np.sum(without, 0))
    assert moved <= clip * (1 + 1e-12) + 1e-9 * clip


# -- noise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "noise"), [(1.0, 1.1), (0.25, 4.0), (30.0, 0.5)])
def test_noise_is_normal_with_the_standard_deviation_that_is_said(clip, noise):
    from scipy import stats

    vector = np.zeros(200_001, np.float32)
    out = released(vector, clip, noise, seeded("statistics")).astype(np.float64)
    deviation = noise * clip
    # Standard errors of mean and deviation of n draws: s / sqrt(n), s / sqrt(2 n). Five of them.
    n = out.size
    assert abs(out.mean()) < 5 * deviation / math.sqrt(n)
    assert abs(out.std() - deviation) < 5 * deviation / math.sqrt(2 * n)
    assert stats.kstest(out / deviation, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 5 / math.sqrt(n)
    half = n // 2  # cosines and sines of the same radii
    assert abs(np.corrcoef(out[:half] ** 2, out[half : 2 * half] ** 2)[0, 1]) < 5 / math.sqrt(half)


def test_tails_are_as_heavy_as_they_should_be():
    draws = np.abs(normal(1_000_000, seeded("tails")))
    for far, share_beyond in ((2.0, 0.0455), (3.0, 0.0027), (4.0, 6.33e-5)):
        expected = share_beyond * draws.size
        assert abs((draws > far).sum() - expected) < 5 * math.sqrt(expected)
    lowest, highest = normal(2, bytes), normal(2, lambda n: b"\xff" * n)
    assert np.isfinite([lowest, highest]).all()  # all bits 0: log of 2^-53, and not of 0
    assert lowest[0] == pytest.approx(8.57, abs=0.01)


def test_noise_is_drawn_anew_each_time_and_again_only_from_the_same_seed():
    vector = np.ones(50, np.float32)
    source = seeded(3, "m1")
    first, second = released(vector, 1, 1, source), released(vector, 1, 1, source)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, released(vector, 1, 1, seeded(3, "m1")))
    assert not np.array_equal(first, released(vector, 1, 1, seeded(3, "m2")))
    assert not np.array_equal(released(vector, 1, 1, system), released(vector, 1, 1, system))


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_a_poisson_sample_has_each_of_them_with_that_probability(rate):
    source = seeded("poisson")
    counts = np.zeros(200)
    sizes = []
    for _ in range(500):
        places = chosen(200, rate, source)
        counts[places] += 1
        sizes.append(len(places))
    spread = math.sqrt(500 * rate * (1 - rate)) + 1e-9
    assert np.abs(counts - 500 * rate).max() <= 5 * spread
    assert np.var(sizes) == pytest.approx(200 * rate * (1 - rate), rel=0.3)


def test_members_take_their_noise_from_the_operating_system():
    import inspect
    import os

    from edgetrain.training.member import train

    assert system is os.urandom
    assert inspect.signature(train.train).parameters["source"].default is system
    assert inspect.signature(release_of).parameters["source"].default is system
    hub = hub_of(resolve(job("privacy=member", "noise=1", "where=hub")))
    assert hub.rounds.merger.rule.source is system


@pytest.mark.parametrize(
    ("clip", "noise"), [(0, 1), (-1, 1), (math.nan, 1), (1, -1), (1, math.nan), (math.inf, 1)]
)
def test_a_mechanism_that_cannot_be_is_refused(clip, noise):
    with pytest.raises(ConfigError):
        Gaussian(clip, noise)


# -- at the hub ------------------------------------------------------------------------------------


def merged(rule, vectors, part=7):
    out = np.empty_like(vectors[0])
    slices = [slice(at, at + part) for at in range(0, out.size, part)]
    pieces = [[Plain(vector[here]) for here in slices] for vector in vectors]
    if isinstance(rule, Mean):
        for number, here in enumerate(slices):
            rule.merge([row[number] for row in pieces], out[here])
        return out, ()
    return out, rule.merge_round(pieces, [out[here] for here in slices])


@given(st.lists(FINITE, min_size=1, max_size=6), CLIPS)
def test_the_hub_s_mean_is_that_of_clipped_contributions(vectors, clip):
    found, cuts = merged(PrivateMean(Gaussian(clip, 0.0)), vectors)
    parts = [released(vector, clip).astype(np.float64) for vector in vectors]
    np.testing.assert_allclose(found, np.mean(parts, 0), rtol=1e-4, atol=1e-5 * clip)
    assert cuts == ()  # lengths are private, too


@given(st.lists(FINITE, min_size=1, max_size=6))
def test_a_hub_without_limit_and_noise_merges_the_plain_mean_bit_for_bit(vectors):
    with np.errstate(over="ignore", invalid="ignore"):
        found, _ = merged(PrivateMean(Gaussian(math.inf, 0.0)), vectors)
        assert found.tobytes() == merged(Mean(), vectors)[0].tobytes()


def test_the_hub_s_noise_is_on_the_sum():
    vectors = [np.zeros(100_000, np.float32)] * 4
    found, _ = merged(PrivateMean(Gaussian(2.0, 3.0), seeded("hub")), vectors, part=30_000)
    assert found.std() == pytest.approx(2.0 * 3.0 / 4, rel=0.02)


def test_with_a_lot_the_hub_hides_how_many_there_are():
    """The sum is divided by what a round has on average, and a round of nobody is noise."""
    for count in (0, 1, 9):
        rule = PrivateMean(Gaussian(2.0, 3.0), seeded("hub"), lot=4)
        vectors = [np.full(100_000, 0.001, np.float32)] * count or [np.empty(100_000, np.float32)]
        out = np.empty(100_000, np.float32)
        rule.merge_round([[Plain(v)] for v in vectors[:count]], [out])
        assert out.std() == pytest.approx(2.0 * 3.0 / 4, rel=0.02)
        assert out.mean() == pytest.approx(0.001 * count / 4, abs=5 * 1.5 / 100_000**0.5)
    rule = PrivateMean(Gaussian(1e9, 0.0), lot=4)
    assert merged(rule, [np.ones(9, np.float32)] * 3)[0] == pytest.approx(0.75)


# -- a whole fleet ---------------------------------------------------------------------------------


def job(*overrides):
    return parse({}, ["members=2", "steps=20", *overrides])


class Watched(Link):
    """A link that keeps copies of what it was handed."""

    def __init__(self, transport, clock):
        super().__init__(transport, clock)
        self.sent = []

    def submit(self, submission):
        self.sent.append(submission.vector.copy())
        return super().submit(submission)


def trained(table, strategy="dga", codec="fp32", source=None, members=3):
    """What each member's parameters are at the end, in a fleet in memory; and all that was sent."""
    import threading
    import time

    from loopback import Loopback

    from edgetrain import codecs
    from edgetrain.exchange.hub.serve import serve

    row = strategies.find(strategy)
    local_steps = 1 if row.contributes == "gradient" else 2
    terms = Terms(row, local_steps, Delay(3 if row.delays else 0))
    rule = row.merge_rule()
    if table.where == "hub" and table.unit == "member":
        rule = PrivateMean(Gaussian(table.clip, table.noise), seeded("hub"))
    hub = Hub(terms, Policy(members), rule, codecs.parse(codec), codecs.parse("fp32"))
    wire = Loopback()
    found, sent, failed = {}, {}, []

    def one(index):
        params = torch.nn.Parameter(torch.zeros(40))
        model = nn.Module()
        model.params = params
        flat = FlatModel(model)

        class Descent:
            steps = 0

            def step(self):
                self.steps += 1
                if row.contributes == "gradient":
                    flat.params -= flat.gradient
                else:
                    flat.params -= noisy_descent(index, self.steps, flat.params)

        release = release_of(table, seeded(index) if source is None else source)
        try:
            link = Watched(wire.connect(), time.monotonic)
            sent[index] = link.sent
            with Member.join(
                link, flat, Descent(), Request("", f"m{index}"), release=release
            ) as member:
                for step in range(13):
                    if row.contributes == "gradient":
                        flat.zero_grad()
                        flat.gradient[:] = noisy_descent(index, step, flat.params)
                    member.step()
            found[index] = flat.params.copy()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(members)]
    for thread in threads:
        thread.start()
    serve(hub, wire, time.monotonic, lambda effect: None)
    for thread in threads:
        thread.join()
    assert not failed, failed
    return found, sent


@pytest.mark.parametrize("strategy", ["sync-sgd", "local-sgd", "dga"])
@pytest.mark.parametrize("codec", ["fp32", "topk(0.2)", "int8"])
def test_replicas_end_bit_equal_with_noise(strategy, codec):
    found, _ = trained(Privacy("member", clip=0.5, noise=0.3), strategy, codec)
    assert len({params.tobytes() for params in found.values()}) == 1


@pytest.mark.parametrize("where", ["member", "hub"])
@pytest.mark.parametrize("strategy", ["sync-sgd", "local-sgd", "dga"])
def test_no_limit_and_no_noise_is_no_privacy_bit_for_bit(strategy, where):
    plain, _ = trained(Privacy("none"), strategy)
    found, _ = trained(Privacy("member", clip=math.inf, noise=0.0, where=where), strategy)
    assert found[0].tobytes() == plain[0].tobytes()


@pytest.mark.parametrize("strategy", ["sync-sgd", "local-sgd", "dga"])
def test_all_that_a_member_sends_is_clipped(strategy):
    _, sent = trained(Privacy("member", clip=0.1, noise=0.0), strategy)
    for contributions in sent.values():
        assert len(contributions) == (13 if strategy == "sync-sgd" else 7)
        assert max(length(each) for each in contributions) <= 0.1


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_noise_of_a_round_is_not_taken_back_in_the_next(codec):
    """What was released is forgotten, not kept as progress still to be sent: else the sum of all
    that a member sends would tell what it learnt, with the noise of the last round only."""
    table = Privacy("member", clip=1e3, noise=1e-3)  # noise of 1 on contributions of about 0.1
    _, sent = trained(table, "dga", codec)
    sums = np.concatenate([np.sum(each, 0) for each in sent.values()])
    assert sums.std() == pytest.approx(math.sqrt(len(sent[0])), rel=0.35)


def test_what_a_lossy_codec_keeps_is_of_what_was_released():
    """All that is sent in the end is decoded from released vectors: their sum, but for the rest."""
    table = Privacy("member", clip=0.5, noise=0.2)
    found, sent = trained(table, "local-sgd", "int8")
    total = np.sum([np.sum(each, 0) for each in sent.values()], 0) / len(sent)
    np.testing.assert_allclose(found[0], total, atol=0.02)


# -- what goes together ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["privacy=exmple"], "did you mean 'example'"),
        (["noise=1.1"], "protects nothing"),
        (["privacy=member", "noise=1", "privacy.epsilon=2"], "follows from the other"),
        (["privacy=member", "noise=1", "strategy=fedavg"], "take local-sgd or dga"),
        (["privacy=member", "noise=1", "strategy=sync-sgd", "codec=powersgd(2)"], "one trip"),
        (["privacy=member", "noise=1", "where=hub", "merge=median"], "merge = 'mean'"),
        (["privacy=member", "noise=1", "where=hub", "codec=topk(0.1)"], "reply_codec = 'fp32'"),
        (["privacy=member", "noise=1", "where=sum"], "where = 'member'"),
        (["privacy=example", "noise=1", "where=hub"], "unit = 'member'"),
        (["privacy=example", "clip=0"], "privacy.clip"),
        (["privacy=example", "noise=-1"], "privacy.noise"),
        (["privacy=example", "noise=1", "delta=0"], "privacy.delta"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_does_not_go_together_is_refused_with_a_way_out(overrides, why):
    with pytest.raises(ConfigError) as refused:
        resolve(job(*overrides))
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=sync-sgd", "codec=dgc(0.1)", "optimizer.momentum=0"],
        ["codec=topk(0.1) | q2"],
        ["codec=powersgd.*: bf16; int8"],  # a tensor's name
        ["merge=median"],
        ["where=hub"],
        ["where=hub", "codec=topk(0.1)", "reply_codec=fp32"],
    ],
    ids=" ".join,
)
def test_what_only_works_on_noised_vectors_may_follow(overrides):
    resolve(job("privacy=member", "noise=1", *overrides))


def test_members_of_one_job_agree_on_its_privacy():
    assert job().digest() != job("privacy=member", "noise=1").digest()
    assert job("privacy=member", "noise=1").digest() != job("privacy=member", "noise=2").digest()


def test_a_hub_that_is_trusted_merges_privately():
    hub = hub_of(resolve(job("privacy=member", "noise=1", "where=hub")))
    assert isinstance(hub.rounds.merger.rule, PrivateMean)
    assert isinstance(hub_of(resolve(job("privacy=member", "noise=1"))).rounds.merger.rule, Mean)
    assert "private" not in merging.TABLE  # noise is no merge rule that one might forget to name


def test_a_loop_of_one_s_own_names_its_noise():
    assert release_of(Privacy()) is None
    with pytest.raises(ConfigError, match="number of rounds"):
        release_of(Privacy("member", epsilon=3.0))


@pytest.mark.parametrize("unit", ["member", "example"])
def test_a_private_member_keeps_no_checkpoint(unit):
    refuse_checkpoint("none")
    with pytest.raises(ConfigError, match="keeps no checkpoint"):
        refuse_checkpoint(unit)


# -- examples --------------------------------------------------------------------------------------


class Lines:
    """Rows of x and y to be learnt by a linear model; batches are the first rows."""

    name, metric, better, target = "lines", "loss", "lower", None

    def __init__(self, x, y):
        self.x, self.y = x, y

    def model(self):
        return nn.Linear(self.x.shape[1], 1)

    def samples(self, member, members):
        return len(self.x)

    def batches(self, member, members, batch, seed):
        while True:
            yield self.x[:batch], self.y[:batch]

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]).squeeze(1), batch[1])

    def evaluate(self, model):
        return {"loss": 0.0}


def lines(rows=12, poison=None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator)
    if poison is not None:
        x[0] = poison
    return Lines(x, torch.randn(rows, generator=generator))


class Picking(Lines):
    def pick(self, member, members, chosen, rng):
        places = torch.from_numpy(chosen)
        return self.x[places], self.y[places]


def work_on(task, overrides=(), source=None):
    torch.manual_seed(0)
    model = task.model()
    flat = FlatModel(model)
    named = job("privacy=example", "privacy.sampling=shuffle", "batch=12", *overrides)
    return model, flat, work_of(named, task, model, flat, 0, source or seeded(0))


def by_hand(task, model, clip):
    """The clipped sum with an ordinary backward for each example."""
    total = 0.0
    for x, y in zip(task.x, task.y, strict=True):
        model.zero_grad(set_to_none=True)
        task.loss(model, (x[None], y[None])).backward()
        row = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
        if row.isfinite().all():
            total = total + row * min(1.0, clip / float(row.norm()))
    return total.numpy()


@pytest.mark.parametrize("clip", [1e-3, 0.7, 1e12])
@pytest.mark.parametrize("poison", [None, math.nan, math.inf, 1e30])
def test_the_gradient_is_the_sum_of_clipped_gradients_of_examples(clip, poison):
    task = lines(poison=poison)
    model, flat, work = work_on(task, [f"clip={clip}"])
    loss = work.backward()
    found = flat.gradient.copy()
    np.testing.assert_allclose(found, by_hand(task, model, clip) / 12, rtol=2e-5, atol=1e-9)
    assert np.isfinite(found).all()
    assert math.isfinite(loss())


def test_without_limit_it_is_the_plain_gradient():
    task = lines()
    model, flat, work = work_on(task, ["clip=1e12"])
    work.backward()
    found = flat.gradient.copy()
    flat.zero_grad()
    task.loss(model, (task.x, task.y)).backward()
    np.testing.assert_allclose(found, flat.gradient, rtol=1e-5, atol=1e-7)


@given(st.integers(0, 11), st.sampled_from([1e-2, 0.3, 5.0]))
def test_one_example_moves_the_sum_by_at_most_the_clip(who, clip):
    task = lines()
    _, flat, work = work_on(task, [f"clip={clip}"])
    work.backward()
    whole = flat.gradient.astype(np.float64)
    task.x[who] = math.nan  # nothing in its place
    work.backward()
    assert np.linalg.norm(whole - flat.gradient) * 12 <= clip * (1 + 1e-5)


def test_noise_on_the_sum_of_examples_has_the_deviation_that_is_said():
    task = lines()
    task.x = torch.zeros(12, 30_000)
    _, flat, work = work_on(task, ["clip=2", "noise=3"])
    work.backward()
    assert flat.gradient[:30_000].std() * 12 == pytest.approx(6.0, rel=0.03)


def test_lots_are_poisson_samples_and_are_divided_by_their_expected_size():
    x = torch.ones(4000, 1)
    task = Picking(x, torch.ones(4000))
    model, flat, work = work_on(task, ["privacy.sampling=poisson", "batch=100", "clip=1e12"])
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    sizes = []
    for _ in range(200):
        work.backward()
        sizes.append(flat.gradient[0] / -2.0 * 100)  # each example's gradient is -2
    assert np.mean(sizes) == pytest.approx(100, abs=5 * math.sqrt(100 / 200))
    assert np.std(sizes) == pytest.approx(10, rel=0.3)


def test_an_empty_lot_is_noise_only():
    task = Picking(torch.ones(1000, 1), torch.ones(1000))
    _, flat, work = work_on(task, ["privacy.sampling=poisson", "batch=1", "noise=1"], system)
    for _ in range(30):
        work.backward()
        assert flat.gradient.any()


def test_tasks_and_models_that_cannot_are_refused():
    task = lines()
    with pytest.raises(ConfigError, match="has no method `pick`"):
        work_on(task, ["privacy.sampling=poisson"])
    with pytest.raises(ConfigError, match="at most 12"):
        work_on(task, ["batch=13"])
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match=r"layer '1' normalises over the batch.*GroupNorm"):
        work_of(job("privacy=example"), task, model, FlatModel(model), 0, system)


@pytest.mark.parametrize("task", ["digits", "char_lm"])
def test_the_tasks_that_come_along_can_be_sampled(task):
    named = job(f"task=edgetrain.tasks:{task}", "privacy=example", "noise=0.5", "batch=8")
    loaded = task_of(named)
    torch.manual_seed(0)
    model = loaded.model()
    flat = FlatModel(model)
    loss = work_of(named, loaded, model, flat, 0, seeded(1)).backward()
    assert loss() > 0
    assert np.isfinite(flat.gradient).all()
    assert flat.gradient.any()


def test_shares_agree_with_those_of_vectors():
    rows = torch.randn(50, 7, generator=torch.Generator().manual_seed(1)) * 3
    found = shares([rows[:, :4], rows[:, 4:]], 2.5).numpy()
    expected = [share(length(row.numpy()), 2.5) for row in rows]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["privacy=example", "privacy=member", "where=hub"])
def test_a_simulated_run_says_what_it_promised_and_gives_the_same_bits_again(table, tmp_path):
    from edgetrain.jobs.plan import plan
    from edgetrain.runs import folder as runs
    from edgetrain.training.simulated import simulation as simulate

    unit = "privacy=example" if "example" in table else "privacy=member"
    given_job = job(unit, table, "noise=0.8", "clip=0.5", "pace_s=0.01", "delay=5")
    planned = plan(given_job)
    ends = []
    for name in "ab":
        folder = runs.create(tmp_path, name)
        summary = simulate.run(planned, folder)
        events = runs.read_metrics(folder, "event")
        ends.append({e["reason"] for e in events if e["event"] == "finished"})
    assert ends[0] == ends[1]
    assert len({reason.split("base")[1] for reason in ends[0]}) == 1
    told = summary["privacy"]
    assert told["epsilon"] == pytest.approx(planned.promise.epsilon)
    assert told["count"] == (20 if unit == "privacy=example" else 4)
    assert "protects nobody" in said(told)
    assert runs.read_summary(folder)["privacy"] == told


@pytest.mark.real
def test_a_run_on_this_machine_prints_its_epsilon(tmp_path, capsys):
    from edgetrain.__main__ import main

    words = ["members=2", "steps=10", "batch=8", "privacy=example", "noise=0.3"]
    assert main(["run", "--runs", str(tmp_path), *words]) == 0
    said = capsys.readouterr().out
    assert "privacy: epsilon" in said
    assert "for one example of one member" in said


def test_promises_are_told_with_what_they_do_not_cover():
    found = Promise("member", "hub", 1.0, 1.1, 1e-5, 1000, 1.0, 534.9, "pld")
    told = said(found.to_dict())
    assert "one member's whole data" in told
    assert "the hub is trusted" in told
    assert "very weak guarantee" in told
    nothing = replace(found, epsilon=None)
    assert "privacy: none" in said(nothing.to_dict())
