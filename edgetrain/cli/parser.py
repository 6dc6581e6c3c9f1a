"""The parser of the whole command line: all verbs and their arguments, and errors of one line with
the nearest word that exists."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from edgetrain import __version__

_EPILOG = """\
start here:
  edgetrain compare            DGA against synchronous SGD, 8 members, a 200 ms WAN, two minutes
  edgetrain init job.toml      a job file with every key explained
  edgetrain VERB --help        each verb's arguments, with examples
"""


VERBS = (
    "compare", "run", "simulate", "watch", "dashboard", "runs", "report", "track", "export",
    "init", "hub", "control", "gateway", "member", "keys", "bundle", "privacy", "strategies",
    "codecs", "devices", "networks", "data", "sweep", "capacity", "topology", "plan", "rank",
    "doctor", "completion",
)  # fmt: skip
"""All verbs, in the order of --help. Each is a module with HELP, ABOUT, EXAMPLES and
`add_arguments`; also `run`, if it has no verbs of its own."""


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """A parser of all verbs, or of `only` one: importing all takes a tenth of a second."""
    top = Parser(
        prog="edgetrain",
        description="Train one PyTorch model on many small machines over slow, unreliable links.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"edgetrain {__version__}")
    top.add_argument("--debug", action="store_true", help="show where an error came from")
    verbs = top.add_subparsers(dest="command", required=True, metavar="VERB")
    for name in VERBS if only is None else (only,):
        verb = import_module(f"edgetrain.cli.{name}")
        run = getattr(verb, "run", None)
        verb.add_arguments(add_verb(verbs, name, run, verb.HELP, verb.EXAMPLES, verb.ABOUT))
    for name, made in verbs.choices.items():
        # Let each verb of a verb that has no examples of its own show those of the verb above it
        lines = (made.epilog or "").splitlines()
        for action in made._actions:
            if not isinstance(action, argparse._SubParsersAction):
                continue
            for inner, each in action.choices.items():
                own = [
                    line for line in lines if f"{line} ".startswith(f"  edgetrain {name} {inner} ")
                ]
                if own and not each.epilog:
                    each.epilog = "\n".join(["examples:" if own[1:] else "example:", *own]) + "\n"
                    each.formatter_class = argparse.RawDescriptionHelpFormatter
    return top


def parser_for(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these words: of their verb alone, where they begin with one."""
    return parser(argv[0] if argv and argv[0] in VERBS else None)


# -- parsers of argparse --------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """As argparse's; parsers of its verbs are of this class, too."""

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line: what is wrong, the nearest choice, where help is."""
        from edgetrain.cli.hints import hint_for

        hint = hint_for(self, message)
        found = re.sub(r" \(choose from .*\)", "", message) if hint else message
        told = f"{found}; {hint}" if hint else found
        print(f"{self.prog}: error: {told} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(2)


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
