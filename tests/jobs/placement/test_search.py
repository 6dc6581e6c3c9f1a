"""The planner: equal to trying everything, fast enough, and the papers' own figures."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgetrain.jobs.placement import formulas
from edgetrain.jobs.placement.formulas import Kept, RankLink, bubble, weights_of
from edgetrain.jobs.placement.keeping import EXACT, Activations, chosen_again, least_again
from edgetrain.jobs.placement.machines import Server, Servers, slots
from edgetrain.jobs.placement.search import Found, Work, evaluate, search
from edgetrain.jobs.placement.stages import LayerSums
from edgetrain.jobs.placement.words import Placement
from edgetrain.tasks.layers import Layer, Model

FP32 = Kept(4.0, 1)


def layer(name="", parameters=1000, flops=1e9, saved=1e6, passed=1e5, divided=0.0):
    return Layer(str(name), parameters, flops, 2 * flops, 10, 20, saved, passed, divided)


LINK = RankLink(1e-5, 1e10)


def server(name="s", count=4, memory=1e10, speed=1e12, link=LINK):
    return Server(name, count, memory, speed, 1e-5, link)


# -- the papers -----------------------------------------------------------------------------------


def test_bubbles_are_as_their_papers_count_them():
    """GPipe: (K-1)/(M+K-1). Interleaved stages: v times less idle time for the same work."""
    assert bubble(4, 8) == 3 / 11
    idle, looped = bubble(4, 8) / (1 - bubble(4, 8)), bubble(4, 8, 2) / (1 - bubble(4, 8, 2))
    assert idle / looped == pytest.approx(2)
    for schedule, v in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
        a, c = weights_of(schedule, 4, 8, v)
        step = a * 4 * v * (1 / v) + c * (1 / v)  # equal stages, a second for a rank's layers
        assert 1 - 8 / step == pytest.approx(bubble(4, 8, v))


def test_a_ring_sends_each_byte_nearly_twice():
    link = RankLink(0.001, 1e6)
    assert link.all_reduce(4, 4e6) == pytest.approx(2 * 3 * (0.001 + 1))
    assert link.all_reduce(1, 4e6) == 0


# -- all of them ----------------------------------------------------------------------------------


def brute(model, servers, work):
    """Every subset of slots, every cut, every width, number of micro-batches and sharding, every
    choice of layers that are computed again; the formulas written out again."""
    best = math.inf
    count = len(model.layers)
    for data in [d for d in range(1, work.members + 1) if work.members % d == 0]:
        room = slots(servers, data)
        samples = work.members // data * work.batch
        parts = [m for m in range(1, samples + 1) if samples % m == 0]
        shards = [(1, 0)] if data == 1 else [(1, 0), (data, 2), (data, 3)]
        for m, (shard, zero) in itertools.product(parts, shards):
            for k in range(1, min(len(room), count) + 1):
                for chosen in itertools.combinations(room, k):
                    for cuts in itertools.combinations(range(1, count), k - 1):
                        how = (data, shard, zero, m, samples / m)
                        best = min(best, step(model, servers, work.kept, chosen, cuts, *how))
    return best


def step(model, servers, kept, chosen, cuts, data, shard, zero, m, each):
    """Any layers of each stage are computed again: stages do not know of each other."""
    edges = [0, *cuts, len(model.layers)]
    times, syncing = [], []
    one = servers.servers[chosen[0].server]
    for s, (i, j) in enumerate(itertools.pairwise(edges)):
        slot, layers = chosen[s], model.layers[i:j]
        own = sum(x.parameters for x in layers)
        own -= sum(n for a, b, n in model.tied if i <= a and b < j)
        memory = formulas.PROCESS_BYTES + formulas.rank_bytes(
            own, max(x.parameters for x in layers), kept, shard, zero, m > 1
        )
        memory += 4 * model.parameters * (s == 0)  # the rank that leads has the whole model
        flight, fitting = each * min(m, len(chosen) - s), []
        for mask in itertools.product((0, 1), repeat=j - i):
            kept_bytes = sum(x.saved_bytes for x, a in zip(layers, mask, strict=True) if not a)
            kept_bytes += sum(
                model.layers[i + x - 1].passed_bytes for x, a in enumerate(mask) if a and i + x
            )
            most = max(x.saved_bytes * a for x, a in zip(layers, mask, strict=True))
            if memory + flight * kept_bytes + each * most <= slot.usable_bytes:
                fitting.append(
                    sum((1 + a) * x.operators + x.backward_operators
                        for x, a in zip(layers, mask, strict=True)) * slot.dispatch_s
                    + each * sum((1 + a) * x.flops + x.backward_flops
                                 for x, a in zip(layers, mask, strict=True)) / slot.flops_s
                )  # fmt: skip
        if not fitting:
            return math.inf
        t = min(fitting)
        if zero == 3:
            t += 2 * slot.wide.gather(shard, kept.working * own)
        if j < len(model.layers):
            near = chosen[s + 1].server == slot.server
            link = one.inside if near else servers.between
            t += 2 * link.send(each * layers[-1].passed_bytes)
        times.append(t)
        syncing.append(slot.wide.all_reduce(data, 4 * own))
    return sum(times) + (m - 1) * max(times) + max(syncing)


def made_up(rng):
    layers = tuple(
        layer(i, rng.randint(1, 9) * 10**6, rng.uniform(1, 9) * 1e8, rng.randint(1, 9) * 1e6,
              rng.randint(1, 9) * 1e5)
        for i in range(rng.randint(2, 5))
    )  # fmt: skip
    tied = ((0, len(layers) - 1, 10**6),) if rng.random() < 0.3 else ()
    inside = RankLink(1e-5, 1e9)
    memory = formulas.PROCESS_BYTES
    machines = tuple(
        Server(str(i), rng.randint(1, 2),
               (memory + rng.choice([2e8, 4e8, 9e8])) / formulas.USABLE,
               rng.choice([1e10, 2e10, 4e10]), 1e-5, inside)
        for i in range(rng.randint(1, 3))
    )  # fmt: skip
    if rng.random() < 0.3:
        machines = tuple(replace(machines[0], name=each.name) for each in machines)
    between = RankLink(rng.choice([1e-4, 1e-3]), rng.choice([1e7, 1e8]))
    work = Work(rng.choice([1, 2, 4]), rng.choice([1, 2]), FP32)
    return Model(layers, tied), Servers(machines, between), work


@pytest.mark.parametrize("part", range(3))
def test_nothing_is_faster_than_what_is_found(part, monkeypatch):
    """300 small cases, unequal servers included, against every placement there is."""
    monkeypatch.setattr("edgetrain.jobs.placement.search.SCHEDULES", (("1f1b", 1),))
    fits = 0
    for seed in range(100 * part, 100 * part + 100):
        model, servers, work = made_up(random.Random(seed))
        ranked, refused = search(model, servers, work)
        found = ranked[0].seconds if ranked else math.inf
        assert found == pytest.approx(brute(model, servers, work), rel=1e-9), seed
        assert ranked or refused
        fits += bool(ranked)
        for each in ranked:
            each.placement.check()
            assert max(b / u for b, u in zip(each.bytes, each.usable_bytes, strict=True)) <= 1
            if len(servers.servers) == 1:
                again = evaluate(model, servers, work, each.placement)
                assert isinstance(again, Found)
                assert again.seconds == pytest.approx(each.seconds)
    assert 30 < fits < 100, "some fit, and some do not"


def test_layers_are_computed_again_one_by_one(monkeypatch):
    """100 small cases with little memory: the best of all choices of cuts and layers together."""
    monkeypatch.setattr("edgetrain.jobs.placement.search.SCHEDULES", (("1f1b", 1),))
    fits = mixed = 0  # seen: 68, 15
    for seed in range(100):
        model, servers, work = made_up(random.Random(seed))
        hungry = tuple(replace(x, saved_bytes=20 * x.saved_bytes) for x in model.layers)
        model = replace(model, layers=hungry)
        ranked, _ = search(model, servers, work)
        found = ranked[0].seconds if ranked else math.inf
        assert found == pytest.approx(brute(model, servers, work), rel=1e-9), seed
        for each in ranked:
            assert max(b / u for b, u in zip(each.bytes, each.usable_bytes, strict=True)) <= 1
        fits += bool(ranked)
        mixed += bool(ranked) and isinstance(ranked[0].placement.recompute, tuple)
    assert fits > 30
    assert mixed > 10


def layers_with(count, rng):
    return Activations(*(np.array([rng.uniform(1, 9) for _ in range(count)]) for _ in range(4)))


def fewest(layers, room):
    """Over all choices of layers; infinite if nothing fits."""
    best = math.inf
    for choice in itertools.product((0, 1), repeat=len(layers.kept)):
        again = np.array(choice)
        needs = layers.kept @ (1 - again) + layers.entering @ again + (layers.again * again).max()
        if needs <= room:
            best = min(best, float(layers.longer @ again))
    return best


@pytest.mark.parametrize("count", [3, 9])
def test_runs_of_layers_compute_the_fewest_seconds_again(count):
    """Exact where runs are short, near it in longer ones, and never too little memory."""
    near = all_of_them = 0
    for seed in range(20):
        rng = random.Random(seed)
        layers = layers_with(count, rng)
        room = np.full((count + 1, count + 1), rng.uniform(0.2, 1.0) * layers.kept.sum())
        found = least_again(layers, room, room >= 0)
        for i, j in itertools.combinations(range(count + 1), 2):
            part, limit = layers.part(i, j), float(room[i, j])
            least = fewest(part, limit)
            assert found[i, j] >= least - 1e-9
            if j - i <= EXACT:
                assert found[i, j] == pytest.approx(least)
            again = chosen_again(part, limit)
            if again is None:
                assert math.isinf(found[i, j])
                continue
            mask = np.isin(np.arange(j - i), again)
            needs = part.kept @ ~mask + part.entering @ mask + (part.again * mask).max()
            assert needs <= limit * (1 + 1e-12)
            assert least - 1e-9 <= part.longer @ mask <= found[i, j] + 1e-9
            all_of_them += 1
            near += part.longer @ mask <= least * 1.05 + 1e-9
    assert near > 0.95 * all_of_them


def test_a_build_of_torch_for_cuda_is_known_by_its_library(monkeypatch, tmp_path):
    monkeypatch.setattr(
        formulas, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    assert not formulas.is_for_cuda()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert formulas.is_for_cuda()


def test_what_fits_only_with_its_largest_layer_kept_is_not_refused():
    """Computed again, the largest layer would need its activations besides what enters it."""
    layers = (layer(0, saved=4e7, passed=5e7), layer(1, saved=3e8, passed=1e7),
              layer(2, saved=4e7, passed=0.0))  # fmt: skip
    # All of them kept: 380 MB; all computed again: 360 MB; the first and the last: 350 MB.
    room = (formulas.PROCESS_BYTES + 3.55e8) / formulas.USABLE
    servers = Servers((server(count=1, memory=room),), LINK)
    ranked, _ = search(Model(layers), servers, Work(1, 1, FP32))
    assert ranked[0].placement.recompute == (0, 2)


def gpt(layers, seed=0, d=4096):
    rng = random.Random(seed)
    first, last = layer("in", 25_000 * d, 1e9, 2e7, 1.6e7), layer("out", 50_000 * d, 8e11, 1e8, 0)
    blocks = [
        layer(i, 12 * d * d, 8e11 * rng.uniform(0.7, 1.4), 5e8, 1.6e7, 1.0) for i in range(layers)
    ]
    return Model((first, *blocks, last), heads=32)


@pytest.mark.parametrize(
    ("layers", "width", "count", "most"),
    [
        (48, 4096, 16, 300_000),
        pytest.param(96, 4096, 64, 1_000_000, marks=pytest.mark.real),
        (96, 12288, 16, 1_000_000),
    ],
)
def test_large_models_are_planned_in_few_calls(layers, width, count, most):
    """A machine's pace proves nothing here; a count of calls does. The last fits nowhere."""
    gpus = replace(server("", 8, 80e9, 3e14, RankLink(2e-5, 4e11)), has_gpus=True)
    machines = tuple(replace(gpus, name=str(i)) for i in range(count // 8))
    calls = 0

    def see(frame, event, argument):
        nonlocal calls
        calls += event == "call" and "placement" in frame.f_code.co_filename

    sys.setprofile(see)
    try:
        servers = Servers(machines, RankLink(5e-5, 5e10))
        ranked, _ = search(gpt(layers, d=width), servers, Work(8, 32, Kept(2.0, 2)))
    finally:
        sys.setprofile(None)
    assert bool(ranked) == (width == 4096)
    assert calls < most, f"{calls} calls"


def test_experts_of_several_ranks_take_less_memory_and_all_to_alls():
    """Parameters, gradients and optimizer of three of four experts are elsewhere; what is routed
    goes to them and back in both passes; nothing of them is added up."""
    count, routed = 4 * 10**7, 1e6
    plain = layer("plain", 10**6)
    mixed = replace(layer("mixed", count + 10**6), expert=count / (count + 10**6),
                    routed_bytes=routed)  # fmt: skip
    model = Model((plain, mixed), experts=4)
    servers, work = Servers((server(),), LINK), Work(4, 2, FP32)
    whole, shared = (
        evaluate(model, servers, work, Placement(data=4, experts=experts)) for experts in (1, 4)
    )
    held = formulas.rank_bytes(count, count, FP32, 1, 0, False)
    assert whole.bytes[0] - shared.bytes[0] == pytest.approx(0.75 * held)
    way = 3 * LINK.alpha + 0.75 * 2 * routed / LINK.beta
    sync = LINK.all_reduce(4, 4.0 * (count + 2e6)) - LINK.all_reduce(4, 4.0 * 2e6)
    assert shared.seconds - whole.seconds == pytest.approx(4 * way - sync)
    ranked, _ = search(model, servers, work)
    assert any(each.placement.experts == 4 for each in ranked)


def test_unequal_devices_get_unequal_numbers_of_layers():
    model = Model(tuple(layer(i) for i in range(12)))
    machines = (server("fast", 1, speed=3e12), server("slow", 1, speed=1e12))
    ranked, _ = search(model, Servers(machines, RankLink(1e-6, 1e12)), Work(1, 16, FP32))
    pipeline = next(each for each in ranked if each.placement.pipeline == 2)
    assert [j - i for i, j in pipeline.ends] == [9, 3]


def test_sums_over_layers_count_tied_parameters_once():
    model = Model((layer(0, 5), layer(1, 7), layer(2, 5)), ((0, 2, 5),))
    held = LayerSums(model).divided(1).held
    assert model.parameters == held[0, 3] == 12
    assert held[0, 2] == held[1, 3] == 12


def test_one_placement_is_judged_as_the_search_would():
    model = Model(tuple(layer(i) for i in range(6)))
    servers, work = Servers((server(),), RankLink(1e-4, 1e9)), Work(2, 8, FP32)
    given = evaluate(model, servers, work, Placement(data=2, pipeline=2, microbatches=4))
    assert isinstance(given, Found)
    assert given.placement.cuts == (3,)
    worse = evaluate(model, servers, work, replace(given.placement, cuts=(1,)))
    assert worse.seconds > given.seconds


@pytest.mark.parametrize(("schedule", "busy"), [("zbv", 8.0), ("interleaved", 9.5)])
def test_a_rank_with_several_stages_is_as_busy_as_all_of_them(schedule, busy):
    seconds = (3.0, 4.5, 3.5, 5.0)
    layers = tuple(Layer(str(i), 1, s * 1e9, 0.0, 0, 0, 0.0, 0.0) for i, s in enumerate(seconds))
    servers = Servers((server(count=2, speed=1e9, link=RankLink(0.0, 1e30)),), RankLink(0.0, 1e30))
    asked = Placement(pipeline=2, schedule=schedule, stages=2, microbatches=8)
    found = evaluate(Model(layers), servers, Work(1, 8, FP32), asked)
    idle = weights_of(schedule, 2, 8, 2)[0] * sum(seconds)
    assert found.seconds == pytest.approx(8 * busy + idle)
