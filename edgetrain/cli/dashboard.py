"""`edgetrain dashboard`: runs in a browser, from their folders."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from edgetrain.cli import common

ANSWER_S = 10.0
"""Seconds that a hub has for its answer."""

HELP = "runs in a browser, live: the fleet, curves, the last rounds, news"
ABOUT = "Show runs in a browser, live. It reads run folders and asks no process."
EXAMPLES = """\
examples:
  edgetrain dashboard                               the runs in runs/
  edgetrain dashboard runs/20260131-142501-digits   one run
  edgetrain dashboard --bind 127.0.0.1:0            any free port
  edgetrain dashboard --bind lab:8750 --tls cert.pem key.pem
  edgetrain dashboard --control                     with buttons, as `edgetrain control` has words

Open the address that it prints: the part behind # lets you in. It reads run folders and asks no
process; with --control it also tells the hub of a run what you click, as `edgetrain control` does,
if that runs on this machine and is yours. From another machine: ssh -L 8750:127.0.0.1:8750 lab.
Ctrl-C ends it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(common.RUNS), metavar="RUNS",
        help="folder of run folders, or one run folder (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--bind", default="127.0.0.1:8750", metavar="HOST:PORT",
        help="where to listen; port 0: any free one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tls", nargs=2, type=Path, metavar=("CERT", "KEY"),
        help="a certificate and its key, for a HOST that other machines reach",
    )  # fmt: skip
    parser.add_argument(
        "--insecure", action="store_true", help="let other machines come without --tls"
    )
    parser.add_argument(
        "--name", action="append", default=[], metavar="HOST[:PORT]",
        help="a name under which a proxy shows it, as browsers have it; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--token", type=Path, metavar="FILE",
        help="a file with the token that only its owner can read (default: a new token)",
    )  # fmt: skip
    parser.add_argument(
        "--control", action="store_true",
        help="let the page pause a job, resume it, end it, and remove members",
    )  # fmt: skip
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from edgetrain.runs.dashboard.serve import ListensAt, serve

    tell = None
    if arguments.control:
        from edgetrain.training.orders import give_order

        tell = functools.partial(give_order, patience_s=ANSWER_S)
    place = ListensAt(
        arguments.bind,
        tuple(arguments.tls) if arguments.tls else None,
        arguments.insecure,
        arguments.token,
        tuple(arguments.name),
    )
    serve(
        arguments.folder,
        place,
        lambda address: common.say(f"dashboard: {address}"),
        until_stdin_ends=arguments.until_stdin_ends,
        tell=tell,
    )
    return 0
