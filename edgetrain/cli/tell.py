"""`edgetrain tell`: pause a job that trains, let it go on, end it, or remove a member."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgetrain.cli import common
from edgetrain.errors import ConfigError

HELP = "pause a job that trains, let it go on, end it, or remove a member"
ABOUT = "Tell the hub of a job that trains what to do."
EXAMPLES = """\
examples:
  edgetrain tell runs/20260101-120000-hub pause        no round closes, members wait
  edgetrain tell runs/20260101-120000-hub go-on
  edgetrain tell runs/20260101-120000-hub remove m3    refuse a member; what it gave counts
  edgetrain tell runs/20260101-120000-hub stop         end the job: members keep what it came to

RUN is the run folder of the hub (of several, the lead's), on its machine, while it runs; only its
owner may tell it. All of it is in the journal: a hub that dies and is resumed obeys the same. A
paused job gives the bits of one that was not paused. To pause and end the hub's process, use Ctrl-C
and `edgetrain hub --resume`. A removed member may join again: `edgetrain keys revoke` keeps it out.

exit status: 0 done; 2 it cannot be: the line says why.
"""

_WORDS = "pause", "go-on", "stop", "remove"

_SAID = {
    "pause": "paused: no round closes until `edgetrain tell RUN go-on`",
    "go-on": "goes on",
    "stop": "ends: members are told that the job is over",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="the hub's run folder")
    parser.add_argument("what", choices=_WORDS, metavar="WHAT", help=", ".join(_WORDS))
    parser.add_argument("member", nargs="?", metavar="MEMBER", help="of remove: its name")
    common.add_json(parser, "print the job's course, round and members as JSON")


def run(arguments: argparse.Namespace) -> int:
    what, member = arguments.what, arguments.member
    if (what == "remove") is (member is None):
        raise ConfigError(
            f"tell RUN {what}" + ("" if member is None else f" {member}"),
            "say `tell RUN remove MEMBER`; pause, go-on and stop are for all members",
        )
    from edgetrain.training.orders import give_order

    answer = give_order(arguments.folder, [what] if member is None else [what, member])
    said = _SAID.get(what, f"{member} is removed")
    names = answer["members"]
    return common.answer(
        arguments, answer, f"{said} (round {answer['round']}, {len(names)} members are in)"
    )
