"""`edgetrain control`: pause a job that trains, resume it, end it; change its members and hubs."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgetrain.cli import common
from edgetrain.errors import ConfigError
from edgetrain.exchange.addresses import split_address

HELP = "pause a job that trains, resume it, end it; remove a member, add or remove a hub"
ABOUT = "Control a job that trains, through its hub."
EXAMPLES = """\
examples:
  edgetrain control runs/20260101-120000-hub pause        no round closes, members wait
  edgetrain control runs/20260101-120000-hub resume
  edgetrain control runs/20260101-120000-hub remove m3    refuse a member; what it gave counts
  edgetrain control runs/20260101-120000-hub stop         end the job: members keep what it came to
  edgetrain control runs/20260101-120000-hub hubs         the hubs, and which ranges each has
  edgetrain control runs/20260101-120000-hub add-hub tcp://c:5555      let another one help
  edgetrain control runs/20260101-120000-hub remove-hub tcp://c:5555   let it go

RUN is the run folder of the hub (of several, the lead's), on its machine, while it runs; only its
owner may control it. All of it is in the journal: a hub that dies and is resumed obeys the same. A
paused job gives the bits of one that was not paused. To pause and end the hub's process, use Ctrl-C
and `edgetrain hub --resume`. A removed member may join again: `edgetrain keys revoke` keeps it out.

A hub that is added was started with `edgetrain hub job.toml --spare`. Half of the ranges of the hub
that has most move to it, between two rounds; those of a hub that is removed move to the one before
it. The command ends when they have moved. No bit of the training changes.

exit status: 0 done; 2 it cannot be: the line says why.
"""

_SAID = {
    "pause": "paused: no round closes until `edgetrain control RUN resume`",
    "resume": "resumed",
    "stop": "ends: members are told that the job is over",
}
_ORDERS = {"hubs": ["hubs"], "add-hub": ["hubs", "add"], "remove-hub": ["hubs", "remove"]}
_ALONE = (*_SAID, "hubs")
_WORDS = (*_ALONE, "remove", "add-hub", "remove-hub")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="the hub's run folder")
    parser.add_argument("what", choices=_WORDS, metavar="WHAT", help=", ".join(_WORDS))
    parser.add_argument(
        "which", nargs="?", metavar="WHICH",
        help="of remove: the member's name; of add-hub and remove-hub: tcp://HOST:PORT",
    )  # fmt: skip
    common.add_json(parser, "print what the hub answers as JSON")


def run(arguments: argparse.Namespace) -> int:
    what, which = arguments.what, arguments.which
    if (what in _ALONE) is not (which is None):
        raise ConfigError(
            f"control RUN {what}" + ("" if which is None else f" {which}"),
            "say `control RUN remove MEMBER`, `add-hub ADDRESS` or `remove-hub ADDRESS`; "
            f"{', '.join(_ALONE)} stand alone",
        )
    if what in ("add-hub", "remove-hub"):
        split_address(which)
    from edgetrain.training.orders import give_order

    order = [*_ORDERS.get(what, [what]), *([] if which is None else [which])]
    answer = give_order(arguments.folder, order)
    if what not in _ORDERS:
        said = _SAID.get(what, f"{which} is removed")
        said += f" (round {answer['round']}, {len(answer['members'])} members are in)"
        return common.answer(arguments, answer, said)
    lines = [f"{'ranges':>12}  {'bytes':>14}  hub"]
    for row in answer["hubs"]:
        span, where = f"{row['first']:>5} to {row['end']:>3}", row["address"] or "the lead"
        lines.append(f"{span}  {row['bytes']:>14,}  {where}")
    if "round" in answer:
        lines.append(f"from round {answer['round']} on")
    return common.answer(arguments, answer, "\n".join(lines))
