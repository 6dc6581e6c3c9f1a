"""Every placement trains what one process trains: float64, within 1e-9; and a group of data ranks
trains what a fleet under sync-sgd trains."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import children
import group_cases as cases
import numpy as np
import pytest
import ranks
import torch
from loopback import Loopback

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.jobs import reading
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.words import parse
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.work import optimizer_for
from edgetrain.training.member.member import Member, bind
from edgetrain.training.servers.dropping import Dropping
from edgetrain.training.servers.model import TiedGroups
from edgetrain.training.servers.parts import cut
from edgetrain.training.servers.rank import dropping_of, example_of, prepare_rank
from edgetrain.vectors.vector import checksum

pytestmark = pytest.mark.real

CHARS, DIGITS = cases.job_of(*cases.CHARS), cases.job_of(*cases.DIGITS)
UNNAMED = cases.job_of("task=group_cases:unnamed", *cases.CHARS[1:])
UNTIED = cases.job_of(*cases.CHARS, "data.tied=false")
COMPILED = cases.job_of(*cases.CHARS, "servers.compile=aot_eager")
THINNED = cases.job_of(*cases.CHARS, "servers.layer_keep=0.3", "steps=40")
EXPERTS = cases.job_of(*cases.CHARS[:-1], "data.layers=2", "data.experts=4", "train.clip=0.5")
CLIPPED = cases.job_of(*cases.CHARS, "train.clip=0.05")
MOST = 1e-9


@functools.cache
def alone(name):
    return cases.alone(globals()[name])


def compare(worlds, count, name, words, how=None):
    found = worlds(count).run(cases.train, globals()[name], words)
    losses, params = alone(name)
    for rank in range(count):
        np.testing.assert_allclose(found[rank][0], losses, rtol=0, atol=MOST)
    for mine, theirs in zip(found[0][1], params, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=MOST)
    assert how in (None, found[0][2])


@pytest.mark.parametrize(
    ("name", "words", "how"),
    [
        ("CHARS", "data=2 microbatches=2", "whole"),
        ("CHARS", "data=2 shard=2 zero=1", "whole"),
        ("CLIPPED", "data=2 shard=2 zero=1 microbatches=2", "whole"),
        ("CHARS", "data=2 shard=2 zero=2", "whole"),
        ("CHARS", "data=2 shard=2 zero=3 recompute=yes", "whole"),
        ("CHARS", "data=2 shard=2 zero=3 recompute=1,3", "whole"),
        ("CHARS", "tensor=2", "whole"),
        ("CHARS", "tensor=2 norms=split recompute=1-2", "whole"),
        ("CLIPPED", "tensor=2", "whole"),
        ("CLIPPED", "pipeline=2 microbatches=4", "names"),
        ("CHARS", "sequence=2", "whole"),
        ("CHARS", "sequence=2 ulysses=2 microbatches=2 recompute=yes", "whole"),
        ("UNTIED", "pipeline=2 microbatches=1", "names"),
        ("DIGITS", "pipeline=2 microbatches=4 cuts=3", "sequence"),
        ("UNNAMED", "pipeline=2 microbatches=4", "tracer"),
        ("UNNAMED", "pipeline=2 schedule=zbv microbatches=4", "tracer"),
        ("EXPERTS", "data=2 experts=2 microbatches=2 recompute=yes", "whole"),
        ("CHARS", "pipeline=2 schedule=looped-bfs microbatches=4 cuts=1,2,4", "names"),
    ],
)
def test_two_ranks_train_what_one_process_trains(worlds, name, words, how):
    compare(worlds, 2, name, words, how)


@pytest.mark.parametrize(
    ("name", "words", "how"),
    [
        ("CHARS", "data=4 shard=2 zero=3", "whole"),
        ("CHARS", "data=2 shard=2 zero=1 tensor=2", "whole"),
        ("CHARS", "data=2 shard=2 zero=1 pipeline=2 schedule=zbv microbatches=4", "names"),
        ("CHARS", "data=2 shard=2 zero=3 tensor=2", "whole"),
        ("CHARS", "pipeline=2 tensor=2 microbatches=4", "names"),
        ("CHARS", "pipeline=4 microbatches=2", "names"),
        ("CHARS", "sequence=4 ulysses=2", "whole"),
        ("CLIPPED", "data=2 shard=2 zero=3 tensor=2", "whole"),
        ("CLIPPED", "sequence=2 pipeline=2 schedule=zbv microbatches=4", "names"),
        ("CHARS", "sequence=4 recompute=yes", "whole"),
        ("CHARS", "data=2 shard=2 zero=3 sequence=2", "whole"),
        ("CHARS", "pipeline=2 sequence=2 microbatches=4", "names"),
        ("CHARS", "tensor=2 norms=split sequence=2 ulysses=2 recompute=yes", "whole"),
        ("CHARS", "pipeline=2 tensor=2 norms=split microbatches=4", "names"),
        ("DIGITS", "pipeline=4 microbatches=4", "sequence"),
        ("CHARS", "data=2 pipeline=2 schedule=gpipe microbatches=4", "names"),
        ("CHARS", "data=2 shard=2 zero=3 pipeline=2 schedule=1f1b microbatches=4", "names"),
        ("DIGITS", "data=2 pipeline=2 schedule=interleaved microbatches=4", "sequence"),
        ("CHARS", "data=2 shard=2 zero=3 pipeline=2 schedule=interleaved microbatches=4", "names"),
        ("UNNAMED", "data=2 shard=2 zero=2 pipeline=2 schedule=zero-bubble microbatches=4",
         "tracer"),
        ("CHARS", "data=2 shard=2 zero=2 pipeline=2 schedule=zbv microbatches=4", "names"),
        ("EXPERTS", "data=4 shard=2 zero=3 experts=2", "whole"),
        ("EXPERTS", "data=2 experts=2 pipeline=2 microbatches=4", "names"),
        ("CHARS", "data=2 pipeline=2 schedule=dualpipev microbatches=4", "names"),
    ],
)  # fmt: skip
def test_four_ranks_train_what_one_process_trains(worlds, name, words, how):
    compare(worlds, 4, name, words, how)


def test_only_the_layers_that_are_named_are_computed_again(worlds):
    for seen, names in worlds(2).run(cases.kept_between_blocks, CHARS, "data=2 recompute=1,3"):
        assert names == ["blocks.0", "blocks.2"], "layer 0 is the embedding"
        assert seen == [8] * 2


def test_what_recomputation_keeps_is_divided_among_tensor_ranks_with_their_norms(worlds):
    words = "tensor=2 norms=split recompute=yes"
    for seen, _ in worlds(2).run(cases.kept_between_blocks, CHARS, words):
        assert seen == [8, 4, 4], "the first block divides what it gets"
    for seen, _ in worlds(2).run(cases.kept_between_blocks, CHARS, "tensor=2 recompute=yes"):
        assert seen == [8] * 3


@pytest.mark.parametrize(
    "words",
    ["data=2 shard=2 zero=3 recompute=yes microbatches=2", "data=2 shard=2 zero=1",
     "tensor=2 norms=split", "pipeline=2 schedule=zero-bubble microbatches=4", "sequence=2"],
)  # fmt: skip
def test_all_ranks_leave_out_the_same_blocks(worlds, words):
    losses, drawn = cases.alone_thinned(THINNED, 10)
    left_out = sum(factor == 0 for factors in drawn for factor in factors)
    assert 5 < left_out < 25
    for found, _, _ in worlds(2).run(cases.train, THINNED, words):
        np.testing.assert_allclose(found, losses, rtol=0, atol=MOST)


def test_the_chance_of_a_block_falls_with_its_depth_and_the_step():
    dropping = Dropping(0.5, 1000, 7, ["a", "b", "c", "d"])
    assert dropping.chances(0) == [1.0] * 4
    assert dropping.chances(1000) == pytest.approx([0.875, 0.75, 0.625, 0.5])
    counted = np.zeros(4)
    for step in range(1000, 4000):
        dropping.begin(step)
        counted += np.array(dropping.factors) > 0
    np.testing.assert_allclose(counted / 3000, dropping.chances(1000), atol=0.04)


@pytest.mark.parametrize(
    ("job", "words", "said"),
    [("THINNED", "pipeline=2 microbatches=4", "a pipeline that torch's tracer cuts"),
     ("DIGITS", "data=1", "a model whose blocks are not modules"),
     ("COMPILED", "data=1", "would compile every choice")],
)  # fmt: skip
def test_blocks_that_cannot_be_left_out_are_refused(job, words, said):
    job = UNNAMED if "pipeline" in words else globals()[job]
    job = replace(job, servers=replace(job.servers, layer_keep=0.5))
    parts = cut(task_of(job), parse(words), example_of(job, task_of(job), parse(words)))
    with pytest.raises(EdgetrainError, match=said):
        dropping_of(job, parts)


@pytest.mark.parametrize(
    "words",
    ["data=2 shard=2 zero=3 recompute=1,3", "tensor=2",
     "pipeline=2 schedule=zero-bubble microbatches=4"],
)  # fmt: skip
def test_compiled_blocks_train_what_one_process_trains(worlds, words):
    for losses, graphs in worlds(2).run(cases.train_compiled, COMPILED, words):
        np.testing.assert_allclose(losses, alone("CHARS")[0], rtol=0, atol=MOST)
        assert graphs > 0


def test_what_torch_cannot_compile_is_told_in_its_words():
    with ranks.world(2) as world, pytest.raises(EdgetrainError) as caught:
        world.run(cases.train_compiled, COMPILED, "sequence=2 recompute=yes")
    assert "servers.compile = 'aot_eager': NotImplementedError: checkpoint" in str(caught.value)
    assert str(caught.value).endswith("(leave servers.compile out)")


def test_a_clipped_run_is_another_one():
    assert abs(np.subtract(alone("CLIPPED")[0], alone("CHARS")[0])).max() > 1e-3


@pytest.mark.parametrize("words", ["data=2 shard=2 zero=3", "pipeline=2 microbatches=4"])
def test_bf16_computes_with_float32_masters(worlds, words):
    job = cases.job_of(*cases.CHARS, "precision=bf16")
    losses = cases.alone(job, False)[0]
    for found, types, seen, state in worlds(2).run(cases.in_bf16, job, words):
        assert types == state == {torch.float32}
        assert seen == {torch.bfloat16}
        np.testing.assert_allclose(found, losses, rtol=0, atol=0.02)
        assert found != losses


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("heads", [(4, 4), (8, 4)], ids=["equal", "grouped"])
def test_attention_over_slices_is_attention_over_the_whole(worlds, ring, ulysses, causal, heads):
    for differences in worlds(4).run(cases.attend, ring, ulysses, causal, heads):
        assert max(differences) < 1e-12


@pytest.mark.parametrize(
    ("how", "said"),
    [({"dropout_p": 0.5}, "dropout of 0.5"), ({"attn_mask": torch.ones(4, 4)}, "a mask of its")],
)
def test_attention_that_slices_cannot_have_is_refused(how, said):
    with ranks.world(1) as world, pytest.raises(EdgetrainError, match=said):
        world.run(functools.partial(cases.attend_with, **how))


def test_eight_ranks_in_three_directions(worlds):
    compare(worlds, 8, "CHARS", "data=2 shard=2 zero=2 pipeline=2 tensor=2 microbatches=2", "names")


def test_without_the_sum_over_tied_copies_it_is_another_model(worlds):
    found = worlds(2).run(cases.train_untied, UNNAMED, "pipeline=2 microbatches=4")
    assert abs(np.subtract(found[0][0], alone("UNNAMED")[0])).max() > 1e-3
    assert TiedGroups.add is not None


def test_torchs_reason_is_told_where_a_model_cannot_be_cut():
    job = cases.job_of("task=group_cases:untraceable", *cases.CHARS[1:])
    with ranks.world(1) as world, pytest.raises(EdgetrainError, match="cannot be cut") as caught:
        world.run(cases.cut_only, job, "pipeline=2 microbatches=4")
    assert "name its pieces" in str(caught.value)


# -- the law against sync-sgd ---------------------------------------------------------------------


def fleet(job, steps):
    """The package's own fleet under sync-sgd: checksum at the start, parameters at the end."""
    wires, begins = Loopback(), set()

    def model():
        torch.manual_seed(job.seed)
        return task_of(job).model()

    def train(index, transport, model):
        task = task_of(job)
        optimizer = optimizer_for(model, job.train.optimizer)
        link = Link(transport, time.monotonic)
        batches = task.batches(index, job.fleet.members, job.train.batch, job.seed)
        flat = bind(model, optimizer)
        with Member.join(link, flat, optimizer, Request("", f"m{index}")) as member:
            begins.add(checksum(flat.params))
            for _ in range(steps):
                optimizer.zero_grad()
                task.loss(model, next(batches)).backward()
                member.step()
        return children.flat(model)

    count = job.fleet.members
    # Drawn before the threads start: torch has one generator for all.
    models = [model() for _ in range(count)]
    with children.HubThread(wires, "sync-sgd", count).serving():
        ends = [wires.connect() for _ in range(count)]
        found = children.in_threads(
            *[lambda i=i: train(i, ends[i], models[i]) for i in range(count)]
        )
    assert all(each.tobytes() == found[0].tobytes() for each in found)
    assert len(begins) == 1
    return begins.pop(), found[0]


@pytest.mark.parametrize(("members", "words"), [(2, "data=2"), (4, "data=2 shard=2 zero=3")])
@pytest.mark.parametrize("task", [cases.CHARS, cases.DIGITS], ids=["char_lm", "digits"])
def test_data_ranks_train_what_a_fleet_under_sync_sgd_trains(worlds, task, members, words):
    job = cases.job_of(*task, f"members={members}", "optimizer=sgd", "lr=0.05",
                       "optimizer.momentum=0.9")  # fmt: skip
    begins, ends = fleet(job, 20)
    world = worlds(2)
    assert world.run(cases.first_checksum, job, words)[0] == begins
    _, params, _ = world.run(cases.train, job, words, False, 20)[0]
    mine = torch.cat([p.flatten() for p in params]).numpy()
    torch.manual_seed(job.seed)
    assert np.abs(mine - FlatModel(task_of(job).model()).params).max() > 0.01, "it has trained"
    np.testing.assert_allclose(mine, ends, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr_reference_batch=64"], ["train.lr_reference_batch = 64", "write the learning rate"]),
    ],
    ids=lambda value: value[0].partition("=")[0] if value else "",
)
def test_what_only_members_can_do_is_refused_before_a_model_is_cut(words, said, monkeypatch):
    monkeypatch.setattr("edgetrain.training.servers.rank.cut", None)
    job = reading.load(None, words)
    with pytest.raises(ConfigError) as refused:
        prepare_rank(job, None, None, torch.device("cpu"))
    assert "\n" not in str(refused.value)
    assert all(part in str(refused.value) for part in said)
