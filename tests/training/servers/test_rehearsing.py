"""A plan tries what it ranks first, without numbers, and passes over what cannot be built."""

from __future__ import annotations

import copy
import logging

import buffer_cases
import group_cases as cases
import odd_models as odd
import pytest
import torch
import torch.distributed as dist

from edgetrain.errors import quoted
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import model_of, question_of
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.training.servers import mesh, rank
from edgetrain.training.servers.attempt import RankEnd
from edgetrain.training.servers.parts import with_buffers
from edgetrain.training.servers.rehearsing import problem_of, rehearsal

pytestmark = pytest.mark.usefixtures("own_imports")

JOB = ["task=odd_models:Odd", "members=4", "batch=4", "optimizer=adamw"]


@pytest.mark.parametrize(
    ("subject", "words", "said"),
    [("plain", "data=2 shard=2 zero=3 pipeline=2 microbatches=2", ""),
     ("layer of two blocks", "data=2", ""),
     ("body and head", "data=1", ""), ("two names", "data=2 shard=2 zero=3", ""),
     ("scalars", "data=2 shard=2 zero=2", ""), ("two names", "pipeline=2 microbatches=4", ""),
     *((f"choosing, {how}", "data=2 shard=2 zero=3", "") for how in odd.CHOICES),
     ("choosing, mask", "tensor=2 norms=split", ""),
     ("long skip", "pipeline=2 schedule=zero-bubble microbatches=4", ""),
     ("long skip", "tensor=2 norms=split", "RuntimeError: "),
     ("tensor on device", "pipeline=2 microbatches=4", ""),
     ("tensor on device", "data=2 shard=2 zero=3 pipeline=2 microbatches=2", "RecursionError: "),
     ("layer of two blocks", "tensor=2 norms=split", "is of no norm and not divided"),
     ("block used twice", "tensor=2 norms=split", "one after the other"),
     ("tied", "pipeline=2 tensor=2 microbatches=2", "torch's tracer cuts")],
)  # fmt: skip
def test_what_cannot_be_built_is_said_in_one_line(subject, words, said):
    job = odd.job_of(subject)
    problem = problem_of(job, task_of(job), parse(words))
    assert bool(problem) == bool(said)
    assert said in problem
    assert "\n" not in problem
    assert not dist.is_initialized()


def test_a_torch_that_shards_otherwise_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr(rank, "fully_shard", lambda module, mesh: None)  # as torch 2.6 has it
    job = odd.job_of("plain")
    said = problem_of(job, task_of(job), parse("data=2"))
    assert said.startswith(f"torch {torch.__version__} does not do for a group of ranks (torch 2.")


def test_a_module_without_gradients_is_named_which_torchs_tracer_calls_with_too_little():
    job = cases.job_of("task=group_cases:angled", *cases.CHARS[1:])
    said = problem_of(job, task_of(job), parse("pipeline=2 microbatches=4"))
    assert said.startswith("torch's tracer, which would cut this model, leaves out what 'angles' ")


@pytest.mark.parametrize(
    ("said", "quoted_"),
    [("Found <class 'a.B'> in output, which is not a known type. If this type holds tensors, you",
      ": Found <class 'a.B'> in output, which is not a known type"),
     ("on two devices, cpu and meta! While executing %g", ": on two devices, cpu and meta!"),
     ("Could not guard on Eq(u0, 1).  (Size-like symbols: none)", ": Could not guard on Eq(u0, 1)"),
     ("\nat most 2.5 of e.g. a list\nFrames:", ": at most 2.5 of e.g. a list"), ("", "")],
)  # fmt: skip
def test_of_an_error_of_torch_its_first_sentence_is_quoted(said, quoted_):
    assert quoted(RuntimeError(said)) == f"RuntimeError{quoted_}"


def test_what_torch_logs_of_tensors_without_numbers_is_not_on_the_terminal(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch"), "handlers", [caplog.handler])
    job = odd.job_of("choosing, grouped")
    assert any("mat_a" in note for note in question_of(resolve(job)).notes)
    assert not caplog.text


def test_a_plan_passes_over_what_cannot_be_built(tmp_path):
    placed = "servers.placement=data=2 shard=2 zero=3 pipeline=2 microbatches=2"
    words = [*JOB, "servers.fallback=when-faster", placed]
    job = load(None, [*words, "data.subject=tensor on device"])
    decision = decide(question_of(resolve(job), tmp_path), rehearsal(job, tmp_path))
    assert decision.chosen == ""
    assert "RecursionError" in decision.why
    assert decision.why.endswith(" runs")


def test_tensors_are_in_order_in_memory_with_their_values_and_what_is_shared():
    model = buffer_cases.Turned()
    twin = copy.deepcopy(model)
    before = dict(model.named_parameters())
    found = with_buffers(model)
    assert found.last.same is found.turned
    assert all(p is before[name] for name, p in found.named_parameters())
    given = torch.randn(2, buffer_cases.WIDTH)
    torch.testing.assert_close(found(given), twin(given))
    for tensor in [*found.parameters(), *found.buffers()]:
        assert tensor.is_contiguous()


def test_layers_of_a_model_that_needs_numbers_are_known_all_the_same():
    model, (note,) = model_of(odd.Odd("choosing, mask"), odd.job_of("choosing, mask"))
    plain, _ = model_of(odd.Odd("plain"), odd.job_of("plain"))
    assert "it fails on fake tensors" in note
    assert [x.parameters for x in model.layers] == [x.parameters for x in plain.layers]
    assert model.heads == plain.heads
    assert model.flops == pytest.approx(plain.flops, rel=0.01)


def test_what_a_library_raised_in_a_rank_is_one_line_with_the_placement_and_the_way_out(tmp_path):
    frames = 'File "/x/site-packages/torch/nn/module.py", line 3'
    said = str(RankEnd(1, f"RuntimeError: shapes\n{frames}").told("rank r1 of data=2", tmp_path))
    assert said.startswith("rank r1 of data=2: RuntimeError: shapes (take another placement, or ")
    assert "\n" not in said
    assert frames in (tmp_path / "error.txt").read_text()
    assert "mine.py" in str(RankEnd(1, "KeyError: 'x'\nmine.py line 3").told("rank r0", tmp_path))


def test_a_build_of_torch_without_libuv_gets_its_other_store(monkeypatch):
    def made(host, port, use_libuv=True, **how):
        if use_libuv:
            raise RuntimeError(
                "use_libuv was requested but PyTorch was built without libuv support"
            )
        return host, port, how

    monkeypatch.setattr(mesh, "TCPStore", made)
    assert mesh.store_at("a", 5, is_master=False) == (
        "a", 5, {"is_master": False, "wait_for_workers": False},
    )  # fmt: skip
