"""What a job whose members are stages of a pipeline cannot have, each by its name."""

from __future__ import annotations

import pytest

from edgetrain.errors import ConfigError
from edgetrain.jobs.pipeline import pipeline_of, refuse_pipeline, save_every
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve

JOB = ("members=4", "strategy=sync-sgd", "fleet.placement=pipeline=4")


def test_a_pipeline_over_members_is_in_the_digest():
    plain, piped = load(None, JOB[:2]), load(None, JOB)
    assert resolve(piped).job.digest() != plain.digest()
    assert pipeline_of(plain) is None
    assert pipeline_of(piped).pipeline == 4
    assert save_every(piped) == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["privacy.unit=example"], "privacy.unit"),
        (["strategy.secure=true"], "strategy.secure"),
        (["strategy=dga"], "dga and fleet.placement"),
        (["codec=q8"], "codec"),
        (["train.accumulate=2"], "train.accumulate = 2"),
        (["train.lr_reference_batch=16"], "train.lr_reference_batch"),
        (["train.evaluate_every=5"], "train.evaluate_every = 5"),
        (["train.frozen=first"], "train.frozen"),
        (["train.accelerator=cuda"], "train.accelerator"),
        (["hub.min_members=2"], "hub.min_members"),
        (["hub.quorum=2"], "hub.quorum"),
        (["fleet.topology=ring"], "fleet.topology = 'ring'"),
        (["servers.fallback=when-needed"], r"\[servers\]"),
        (["members=5"], "pipeline=5"),
        (["fleet.placement=pipeline=1"], "pipeline=4"),
        (["fleet.placement=data=2 pipeline=4"], "no 'data'"),
        (["fleet.placement=pipeline=4 schedule=gpipe"], "schedule=gpipe"),
        (["fleet.activations=fp8"], "fleet.activations = 'fp8'"),
        (["fleet.placement=", "fleet.activations=bf16"], "without fleet.placement"),
    ],
)
def test_what_does_not_go_together_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        resolve(load(None, [*JOB, *words]))


def test_who_cannot_have_one_says_so():
    with pytest.raises(ConfigError, match="a simulation cannot have a pipeline"):
        refuse_pipeline(load(None, JOB), "a simulation cannot have")
    refuse_pipeline(load(None, JOB[:2]), "a simulation cannot have")
