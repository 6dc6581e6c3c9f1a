"""The parser of the whole command line: all verbs and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from edgetrain import __version__
from edgetrain.cli.arguments import Parser, add_verb

_EPILOG = """\
start here:
  edgetrain compare            DGA against synchronous SGD, 8 members, a 200 ms WAN, two minutes
  edgetrain init job.toml      a job file with every key explained
  edgetrain VERB --help        each verb's arguments, with examples
"""


VERBS = (
    "compare", "run", "watch", "dashboard", "runs", "report", "track", "export", "init", "hub",
    "tell", "gateway", "member", "keys", "bundle", "privacy", "strategies", "codecs",
    "devices", "networks", "sweep", "capacity", "topology", "plan", "rank", "doctor",
    "completion",
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
        _hand_examples_down(name, made)
    if "completion" in verbs.choices:
        verbs.choices["completion"].set_defaults(top=top if only is None else parser())
    return top


def parser_for(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these words: of their verb alone, where they begin with one."""
    return parser(argv[0] if argv and argv[0] in VERBS else None)


def _hand_examples_down(name: str, verb: argparse.ArgumentParser) -> None:
    """Let each verb of a verb that has no examples of its own show those of the verb above it."""
    lines = (verb.epilog or "").splitlines()
    for action in verb._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for inner, each in action.choices.items():
            own = [line for line in lines if f"{line} ".startswith(f"  edgetrain {name} {inner} ")]
            if own and not each.epilog:
                each.epilog = "\n".join(["examples:" if own[1:] else "example:", *own]) + "\n"
                each.formatter_class = argparse.RawDescriptionHelpFormatter
