"""The command: `edgetrain VERB …`, also `python -m edgetrain`.

Errors raised on purpose become one clear line and exit status 2; Ctrl-C is 130, SIGTERM
143. Only this module turns an exception into an exit status.
"""

from __future__ import annotations

import argparse
import signal
import sys

from edgetrain.cli.parser import parser
from edgetrain.errors import EdgetrainError, Stopped


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
