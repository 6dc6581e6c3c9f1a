"""Where jobs go: three fleets of one job file, and what each refusal says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from edgetrain.errors import ConfigError
from edgetrain.fleet import cluster
from edgetrain.jobs.placement.decision import Board, Question, decide
from edgetrain.jobs.placement.formulas import Kept, RankLink
from edgetrain.jobs.placement.machines import Server, Servers
from edgetrain.jobs.placement.question import question_of, servers_of
from edgetrain.jobs.placement.search import Work
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.tasks import meta
from edgetrain.tasks.classification import Classification
from edgetrain.tasks.layers import Layer, Model

PI4, PI5 = Board("pi-4", 3.4e9, 100.0), Board("pi-5", 6.8e9, 86.0)
GROUP = Servers((Server("a", 4, 8e10, 1e13, 1e-5, RankLink(1e-5, 1e10)),), RankLink(1e-4, 1e9))


def plan_placement(job):
    return decide(question_of(resolve(job)))


def question(parameters=1_000_000, **changes):
    layers = tuple(
        Layer(f"l{i}", parameters // 4, 1e9, 2e9, 5, 10, 1e6, 1e5, 1.0) for i in range(4)
    )
    found = Question(
        Model(layers, heads=4), Work(4, 8, Kept(4.0, 1)), "dga", "runs on", (PI4,), (PI4, PI5),
        servers=GROUP, fallback="when-needed",
    )  # fmt: skip
    return replace(found, **changes)


def test_a_job_that_fits_its_devices_runs_there():
    decision = decide(question())
    assert decision.chosen == "edge"
    assert decision.placement is None
    assert decision.found, "the servers' placements are shown all the same"


def test_a_job_that_does_not_fit_goes_to_the_group_and_says_why():
    decision = decide(question(120_000_000))
    assert decision.placement is not None
    assert decision.placement.ranks <= 4
    assert decision.why.startswith("needs 5.36 GB a member, pi-4 has 3.4 GB; pi-5 would hold it")
    assert decision.why.endswith("at 86 s a step")


def test_without_servers_the_nearest_thing_that_fits_is_named():
    decision = decide(question(120_000_000, servers=None))
    assert decision.chosen == ""
    assert "pi-5 would hold it" in decision.why
    assert "servers.cluster = a cluster.toml" in decision.why


def test_what_was_not_asked_for_is_not_done():
    decision = decide(question(120_000_000, fallback="never"))
    assert decision.chosen == ""
    assert any("servers.fallback = 'never'" in each for each in decision.refused)
    assert decide(question(placement="edge", fallback="when-faster")).chosen == "edge"


def test_when_faster_compares_the_step():
    assert decide(question(fallback="when-faster")).placement is not None
    quick = (replace(PI4, seconds=1e-6),)
    assert decide(question(fallback="when-faster", boards=quick)).chosen == "edge"
    unknown = (replace(PI4, seconds=None),)
    assert decide(question(fallback="when-faster", boards=unknown)).chosen == "edge"


def test_words_are_taken_at_their_word():
    decision = decide(question(placement="data=2 pipeline=2 microbatches=4", fallback="never"))
    assert decision.chosen.startswith("data=2 pipeline=2 microbatches=4")
    assert decision.why == "servers.placement says so"


def test_words_that_do_not_fit_are_refused_with_what_does():
    decision = decide(question(8_000_000_000, placement="data=1"))
    assert decision.chosen == ""
    assert "data=1: one device: needs" in decision.why
    assert decision.why.endswith("fits")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data=8", "8 ranks, the servers have 4 (data=4, or more servers)"),
        ("data=4 tensor=2", "is 8 ranks, the servers have 4 (data=2, or more servers)"),
        ("tensor=2 sequence=8", "is 16 ranks, the servers have 4 (sequence=2, or more servers)"),
        ("data=3", "data=3 does not divide the job's 4 members, whose batches its ranks share "
                   "(data=2)"),
        ("pipeline=4 schedule=interleaved microbatches=4", "8 stages of a model with 4 layers"),
        ("pipeline=2 cuts=9", "a cut at 9 of 4 layers"),
        ("pipeline=2 microbatches=5", "microbatches=5 of a rank's 32 samples (microbatches=4)"),
        ("sequence=3", "sequence=3 does not divide the 8 positions of a sample (sequence=2)"),
        ("tensor=2 sequence=4 ulysses=4", "is 8 ranks, the servers have 4"),
        ("sequence=4 ulysses=4", "ulysses=4 does not divide the 6 heads of a rank (ulysses=3)"),
        ("pipeline=2 recompute=1,7", "recompute=7 of a model with 4 layers (0 to 3)"),
        ("tensor=3", "tensor=3 does not divide the model's 4 heads (tensor=2)"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_both_numbers(words, said):
    model = replace(question().model, length=8, knows_place=True)
    if "ulysses" in words:
        model = replace(model, heads=6)
    with pytest.raises(ConfigError) as caught:
        decide(question(model=model, placement=words))
    assert said in str(caught.value)


def test_a_model_without_a_table_is_not_divided():
    plain = replace(question().model, heads=0)
    with pytest.raises(ConfigError, match="does not say how its layers are divided"):
        decide(question(model=plain, placement="tensor=2"))


def test_a_sequence_is_split_only_where_attention_and_places_are_known():
    with pytest.raises(ConfigError, match="never calls scaled_dot_product_attention"):
        decide(question(placement="sequence=2"))
    attends = replace(question().model, length=8)
    with pytest.raises(ConfigError, match="cannot be told which positions it sees"):
        decide(question(model=attends, placement="sequence=2"))
    found = decide(question(model=attends)).found
    assert all(each.placement.sequence == 1 for each in found), "nor by the search"
    told = replace(attends, knows_place=True)
    assert decide(question(model=told, placement="sequence=2")).chosen == "sequence=2"


def test_char_lm_says_what_its_attention_sees():
    words = ["task=edgetrain.tasks:char_lm", "data.context=8", "data.limit_bytes=20000"]
    model = question_of(resolve(load(None, words))).model
    assert (model.length, model.knows_place) == (8, True)
    assert [layer.attentions for layer in model.layers] == [0, 1, 1, 0]


def test_a_split_sequence_keeps_less_and_passes_keys_and_values_on():
    layers = tuple(Layer(f"l{i}", 10**6, 1e9, 2e9, 5, 10, 1e8, 1e5, 1.0, 1) for i in range(4))
    model = Model(layers, heads=4, length=8, knows_place=True)
    slow = replace(GROUP, servers=(replace(GROUP.servers[0], inside=RankLink(0.0, 1e6)),))

    def found(words, servers=GROUP):
        return decide(question(model=model, placement=words, servers=servers)).found[0]

    one, two = found("data=1"), found("sequence=2")
    activations = model.saved_bytes * 32
    assert one.bytes[0] - two.bytes[0] == pytest.approx(activations / 2)
    assert two.seconds < one.seconds
    # Of a sample: keys and values once, then with their gradients twice, for each of four layers.
    sent = 4 * 32 / 2 * 1e5 * (2 * 1 + 4 * 2)
    adding = slow.servers[0].inside.all_reduce(2, 4.0 * model.parameters)
    slowly = found("sequence=2", slow).seconds - found("sequence=2", replace(
        slow, servers=(replace(slow.servers[0], inside=RankLink(0.0, 1e30)),)
    )).seconds  # fmt: skip
    assert slowly == pytest.approx(sent / 1e6 + adding)


def test_fewer_microbatches_than_stages_are_allowed():
    decision = decide(question(placement="pipeline=4 microbatches=2"))
    assert decision.placement is not None
    assert decision.notes == (
        "2 micro-batches for 4 stages: ranks are idle for 60% of a step (16% with microbatches=16)",
    )
    assert decide(question(placement="pipeline=4 microbatches=4")).notes == ()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["secure=true"], "no contributions that could be masked"),
        (["privacy.unit=example", "privacy.noise=1"], "clips and noises nothing"),
    ],
)
def test_what_a_group_cannot_do_is_said(overrides, said):
    decision = plan_placement(load(None, ["servers.placement=data=2", *overrides]))
    assert decision.chosen == ""
    assert said in decision.why


def test_a_closure_optimizer_has_no_placement():
    with pytest.raises(ConfigError, match=r"loss again within its step.* \(use adam or sgd\)"):
        plan_placement(load(None, ["optimizer=lbfgs"]))


def in_rows(norm):
    return nn.Sequential(nn.Unflatten(1, (4, 16)), norm, nn.Flatten())


@pytest.mark.parametrize(
    ("norm", "words", "said"),
    [
        (nn.BatchNorm1d(64), "data=2", "'1' normalises over the samples of a batch (leave data"),
        (nn.BatchNorm1d(64, track_running_stats=False), "microbatches=2", "leave microbatches out"),
        (in_rows(nn.InstanceNorm1d(4, track_running_stats=True)), "data=2",
         "the forward pass changes the buffer '1.1.running_mean'"),
    ],
)  # fmt: skip
def test_a_module_that_sees_other_samples_than_in_one_process_has_no_such_placement(
    monkeypatch, norm, words, said
):
    model = nn.Sequential(nn.Flatten(), norm, nn.Linear(64, 10))
    monkeypatch.setattr(Classification, "model", lambda self: model)
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan_placement(load(None, [f"servers.placement={words}"]))
    assert plan_placement(load(None, ["servers.placement=pipeline=2"])).chosen


def test_a_norm_of_each_sample_goes_everywhere(monkeypatch):
    model = nn.Sequential(nn.Flatten(), in_rows(nn.InstanceNorm1d(4)), nn.Linear(64, 10))
    monkeypatch.setattr(Classification, "model", lambda self: model)
    assert plan_placement(load(None, ["servers.placement=data=2 microbatches=2"])).chosen


def test_a_model_that_fits_neither_fake_tensors_nor_memory_is_one_line(monkeypatch):
    class Huge(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(1 << 20, 1 << 20))

        def forward(self, x):
            return torch.from_numpy(x.numpy())

    monkeypatch.setattr(Classification, "model", lambda self: Huge())
    with pytest.raises(ConfigError, match=r"1,099,511,627,776 parameters: .* GB are free here"):
        plan_placement(load(None, ["servers.placement=data=2"]))


def test_servers_come_from_the_cluster_file(tmp_path, own_imports):
    (tmp_path / "cluster.toml").write_text(
        "[between]\nrate_mbit = 8000\nrtt_ms = 2\n"
        '[[server]]\nname = "a"\nhost = "local"\nprofile = "gpu-server"\n'
        '[[server]]\nname = "b"\nhost = "b"\nprofile = "gpu-server"\naccelerators = 2\n'
    )
    job = load(None, ["servers.cluster=cluster.toml", "precision=bf16", "members=2"])
    servers = question_of(resolve(job), tmp_path).servers
    assert [each.accelerators for each in servers.servers] == [8, 2]
    assert servers.between == RankLink(0.001, 1e9)
    assert servers.servers[0].flops_s == 395600e9
    with pytest.raises(ConfigError, match=r"accelerators = 0 .*from 1 to 1024"):
        cluster.parse({"server": [{"name": "a", "host": "a", "accelerators": 0}]}, tmp_path)


def test_what_cannot_be_built_is_passed_over():
    first = decide(question(120_000_000)).found[0].placement
    decision = decide(question(120_000_000), lambda each: "no" if each == first else "")
    assert decision.placement not in (None, first)
    assert f"{first}: no" in decision.refused
    told = decide(question(placement="data=2", fallback="never"), lambda each: "no")
    assert (told.chosen, told.why) == ("", "data=2: no")


def test_a_gpu_takes_one_rank_and_the_cores_are_there_if_the_job_says_so(monkeypatch):
    monkeypatch.setattr(meta, "gpus", lambda: [80_000_000_000])

    def machine(*words):
        return servers_of(load(None, ["members=2", *words])).servers[0]

    assert machine("servers.placement=data=1").accelerators == 1
    with pytest.raises(ConfigError, match="2 ranks on a machine with 1 GPU "):
        machine("servers.placement=data=2")
    cores = machine("servers.placement=data=2", "accelerator=cpu")
    assert (cores.has_gpus, cores.accelerators >= 2) == (False, True)
