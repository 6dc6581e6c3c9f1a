"""The parser of the whole command line: all verbs and their arguments."""

from __future__ import annotations

import argparse

from edgetrain import __version__
from edgetrain.cli.arguments import Parser

_EPILOG = """\
start here:
  edgetrain compare            DGA against synchronous SGD, 8 members, a 200 ms WAN, two minutes
  edgetrain init job.toml      a job file with every key explained
  edgetrain VERB --help        each verb's arguments, with examples
"""


def parser() -> argparse.ArgumentParser:
    """A parser that knows all verbs."""
    from edgetrain.cli import (
        bench,
        bundle,
        calibrate,
        capacity,
        chaos,
        codecs,
        compare,
        completion,
        devices,
        doctor,
        hub,
        init,
        keys,
        member,
        networks,
        plan,
        privacy,
        rank,
        report,
        run,
        runs,
        strategies,
        sweep,
        watch,
    )

    top = Parser(
        prog="edgetrain",
        description="Train one PyTorch model on many small machines over slow, unreliable links.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"edgetrain {__version__}")
    top.add_argument("--debug", action="store_true", help="show where an error came from")
    verbs = top.add_subparsers(dest="command", required=True, metavar="VERB")
    for module in (
        *(compare, run, watch, runs, report, init, hub, member, keys, bundle, privacy),
        *(strategies, codecs, devices, networks, sweep, capacity, plan, rank, calibrate, chaos),
        *(doctor, bench, completion),
    ):
        module.add_parser(verbs)
    for name, verb in verbs.choices.items():
        _hand_examples_down(name, verb)
    verbs.choices["completion"].set_defaults(top=top)
    return top


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
