"""`edgetrain hubs`: the hubs of a job that is training, and which ranges each has."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgetrain.cli import common
from edgetrain.errors import ConfigError
from edgetrain.exchange.addresses import split_address

HELP = "list the hubs that share a job's vector; add one or remove one while it trains"
ABOUT = (
    "The hubs of a job that is training, which ranges of the vector each has, and adding or\n"
    "removing one."
)
EXAMPLES = """\
examples:
  edgetrain hubs runs/20260101-120000-hub                       list them
  edgetrain hubs add runs/20260101-120000-hub tcp://c:5555      let another one help
  edgetrain hubs remove runs/20260101-120000-hub tcp://c:5555   let it go

RUN is the run folder of the lead, on its machine, while it runs. The hub that is added was started
with `edgetrain hub job.toml --spare`. Half of the ranges of the hub that has most move to it,
between two rounds; those of a hub that is removed move to the one before it. The command ends when
they have moved. No bit of the training changes.

exit status: 0 done; 2 it cannot be: the line says why.
"""

_VERBS = ("add", "remove")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="+", metavar="RUN | add RUN ADDRESS | remove RUN ADDRESS",
        help="the lead's run folder; and the address of a hub, tcp://HOST:PORT",
    )  # fmt: skip
    common.add_json(parser, "print the hubs as JSON")


def run(arguments: argparse.Namespace) -> int:
    order, folder = _read(arguments.words)
    from edgetrain.training.orders import give_order

    answer = give_order(folder, order)
    rows = answer["hubs"]
    lines = [f"{'ranges':>12}  {'bytes':>14}  hub"]
    lines += [
        f"{row['first']:>5} to {row['end']:>3}  {row['bytes']:>14,}  {row['address'] or 'the lead'}"
        for row in rows
    ]
    if "round" in answer:
        lines.append(f"from round {answer['round']} on")
    return common.answer(arguments, answer, "\n".join(lines))


def _read(words: list[str]) -> tuple[list[str], Path]:
    match words:
        case ["add" | "remove" as verb, run, address]:
            split_address(address)
            return ["hubs", verb, address], _folder(run)
        case [run] if run not in _VERBS:
            return ["hubs"], _folder(run)
    raise ConfigError(
        f"edgetrain hubs {' '.join(words)}",
        "say `hubs RUN`, `hubs add RUN ADDRESS` or `hubs remove RUN ADDRESS`",
    )


def _folder(run: str) -> Path:
    folder = Path(run)
    if not folder.is_dir():
        raise ConfigError(f"{run} is no run folder", "name the lead's, on its machine")
    return folder
