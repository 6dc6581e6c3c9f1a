"""`edgetrain topology`: who should add up a job's contributions, from sizes and links alone."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from edgetrain.cli import common, pictures
from edgetrain.cli.capacity import add_model, add_ports, asked, heading_of
from edgetrain.jobs.defaults import SIMULATED

HELP = "say who should add up a job's contributions: a hub, several, or the members"
ABOUT = "Work out how long one averaging takes with each topology, and which the job may have."
EXAMPLES = """\
examples:
  edgetrain topology job.toml
  edgetrain topology --parameters 11e6 --step-seconds 0.4 members=8 network=wan-200ms
  edgetrain topology job.toml codec=int8 network=ethernet --picture topologies.png
  edgetrain topology job.toml --json

Nothing is trained. Each line is one topology: the seconds from the last contribution to the last
reply with TCP's windows open, from idle (slow start), and in the rhythm of this job, whose steps
are pauses; then the steps a second of each member, and the bytes of all members in a round, between
sites (WAN) and within them (LAN). Where a delay hides the averaging the steps a second say so.
Topologies with a star are refused in this job; why stands below the table. The last line is what
fleet.topology = "auto" takes. docs/explanation/topologies.md says when to use which.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    add_model(parser)
    add_ports(parser)
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the seconds of each topology"
    )
    common.add_json(parser, "print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    job, beside = common.job_of(arguments, SIMULATED)
    from edgetrain.jobs import topology
    from edgetrain.jobs.plan import check
    from edgetrain.runs.reports.plot import draw_topologies
    from edgetrain.runs.reports.tables import topology_text

    question, named = asked(arguments, check(job), beside)
    rows = topology.table(question, named)
    choice = topology.choose(rows, named.job.fleet.topology_trust).why
    heading, plain = heading_of(named.job, question), [dataclasses.asdict(row) for row in rows]
    answer = {"heading": heading, "table": plain, "auto": choice}
    common.answer(arguments, answer, topology_text(heading, plain, choice))
    if arguments.picture:
        picture = pictures.picture(arguments.picture, draw_topologies, plain, heading, choice)
        if not arguments.json:
            pictures.say_pictures([picture])
    return 0
