"""The command: `edgetrain VERB …`, also `python -m edgetrain`.

Errors raised on purpose become one clear line and exit status 2; Ctrl-C is 130, SIGTERM
143. Only this module turns an exception into an exit status.
"""

from __future__ import annotations

import argparse
import signal
import sys

from edgetrain import __version__
from edgetrain.errors import EdgetrainError, Stopped

_EPILOG = """\
start here:
  edgetrain compare            DGA against synchronous SGD, 8 members, a 200 ms WAN, two minutes
  edgetrain init job.toml      a job file with every key explained
  edgetrain VERB --help        each verb's arguments, with examples
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    from edgetrain.cli import (
        bench,
        bundle,
        calibrate,
        capacity,
        chaos,
        compare,
        devices,
        doctor,
        hub,
        init,
        keys,
        member,
        privacy,
        run,
        strategies,
        sweep,
    )
    from edgetrain.cli import networks as commands

    top = argparse.ArgumentParser(
        prog="edgetrain",
        description="Train one PyTorch model on many small machines over slow, unreliable links.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"edgetrain {__version__}")
    top.add_argument("--debug", action="store_true", help="show where an error came from")
    verbs = top.add_subparsers(dest="command", required=True, metavar="VERB")
    for module in (compare, run, init, hub, member, keys, bundle, privacy, strategies, devices):
        module.add_parser(verbs)
    commands.add_parser(verbs)
    for module in (sweep, capacity, calibrate, chaos, doctor, bench):
        module.add_parser(verbs)
    return top


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """argparse takes KEY=VALUE words only in one place; people write them anywhere."""
    top = parser()
    arguments, more = top.parse_known_args(argv)
    if more and hasattr(arguments, "job") and all("=" in w and w[0] != "-" for w in more):
        arguments.job += more
    elif more:
        top.error(f"unrecognized arguments: {' '.join(more)}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = _parse(argv)
    try:
        if arguments.command == "networks":
            from edgetrain.cli import networks as commands

            return commands.run(arguments)
        status: int = arguments.run(arguments)
        return status
    except EdgetrainError as error:
        if arguments.debug:
            raise
        print(f"edgetrain: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        name = signal.Signals(stopped.signum).name
        print(f"edgetrain: stopped, as asked ({name})", file=sys.stderr)
        return 128 + stopped.signum
    except KeyboardInterrupt:
        print("edgetrain: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
