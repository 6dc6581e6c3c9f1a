"""`edgetrain chaos`: seeded schedules of what goes wrong, and a verdict against the laws."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError, did_you_mean

_BASIS = (
    "members=4", "pace_s=0.1", "network=wan-50ms", "steps=200", "batch=2", "strategy=dga",
    "delay=5", "optimizer={ name = 'sgd', lr = 0.05 }", "evaluate_every=1000000", "fsync=never",
)  # fmt: skip

_EXAMPLES = """\
examples:
  edgetrain chaos                                100 schedules over a simulated fleet
  edgetrain chaos --schedules 1000 --happenings 8
  edgetrain chaos --seed 417 --schedules 1       one schedule again, as a verdict names it
  edgetrain chaos job.toml --kinds hub,power

what goes wrong (--kinds):
  hub            the hub is killed, and started again from its journal
  disk           the disk of the journal is full for a while (hub.when_full says what then)
  kill, power    a member's process is killed; its device loses power; it starts anew
  pause, clock   a member's process stands still; a clock jumps ahead
  link, slow     a member's link is down; or has a twentieth of its rate
  partition      several members' links are down at once
  cut            a member's connection breaks, with what was under way
  corrupt-up, corrupt-down
                 a message arrives damaged at the hub, at a member (connections are encrypted: it is
                 noticed, and the connection broken off)

The laws: every contribution counts once, nothing that was answered is lost, the model is what the
same contributions give without any fault, and all replicas end equal, bit for bit.
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "chaos",
        "let things go wrong in a simulated fleet, and check that nothing is lost",
        "Run a job in virtual time through seeded schedules of faults; judge each by the laws.",
        _EXAMPLES,
    )
    common.add_job(parser)
    parser.add_argument("--schedules", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (default: 0)")
    parser.add_argument(
        "--happenings", type=int, default=5, help="things that go wrong in each (default: 5)"
    )
    parser.add_argument("--kinds", default="", help="only these, by ',' (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan once, run every schedule, say which laws broke. 1 where one did."""
    job, beside = common.job_of(arguments, _BASIS)
    common.simulator()
    from edgetrain import chaos, plans, trial

    kinds = tuple(kind.strip() for kind in arguments.kinds.split(",") if kind.strip())
    for kind in kinds:
        if kind not in chaos.KINDS:
            raise ConfigError(f"no kind of chaos '{kind}'", did_you_mean(kind, chaos.KINDS))
    if arguments.schedules < 1 or arguments.happenings < 0:
        raise ConfigError("--schedules starts at 1, --happenings at 0")
    planned = plans.plan(job, beside)
    trial.merge_rule(planned.job)
    calm_s = trial.calm_seconds(planned)
    members = planned.job.fleet.members
    out = sys.stderr if arguments.json else sys.stdout
    began, said = time.monotonic(), 0.0
    outcomes = []
    for number in range(arguments.schedules):
        seed = arguments.seed + number
        drawn = chaos.draw(seed, members, calm_s, arguments.happenings, kinds or chaos.KINDS)
        outcome = trial.run(planned, seed, drawn, calm_s)
        outcomes.append(outcome)
        if outcome.broken:
            print(_told(outcome), file=out, flush=True)
        spent = time.monotonic() - began
        if spent - said > 2.0:
            said = spent
            left = spent / (number + 1) * (arguments.schedules - number - 1)
            print(
                f"{number + 1} of {arguments.schedules} schedules, "
                f"{sum(bool(o.broken) for o in outcomes)} broke a law, {left:.0f} s left",
                file=out,
                flush=True,
            )
    if arguments.json:
        common.say(json.dumps(_as_json(outcomes)))
    else:
        common.say(_verdict(outcomes))
    return 1 if any(outcome.broken for outcome in outcomes) else 0


def _as_json(outcomes: list[Any]) -> dict[str, Any]:
    return {
        "schedules": len(outcomes),
        "happenings": sum(len(outcome.happenings) for outcome in outcomes),
        "rounds": sum(outcome.rounds for outcome in outcomes),
        "virtual_seconds": sum(outcome.seconds for outcome in outcomes),
        "broken": [
            {
                "seed": outcome.seed,
                "laws": outcome.broken,
                "happenings": list(map(str, outcome.happenings)),
            }
            for outcome in outcomes
            if outcome.broken
        ],
    }


def _verdict(outcomes: list[Any]) -> str:
    happened = sum(len(outcome.happenings) for outcome in outcomes)
    hours = sum(outcome.seconds for outcome in outcomes) / 3600
    broken = sum(bool(outcome.broken) for outcome in outcomes)
    return (
        f"{len(outcomes)} schedules, {happened} things went wrong in {hours:.1f} virtual hours: "
        + (f"{broken} broke a law" if broken else "every law held")
    )


def _told(outcome: Any) -> str:
    lines = [f"seed {outcome.seed}:", *(f"  {happening}" for happening in outcome.happenings)]
    return "\n".join([*lines, *(f"  BROKEN: {law}" for law in outcome.broken[:8])])
