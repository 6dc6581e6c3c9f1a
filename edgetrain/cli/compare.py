"""`edgetrain compare`: run one job under several strategies; print a table, draw a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgetrain.cli import common, pictures, running
from edgetrain.errors import ConfigError
from edgetrain.jobs.defaults import DEMO
from edgetrain.jobs.reading import load

HELP = "DGA against synchronous SGD (and others) on the same job: a table and a picture"
ABOUT = "Run the same job under several strategies, one after the other, and compare them."
EXAMPLES = """\
examples:
  edgetrain compare                                    digits, 8 members, a 200 ms WAN
  edgetrain compare network=wan-500ms pace_s=0.05
  edgetrain compare job.toml --strategies sync-sgd,dga
  edgetrain compare --simulate --strategies 'dga,fedprox(0.01),diloco,fedavg | adam(0.1)'
  edgetrain compare task=edgetrain.tasks:char_lm steps=300
  edgetrain compare --simulate                         the same in seconds, in virtual time
  edgetrain compare job.toml --topologies star,direct

The first strategy is the yardstick. `local_steps`, `delay` and `outer` of the job apply to the
strategies that have them, and say none of their own. Leaves runs/<time>-compare-<task>/ with
one run folder per strategy and compare.png.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    parser.add_argument(
        "--simulate", action="store_true", help="in virtual time, as `edgetrain simulate` does"
    )
    running.add_vmap(parser)
    parser.add_argument(
        "--topologies", metavar="NAMES",
        help="comma-separated, as star,gateways: the job's own strategy with each of them, instead",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", default="sync-sgd,fedavg,dga",
        help="comma-separated, with arguments, and an outer rule behind a bar; see `edgetrain "
        "strategies` (default: %(default)s)",
    )  # fmt: skip
    common.add_output(parser)
    running.add_verbose(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run all, compare. After Ctrl-C compare the runs so far; the interrupt is raised again."""
    job, beside = common.job_of(arguments, DEMO)
    from edgetrain.jobs.grid import in_topologies, variants
    from edgetrain.strategies.spelling import split_list

    if arguments.topologies:
        jobs = in_topologies(job, split_list(arguments.topologies))
    else:
        _refuse_strategy(arguments.job)
        jobs = variants(job, split_list(arguments.strategies))
    found = running.check_before_torch(arguments, jobs)
    from edgetrain.api import run_several
    from edgetrain.jobs.plan import with_task
    from edgetrain.training import emulated

    run_planned = running.runner(arguments)
    if not arguments.simulate:
        emulated.warm_up()
    else:
        found = [running.with_host_pace(arguments, each, beside) for each in found]
    planned = [with_task(each, beside) for each in found]
    first = planned[0]
    if arguments.topologies:
        fleets = [each.job.fleet for each in planned]
        names = ["gateways" if fleet.gateways else fleet.topology for fleet in fleets]
    else:
        names = [each.job.strategy.name for each in planned]
    heading = (
        f"{first.name}: {job.fleet.members} members, network {job.fleet.network}, "
        f"{job.train.steps} steps each: {', '.join(names)}"
    )
    running.say_choices(arguments, planned)
    running.say_start(arguments, first.job.fleet.members)
    view = running.view(arguments, heading, first.metric)
    leave = partial(_report, arguments)
    return run_several(job, planned, names, arguments.runs, run_planned, view, leave)


def _refuse_strategy(words: Sequence[str]) -> None:
    """ConfigError for strategy=NAME, which --strategies would overrule."""
    from edgetrain.jobs.plan import check_names

    for word in words:
        key, _, name = word.partition("=")
        if key.strip() in ("strategy", "strategy.name"):
            check_names(load(None, [word]))
            raise ConfigError(
                f"compare runs the strategies of --strategies, and '{word}' would change nothing",
                f"--strategies sync-sgd,{name.strip()}",
            )


def _report(
    arguments: argparse.Namespace,
    folder: Path,
    folders: Sequence[Path],
    summaries: Sequence[dict[str, Any]],
) -> int:
    """Say, draw and save what the runs came to. 1: a run is incomplete, or the folder not whole."""
    from edgetrain.runs.folder import write_summary
    from edgetrain.runs.reports import comparison
    from edgetrain.runs.reports.comparison_table import text
    from edgetrain.runs.reports.message import message
    from edgetrain.runs.reports.plot import draw_comparison

    labels = [each.name for each in folders] if arguments.topologies else []
    compared = comparison.compare(summaries, labels[: len(summaries)])
    if labels:
        compared = replace(compared, of="topology")
    found: dict[str, Any] = {"name": folder.name, "runs": [each.name for each in folders]}
    if summaries:
        found["comparison"] = compared.as_json()
        if not arguments.json:
            common.say(f"{text(compared)}result: {message(compared)}\n")
    whole = running.saved(lambda: write_summary(folder, found))
    status = max(running.status_of(summaries), int(not whole))
    if not summaries:
        return status
    drawn = folders[: len(summaries)]
    picture = pictures.picture(folder / "compare.png", draw_comparison, drawn)
    pictures.say_end(arguments, compared.as_json(picture), [picture], folder)
    return status
