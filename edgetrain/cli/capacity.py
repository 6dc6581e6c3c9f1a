"""`edgetrain capacity`: estimate a fleet of any size from sizes and times, without training."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common, pictures, running
from edgetrain.jobs.capacity.question import Options, question_of
from edgetrain.jobs.defaults import SIMULATED
from edgetrain.jobs.job import Job

if TYPE_CHECKING:
    from edgetrain.jobs.capacity.estimate import Answer, CapacityQuestion
    from edgetrain.jobs.resolved import Resolved

HELP = "plan a fleet of up to 100,000 members without training: time, bytes, the bottleneck"
ABOUT = "Work out how fast a fleet would be, what waits for what, and how it grows."
EXAMPLES = """\
examples:
  edgetrain capacity --members 1000                      the digits task on Raspberry Pis
  edgetrain capacity job.toml codec=int8 delay=40
  edgetrain capacity --parameters 11e6 --step-seconds 0.4 network=4g-good --hub-rate 10000
  edgetrain capacity --members 100000 --rounds 100 --gateways 100 --shards 4 --hub-rate 1000 \\
    --parameters 11e6 --step-seconds 0.4 network=wifi --uplink home-fixed

Nothing is trained: rounds are worked out for all members at once, from the device's step time, the
vector's bytes, the links and the hub. Read the bottleneck first. If it is
  computing            the fleet is as fast as it can be: more or faster members
  the round trip       a longer delay (strategy=dga, delay=auto) hides it
  members' uplinks     fewer bytes: codec=int8, codec="topk(0.01) | q2", or more `local_steps`
  hub's port           --shards 4 (each hub has a part of the vector), --gateways, fewer bytes
  hub's processor      --gateways; hub.message_s says what a message costs it
  slow members         hub.deadline_s and hub.quorum close a round without them

With --gateways N a gateway in each of N sites merges for its members and is one member to the hub;
`network` is then the way to the gateway and --uplink the way on. With --sites N there is no
gateway: the members of a site share its uplink. A codec counts with the most bytes it may take,
unless you say --ratio from a run of your own. What is approximated: docs/explanation/simulation.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    add = parser.add_argument
    add("--members", type=count, metavar="N", help="members (default: the job's)")
    add("--rounds", type=count, default=100, metavar="N", help="rounds (default: %(default)s)")
    add_model(parser)
    add("--gateways", type=int, default=0, metavar="N", help="sites that merge for their members")
    add("--sites", type=int, default=0, metavar="N", help="sites whose members share an uplink")
    add("--uplink", metavar="NETWORK", help="from a site or gateway to the hub (default: network)")
    add("--shards", type=int, default=1, metavar="N", help="hubs with a part of the vector each")
    add_ports(parser)
    add("--merge-rate", type=float, default=2.0, metavar="GB",
        help="float32 a hub merges in a second; 0: no limit (default: %(default)g)")  # fmt: skip
    add("--ratio", type=float, default=0.0, metavar="X",
        help="a contribution is so many times smaller than float32, as you measured")  # fmt: skip
    add("--reply-ratio", type=float, default=0.0, metavar="X", help="the same of replies")
    common.add_output(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parameters", type=count, metavar="N", help="of the model (default: the task's)")
    add("--step-seconds", dest="step_s", type=float, metavar="S",
        help="of a step (default: pace_s, or measured from the task for the device)")  # fmt: skip


def add_ports(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hub-rate", dest="hub_rate_mbit", type=float, default=1000.0, metavar="MBIT",
        help="a hub's port, each way; 0: no limit (default: %(default)g)")  # fmt: skip
    add("--gateway-rate", dest="gateway_rate_mbit", type=float, default=1000.0, metavar="MBIT",
        help="a gateway's port to its site (default: %(default)g)")  # fmt: skip


def asked(
    arguments: argparse.Namespace, found: Resolved, beside: Path
) -> tuple[CapacityQuestion, Resolved]:
    """What the arguments ask of a job; and the job, with a pace if one had to be measured."""
    names = (each.name for each in dataclasses.fields(Options) if hasattr(arguments, each.name))
    options = Options(**{name: getattr(arguments, name) for name in names})
    if hasattr(arguments, "merge_rate"):
        options = dataclasses.replace(options, merge_bytes_per_s=arguments.merge_rate * 1e9)
    if options.measures(found.job):
        running.say_loading(arguments)
    if not options.step_s:
        found = running.with_host_pace(arguments, found, beside)
    return question_of(found, options, beside), found


def run(arguments: argparse.Namespace) -> int:
    job, beside = common.job_of(arguments, SIMULATED)
    from edgetrain.jobs.plan import check_names
    from edgetrain.jobs.rules import check

    named = check_names(job)
    check(named)
    from edgetrain.jobs.capacity import estimate
    from edgetrain.runs.folder import create, write_job

    question, named = asked(arguments, named, beside)
    job = named.job
    found = estimate.answer(question)
    folder = create(arguments.runs, f"capacity-{job.name or job.task.rpartition(':')[2]}")
    write_job(folder, job.to_dict())
    heading = heading_of(job, question)
    table: list[Answer] = []
    try:
        for each in estimate.COUNTS:
            same = each == question.members
            table.append(found if same else estimate.answers(question, [each])[0])
    except KeyboardInterrupt:
        _report(arguments, heading, found, table, folder)
        raise
    return int(not _report(arguments, heading, found, table, folder))


def _report(
    arguments: argparse.Namespace,
    heading: str,
    found: Answer,
    table: list[Answer],
    folder: Path,
) -> bool:
    """Say and draw the answer, and leave it in `folder`. Returns whether the folder is whole."""
    from edgetrain.runs.folder import write_summary
    from edgetrain.runs.reports.plot import draw_capacity
    from edgetrain.runs.reports.tables import capacity_text

    row, rows = _plain(found), [_plain(each) for each in table]
    if not arguments.json:
        common.say(capacity_text(heading, row, rows))
    picture = pictures.picture(folder / "capacity.png", draw_capacity, rows, heading)
    answer = row | {
        "heading": heading,
        "round_seconds": list(found.round_seconds),
        "table": rows,
        "picture": None if picture is None else str(picture),
        "folder": str(folder),
    }
    pictures.say_end(arguments, answer, [picture], folder)
    return running.saved(lambda: write_summary(folder, answer))


def count(text: str) -> int:
    """A whole number from 1; people write numbers of parameters as 11e6."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value == int(value) and value >= 1):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1")
    return int(value)


def heading_of(job: Job, question: CapacityQuestion) -> str:
    """The fleet and what it exchanges, in one line."""
    from edgetrain.codecs.auto import Auto
    from edgetrain.jobs.capacity.parcels import contribution, reply
    from edgetrain.runs.reports import units

    exchange, hubs = question.exchange, question.hubs
    up = contribution(exchange.elements, exchange.codec, exchange.ratio).bytes
    down = reply(exchange.elements, exchange.reply_codec, exchange.reply_ratio).bytes
    delay = "auto" if exchange.delay.is_measured else exchange.delay.steps
    codec = f", {exchange.codec.chosen.name}" if isinstance(exchange.codec, Auto) else ""
    behind = f", {hubs.gateways} gateways" if hubs.gateways else ""
    behind += f", {hubs.uplinks} shared uplinks" if hubs.uplinks else ""
    behind += f", {hubs.shards} shards" if hubs.shards > 1 else ""
    return (
        f"{question.members:,} members ({job.fleet.device}, "
        f"{units.duration(question.kinds[0].step_s)} a step, {job.fleet.network}){behind}; "
        f"{job.strategy.name}, {exchange.local_steps} local steps, delay {delay}{codec}, "
        f"{units.size(up)} up and {units.size(down)} down a round"
    )


def _plain(answer: Answer) -> dict[str, Any]:
    found = dataclasses.asdict(answer) | {"efficiency": answer.efficiency}
    del found["round_seconds"]
    return found
