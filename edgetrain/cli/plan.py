"""`edgetrain plan`: where a job fits, how long a step takes there, why not elsewhere."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common

if TYPE_CHECKING:
    from edgetrain.jobs.job import Job
    from edgetrain.jobs.placement.decision import Decision, Question
    from edgetrain.jobs.placement.search import Found

HELP = "say where a job fits, how long a step takes there, and why not elsewhere"
ABOUT = "Plan a job: on its own devices, or on a group of processes on servers."
EXAMPLES = """\
examples:
  edgetrain plan job.toml
  edgetrain plan job.toml --placement "data=2 pipeline=2"
  edgetrain plan job.toml servers.cluster=cluster.toml fallback=when-needed --json
  edgetrain plan task=edgetrain.tasks:char_lm data.width=1024 data.heads=16 data.layers=24 \\
    device=raspberry-pi-4b fallback=when-needed

Nothing is trained and no model is built: its layers are measured on tensors without numbers. The
first line below the model says what `edgetrain run` does with the job. The exit status is 0 if
the job runs somewhere, and 1 if it fits nowhere.

A placement is a few words: data=D ranks share the batch, pipeline=P ranks each have a part of the
layers, tensor=T ranks each have a part of every layer; shard=S zero=3 divides the parameters among
S of the data ranks; sequence=S ranks each have a slice of every sequence. schedule, microbatches,
recompute and cuts are chosen if they are left out of servers.placement = "auto".
docs/how-to/gpu-servers.md explains them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    parser.add_argument("--placement", metavar="WORDS", help="judge this placement on the servers")
    common.add_json(parser, "print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    job, beside = common.job_of(arguments)
    if arguments.placement:
        job = replace(job, servers=replace(job.servers, placement=arguments.placement))
    if job.fleet.placement:
        return _plan_stages(arguments, job, beside)
    from edgetrain.jobs.fallback import in_words
    from edgetrain.jobs.placement.beside import group_job
    from edgetrain.jobs.placement.decision import decide
    from edgetrain.jobs.placement.question import question_of
    from edgetrain.jobs.resolved import with_all_members
    from edgetrain.jobs.rules import resolve
    from edgetrain.jobs.shares import has_group
    from edgetrain.runs.reports.tables import placement_text
    from edgetrain.training.servers.rehearsing import rehearsal

    found = resolve(with_all_members(job))
    note, while_it_runs = "", in_words(found.job)
    if has_group(job):
        found, note = resolve(group_job(found.job)), "this is the member 'servers' of the fleet"
    question = question_of(found, beside)
    question = replace(question, notes=(*question.notes, *filter(None, [note, while_it_runs])))
    decision = decide(question, rehearsal(found.job, beside))
    plan = plain(question, decision) | {"name": job.name or job.task.rpartition(":")[2]}
    common.answer(arguments, plan, placement_text(plan))
    return 0 if decision.chosen else 1


def _plan_stages(arguments: argparse.Namespace, job: Job, beside: Path | None) -> int:
    from edgetrain.jobs.plan import plan as planned_of
    from edgetrain.runs.reports.tables import stages_text
    from edgetrain.training.pipelined.planning import plan_stages
    from edgetrain.training.pipelined.simulated import step_seconds

    found = planned_of(job, beside)
    stages = plan_stages(found)
    plan = {
        "name": found.job.name,
        "placement": str(stages.placement),
        "seconds": step_seconds(replace(found, stages=stages)),
        "parameters": stages.elements,
        "samples": found.job.fleet.members * found.job.train.batch,
        "stages": [
            {
                "device": device, "layers": layers, "needs_bytes": needs, "usable_bytes": has,
                "window": window,
            }
            for device, layers, (needs, has), window in zip(
                found.devices, stages.names, stages.bytes, stages.windows, strict=True
            )
        ],
    }  # fmt: skip
    return common.answer(arguments, plan, stages_text(plan))


def plain(question: Question, decision: Decision) -> dict[str, Any]:
    """A plan as plain values, in seconds and bytes, for tables and --json."""
    edge, model = decision.edge, question.model
    return {
        "chosen": decision.chosen,
        "why": decision.why,
        "members": question.work.members,
        "samples": question.work.members * question.work.batch,
        "model": {
            "parameters": model.parameters,
            "flops": model.flops,
            "saved_bytes": model.saved_bytes,
            "layers": [vars(layer) for layer in model.layers],
        },
        "edge": {
            "device": edge.board.name,
            "needs_bytes": edge.needs_bytes,
            "usable_bytes": edge.board.usable_bytes,
            "seconds": edge.seconds,
            "problem": edge.problem,
        },
        "placements": [_placement(question, each) for each in decision.found],
        "refused": list(decision.refused),
        "notes": list(decision.notes),
    }


def _placement(question: Question, found: Found) -> dict[str, Any]:
    assert question.servers is not None
    placement, names = found.placement, [layer.name for layer in question.model.layers]
    held = [
        [found.ends[stage] for stage in placement.stages_of(r)] for r in range(len(found.bytes))
    ]
    return {
        "placement": str(placement),
        "ranks": placement.ranks,
        "seconds": found.seconds,
        "bytes": list(found.bytes),
        "usable_bytes": list(found.usable_bytes),
        "layers": [
            ", ".join(names[i] if j == i + 1 else f"{names[i]} … {names[j - 1]}" for i, j in each)
            for each in held
        ],
        "servers": [question.servers.servers[each].name for each in found.servers],
    }
