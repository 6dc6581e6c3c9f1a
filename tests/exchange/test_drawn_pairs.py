"""Two parts of a job, drawn: the job runs, and all members end with the same base, or it is refused
by one sentence with a way out. None hangs, and none ends in a traceback."""

from __future__ import annotations

import itertools
import os
import random
import re

import pytest

from edgetrain.errors import EdgetrainError
from edgetrain.jobs.plan import check, plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training.simulated import simulation

JOB = ("strategy=local-sgd", "members=4", "steps=12", "batch=8", "evaluate_every=12",
       "network=wan-50ms", "device=raspberry-pi-4b", "message_s=0")  # fmt: skip
"""A few rounds of each strategy; what a part says replaces what stands here."""

HUBS = "hub.hubs=['tcp://a:1', 'tcp://b:1']"
PARTS = {
    "strategy": {name: (f"strategy={name}",) for name in (
        "sync-sgd", "local-sgd", "fedavg", "fedprox(0.1)", "dga", "dga(paper)", "dga(variates)",
        "scaffold", "diloco", "streaming-diloco(2, 0.5)", "fedbuff(2, 0.5)", "ssp(2)",
    )} | {"lbfgs": ("strategy=lbfgs", "data.partition=shared(all)", "delay=0")},
    "topology": {
        **{name: (f"topology={name}",) for name in ("ring", "tree", "butterfly")},
        "direct": ("topology=direct", "ranges=4"),
        "hubs": (HUBS, "ranges=4"),
        "gateways": ("gateways=true", "sites=wan-50ms: 0-1, wan-50ms: 2-3"),
        "replica": ("hub.replica=tcp://c:1", "quorum=3"),
        "ranges": ("ranges=4",),
    },
    "codec": {name: (f"codec={name}",) for name in (
        "fp16", "int8", "sign", "topk(0.05)", "topk(0.05)|q2", "low-rank(2)", "powersgd(2)",
        "auto",
    )},
    "reply": {name: (f"reply_codec={name}",) for name in ("fp16", "int8", "auto", "powersgd(2)")},
    "merge": {name: (f"merge={name}",) for name in (
        "median", "trimmed-mean(0.25)", "krum(0)", "norm-clip(2x)",
    )},
    "delay": {"0": ("delay=0",), "3": ("delay=3",)},
    "quorum": {"3": ("quorum=3", "deadline_s=5"), "auto": ("quorum=3", "deadline_s=auto")},
    "secure": {"masks": ("secure=true",)},
    "privacy": {
        "example": ("privacy.unit=example", "privacy.noise=0.5"),
        "member": ("privacy.unit=member", "privacy.noise=0.5"),
        "at the hub": ("privacy.unit=member", "privacy.where=hub", "privacy.noise=0.5"),
    },
    "weighting": {name: (f"weighting={name}",) for name in ("samples", "alike")},
    "final sync": {"0.25": ("final_sync=0.25",)},
    "cohort": {"2": ("cohort=2",), "and one more": ("cohort=2", "cohort_extra=1")},
    "personal": {"head": ("personal='2.*'",), "in turns": ("personal='2.*'", "head_steps=1")},
    "few": {"3": ("min_members=3",)},
    "training": {
        "accumulate": ("accumulate=2",),
        "clip": ("train.clip=1.0",),
        "schedule": ("schedule=cosine",),
        "momentum": ("optimizer.momentum=0.9",),
        "adam": ("optimizer={name='adam', lr=0.01}",),
        "scaled": ("lr_reference_batch=16",),
        "hold out": ("hold_out=0.2",),
    },
    "placement": {"pipeline": ("strategy=sync-sgd", "fleet.placement=pipeline=4")},
    "group": {"servers": ("device=raspberry-pi-4b:3, servers", "servers.placement=data=2")},
}  # fmt: skip
"""By key, and by what it says: the words of a job."""

EACH = [
    (f"{key} {name}", key, words) for key, names in PARTS.items() for name, words in names.items()
]
ALL = [(one, other) for one, other in itertools.combinations(EACH, 2) if one[1] != other[1]]
DRAWN, AT_ONCE = 300, 30


def drawn(seed: int) -> list[tuple[str, list[str]]]:
    """Pairs of parts of different keys: (what it is called, the words of the job)."""
    pairs = random.Random(seed).sample(ALL, DRAWN)
    return [(f"{a[0]}, {b[0]}", [*JOB, *a[2], *b[2]]) for a, b in pairs]


def refusal(words) -> EdgetrainError | None:
    """Why a job is refused before anything is loaded; None: it is not."""
    try:
        check(load(None, words))
    except EdgetrainError as error:
        return error
    return None


def test_every_pair_is_allowed_or_refused_by_a_sentence_with_a_way_out():
    refused = {}
    for one, other in ALL:
        if error := refusal([*JOB, *one[2], *other[2]]):
            refused[one[0], other[0]] = error
    assert not [pair for pair, error in refused.items() if "\n" in str(error) or not error.hint]
    assert 0.1 * len(ALL) < len(refused) < 0.6 * len(ALL)


def base_of(words, folder) -> str | EdgetrainError:
    """The base that all members end with, or why the job is refused; "": it ends with none of all,
    for stages hold a part of the model each, and members out of step end where they are."""
    try:
        planned = plan(load(None, words))
        summary = simulation.run(planned, folder)
    except EdgetrainError as error:
        return error
    assert summary["status"] == "finished", words
    if planned.job.fleet.placement or not planned.strategy.is_synchronous:
        return ""
    reasons = (str(line.get("reason")) for line in read_metrics(folder, "event"))
    (base,) = {found[1] for each in reasons if (found := re.search(r"base (\w{16})", each))}
    return base


@pytest.mark.real
@pytest.mark.parametrize("part", range(DRAWN // AT_ONCE))
def test_a_drawn_pair_runs_or_is_refused(tmp_path, part):
    for called, words in drawn(int(os.environ.get("PAIRS", "1")))[part :: DRAWN // AT_ONCE]:
        found = base_of(words, create(tmp_path, "pair"))
        if isinstance(found, EdgetrainError):
            assert "\n" not in str(found), called
            assert found.hint, f"{called}: {found}"
