"""Parsers of argparse: verbs, and errors of one line with the nearest word that exists."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from edgetrain.errors import did_you_mean

MOVED = {
    "bench": "it is `python benchmarks/codecs_speed.py` in the repository now",
    "chaos": "it is `make chaos` in the repository now",
    "hubs": "it is `edgetrain tell RUN hubs | add-hub ADDRESS | remove-hub ADDRESS` now",
    "networks lab": "it is `python benchmarks/lab.py` in the repository now",
    **dict.fromkeys(
        ("devices run", "devices logs", "devices reboot"),
        "Ansible does it: `edgetrain devices inventory --help` has the line",
    ),
}
"""Verbs of earlier versions, and where they went."""


class Parser(argparse.ArgumentParser):
    """As argparse's; parsers of its verbs are of this class, too."""

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line: what is wrong, the nearest choice, where help is."""
        hint = self.hint_for(message)
        found = re.sub(r" \(choose from .*\)", "", message) if hint else message
        told = f"{found}; {hint}" if hint else found
        print(f"{self.prog}: error: {told} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(2)

    def hint_for(self, message: str) -> str:
        """What to write in place of a verb, choice or flag that does not exist; "": not known."""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            verb = f"{self.prog} {choice[1]}".partition(" ")[2]
            return MOVED.get(verb) or did_you_mean(choice[1], re.findall(r"[^\s',]+", choice[2]))
        if unknown := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
            return did_you_mean(unknown[1], sorted(flags_of(self)))
        return ""


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {
        flag for action in parser._actions for flag in action.option_strings if flag[:2] == "--"
    }


def chosen(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> argparse.ArgumentParser:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            name = getattr(arguments, action.dest, None)
            if name in action.choices:
                return chosen(action.choices[name], arguments)
    return parser


AddVerb = Callable[..., argparse.ArgumentParser]
"""`add_verb` for the verbs of one parser."""


def add_verb(
    verbs: Any,
    name: str,
    run: Callable[[argparse.Namespace], int] | None,
    help: str,
    epilog: str = "",
    about: str | None = None,
) -> argparse.ArgumentParser:
    """Add the parser of a verb, whose texts keep their line breaks. `run` None: see `add_verbs`."""
    made: argparse.ArgumentParser = verbs.add_parser(
        name, help=help, description=about, epilog=epilog or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.set_defaults(run=run)
    return made


def add_verbs(parser: argparse.ArgumentParser) -> AddVerb:
    """Let a verb have verbs of its own, which the result adds. Without one, an error names them
    all."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    def run(_: argparse.Namespace) -> NoReturn:
        parser.error(f"VERB is missing; choose from {', '.join(verbs.choices)}")

    parser.set_defaults(run=run)
    return functools.partial(add_verb, verbs)
