"""Shared by the verbs: shared arguments, reading the job, the look of --help, printing."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.runs.reports import units

if TYPE_CHECKING:
    from edgetrain.jobs.job import Job

RUNS = "runs"


def add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", nargs="*", metavar="JOB KEY=VALUE",
        help="job file (default: the built-in digits job), followed by overrides: "
        "steps=200 network=wan-500ms strategy=dga",
    )  # fmt: skip


def job_of(arguments: argparse.Namespace, defaults: tuple[str, ...] = ()) -> tuple[Job, Path]:
    """The job, and the folder of its file or else the current one. Raises ConfigError.
    `defaults` apply if no file is given."""
    path, words = split_job(arguments.job)
    overrides = words if path else [*defaults, *words]
    from edgetrain.jobs.job import AUTO
    from edgetrain.jobs.reading import load
    from edgetrain.jobs.resolved import look_beside

    job, beside = load(path, overrides), Path(path).resolve().parent if path else Path.cwd()
    keys = getattr(arguments, "keys", None)
    look_beside(beside, Path(keys) if keys else None)
    if job.strategy.name.strip() == AUTO:
        from edgetrain.jobs import choosing

        job, why = choosing.named(job)
        warn(why)
    return job, beside


def split_job(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file of a job, wherever it stands among overrides, and those; None: there is none."""
    files = [word for word in words if "=" not in word]
    for word, after in zip(words, [*words, "="][1:], strict=True):
        if word.startswith("=") or (word.endswith("=") and "=" not in after):
            raise ConfigError(f"'{word}' has a blank beside it", "a key reads members=4")
    if len(files) > 1:
        what = f"'{files[1]}' is not an override, and there is one job file at most"
        raise ConfigError(what, "it reads key=value, as steps=200")
    return next(iter(files), None), [word for word in words if "=" in word]


def add_output(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    parser.add_argument(
        "--runs", default=RUNS, type=Path, help="folder of run folders (default: %(default)s)"
    )
    if json:
        add_json(parser, "print one JSON object at the end")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="RUN", help="default: the newest run"
    )


def add_json(parser: argparse.ArgumentParser, help: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=help)


def add_dashboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dashboard", action="store_true",
        help="show it in a browser, too: a process beside this one, at an address that it prints",
    )  # fmt: skip
    parser.add_argument(
        "--control", action="store_true", help="--dashboard with buttons: see `edgetrain control`"
    )


def add_track(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--track", action="append", default=[], type=_tracked, metavar="TRACKER",
        help="hand it to a tracker as it grows: a process beside this one, with the words of "
        "`edgetrain track --to`, as in --track 'wandb --offline'; may be given several times",
    )  # fmt: skip


def _tracked(text: str) -> list[str]:
    from edgetrain.cli.parser import parser

    try:
        words = shlex.split(text) or [""]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    parser("track").parse_args(["track", "RUN", "--to", *words])
    return words


def check_track(arguments: argparse.Namespace) -> None:
    """ConfigError for a tracker of --track that is not known or not installed: before anything
    begins."""
    if tracked := getattr(arguments, "track", []):
        from edgetrain.runs.tracking.trackers import find_tracker

        for words in tracked:
            find_tracker(words[0])


TRACKED_S = 20.0
"""Seconds that a tracker has to take the last lines, behind the end of a run."""


def beside(
    arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[object]:
    """Until the block ends, what --dashboard, --control and --track ask for of this run folder;
    `say` is given their lines by other threads."""
    control, tracked = getattr(arguments, "control", False), getattr(arguments, "track", [])
    shown = control or getattr(arguments, "dashboard", False)
    there = contextlib.ExitStack()
    if shown or tracked:
        from edgetrain.runs import looking

        for words in tracked:
            all_words = ["track", str(folder), "--follow", "--to", *words]
            late = f"{words[0]} was not done {TRACKED_S:g} s after the run, and was killed"
            there.enter_context(looking.beside(all_words, say, TRACKED_S, late))
        if shown:
            all_words = ["dashboard", str(folder), "--bind", "127.0.0.1:0"]
            all_words += ["--control"] if control else []
            there.enter_context(looking.beside(all_words, say))
    return there


def add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keys", metavar="FOLDER",
        help="folder of keys (default: ~/.config/edgetrain); see `edgetrain keys`",
    )  # fmt: skip


TRY_AGAIN = 75
"""Exit status of what may work later, as sysexits.h has it (EX_TEMPFAIL)."""


def try_again(parser: argparse.ArgumentParser) -> None:
    """Let errors that may pass by themselves end this verb with TRY_AGAIN."""
    parser.set_defaults(passing_status=TRY_AGAIN)


def say(text: str) -> None:
    print(units.printable_lines(text), flush=True)


def answer(arguments: argparse.Namespace, values: object, text: str) -> int:
    """Print what was asked for: plain values with --json, else a text. Returns exit status 0."""
    say(json.dumps(values) if arguments.json else text)
    return 0


def tell(arguments: argparse.Namespace, text: str) -> None:
    for_programs = arguments.json or getattr(arguments, "print_commands", False)
    print(text, file=sys.stderr if for_programs else sys.stdout, flush=True)


def warn(text: str) -> None:
    print(units.printable_lines(text), file=sys.stderr, flush=True)
