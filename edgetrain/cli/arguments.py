"""An argparse parser whose errors are one line, with the nearest word that exists."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

from edgetrain.errors import did_you_mean

MOVED = {
    "bench": "it is `python benchmarks/codecs_speed.py` in the repository now",
    "chaos": "it is `make chaos` in the repository now",
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
            return MOVED.get(choice[1]) or did_you_mean(
                choice[1], re.findall(r"[^\s',]+", choice[2])
            )
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
