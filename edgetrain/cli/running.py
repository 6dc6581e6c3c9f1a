"""Shared by the verbs that run or simulate jobs: the runner, the view, what is said before."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.errors import EdgetrainError
from edgetrain.runs.reports import units
from edgetrain.training.simulated import require_simulator

if TYPE_CHECKING:
    from edgetrain.api import View
    from edgetrain.jobs.job import Job
    from edgetrain.jobs.resolved import Resolved


def add_vmap(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vmap", choices=("auto", "on", "off"), default="auto",
        help="simulated members' gradients: many at once (on), one by one with the bits of a real "
        "member (off), or by their number (default: %(default)s)",
    )  # fmt: skip


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true",
        help="routine news, too: members that join, finish, leave or are off, corrections chosen "
        "(the run folder always has them)",
    )  # fmt: skip


def runner(arguments: argparse.Namespace) -> Callable[..., dict[str, Any]]:
    if not arguments.simulate:
        from edgetrain.training import emulated

        return emulated.run
    batched = {"auto": None, "on": True, "off": False}[arguments.vmap]
    return functools.partial(simulator(), batched=batched)


def simulator() -> Callable[..., dict[str, Any]]:
    """The function that simulates a planned job. ConfigError if a library is not installed."""
    require_simulator()
    from edgetrain.training.simulated import simulation

    return simulation.run


def view(arguments: argparse.Namespace, heading: str, metric: str) -> View:
    """Shows runs while they are run: to stdout, or to stderr if stdout is for programs."""
    from edgetrain.runs.reports.live.view import LiveView

    @contextlib.contextmanager
    def show(folders: Sequence[Path]) -> Iterator[Callable[[], None]]:
        live = LiveView(
            folders,
            clock=time.monotonic,
            heading=heading,
            metric=metric,
            out=sys.stderr if arguments.json else sys.stdout,
            simulated=arguments.simulate,
        )
        live.verbose = arguments.verbose
        with common.beside(arguments, folders[0], live.say_above), live:
            yield live.refresh

    return show


def check_before_torch(arguments: argparse.Namespace, jobs: Iterable[Job]) -> list[Resolved]:
    """Look up what jobs name, then say that torch is loading. ConfigError, NetworkError."""
    from edgetrain.jobs.doubts import doubts_of
    from edgetrain.jobs.plan import check
    from edgetrain.jobs.rules import refuse_gateways

    common.check_track(arguments)
    found = [check(job) for job in jobs]
    for each in found:
        refuse_gateways(each.job)
    for each in found:
        for doubt in doubts_of(each):
            common.warn(f"warning: {doubt}")
    if getattr(arguments, "simulate", False):
        require_simulator()
    say_loading(arguments)
    return found


def say_loading(arguments: argparse.Namespace) -> None:
    """Say at once why nothing is to be seen for seconds."""
    common.tell(arguments, "loading torch …")


def say_start(arguments: argparse.Namespace, count: int, what: str = "members") -> None:
    """Say that processes are being started, where a run has any."""
    if not arguments.simulate:
        common.tell(arguments, f"starting {count} {what} …")


def say_choices(arguments: argparse.Namespace, planned: Sequence[Resolved]) -> None:
    """Say what `fleet.topology = "auto"` took for these jobs, and why; and which devices have
    figures that were measured, in place of the catalog's."""
    for said in dict.fromkeys(each.topology_choice for each in planned):
        if said:
            common.tell(arguments, said)
    profiles = {n: d for each in planned for n, d in each.device_profiles.items()}
    for name, device in profiles.items():
        if device.measured:
            common.tell(arguments, f"{name} as {device.measured}")


def with_host_pace(arguments: argparse.Namespace, found: Resolved, beside: Path | None) -> Resolved:
    """The job with the time of a step on this machine, if that is needed and not known yet."""
    from edgetrain.training.host_pace import paced

    def told(seconds: float) -> None:
        common.tell(
            arguments,
            f"device 'host': a step takes {units.duration(seconds)} on this machine, measured; "
            f"pace_s={seconds:g} repeats it",
        )

    return paced(found, beside, told)


def status_of(summaries: Iterable[Mapping[str, Any]]) -> int:
    """The exit status of runs that came to their end: 1 if one of them is incomplete."""
    return int(any(summary["status"] != "finished" for summary in summaries))


def saved(write: Callable[[], object]) -> bool:
    """Write results; whether that worked. What fails is a line on stderr, and nothing else."""
    try:
        write()
    except (EdgetrainError, OSError) as error:
        common.warn(f"edgetrain: {error}")
        return False
    return True
