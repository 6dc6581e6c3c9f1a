"""`python -m chaos`: seeded schedules of what goes wrong, and a verdict against the laws."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.__main__ import carry_out
from edgetrain.cli import common, running
from edgetrain.cli.parser import Parser
from edgetrain.errors import ConfigError
from edgetrain.training.simulated import require_simulator

if TYPE_CHECKING:
    from chaos.fleet import Setting
    from chaos.laws import Outcome
    from chaos.schedule import Kind
    from chaos.trials import Trial

    Outcomes = Generator[Outcome, None, None]
SIMULATED = (
    "members=4", "pace_s=0.1", "network=wan-50ms", "steps=200", "batch=2", "strategy=dga",
    "delay=5", "optimizer={ name = 'sgd', lr = 0.05 }", "evaluate_every=1000000", "fsync=never",
)  # fmt: skip
STAND_IN = (
    "members=3", "pace_s=0.02", "steps=350", "strategy=dga", "local_steps=5", "delay=5",
    "heartbeat_s=0.3", "lost_after_s=2",
)  # fmt: skip
_PROGRESS_S = 2.0

_EXAMPLES = """\
examples:
  python -m chaos                                100 schedules over a simulated fleet
  python -m chaos --schedules 1000 --happenings 8
  python -m chaos --seed 417 --schedules 1       one schedule again, as a verdict names it
  python -m chaos job.toml --kinds hub,power
  python -m chaos hub.replica=tcp://c:5555 hub.quorum=3     a hub and its replica, in memory
  python -m chaos topology=ring strategy=dga(paper)   members that average among themselves
  python -m chaos strategy=lbfgs delay=0 'data.partition=shared(all)'     a hub that hands out work
  python -m chaos job.toml                       a job with several hubs: hub.hubs
  python -m chaos gateways=true 'sites=wan-50ms: 0-1, wan-50ms: 2-3'   two gateways, in memory
  python -m chaos --processes                    10 schedules over real processes
  python -m chaos --processes --schedules 50 --at-once 3
  python -m chaos job.toml --processes           members train the job's own task

what goes wrong (--kinds):
  hub            the hub is killed, and started again from its journal
  disk           the disk of the journal is full for a while (hub.on_disk_full says what then)
  kill, power    a member's process is killed; its device loses power; it starts anew
  blackout       the hub and all members lose power at once
  pause, clock   a member's process stands still; a clock jumps ahead
  link, slow     a member's link is down; or has a twentieth of its rate
  partition      several members' links are down at once
  cut            a member's connection breaks, with what was under way
  corrupt-up, corrupt-down
                 a message arrives damaged at the hub, at a member (connections are encrypted: it is
                 noticed, and the connection broken off)
  control-pause     people pause the job, and let it go on
  control-remove    people remove a member; its process is started anew (gateways and
                    strategies out of step have none)
  control-stop      people end the job: every schedule that it is in is shorter

  strangers      --processes: strangers hold connections, and the hub has few descriptors left
  frames         --processes: a device that is no member sends a message of frames without end

With --processes a hub process (encrypted, its journal on this disk) and a process for each member
run in real time: SIGKILL and --resume, SIGSTOP, a limit on the size of files for a full disk, a
forwarder before each member that holds bytes back, slows them down (a vector of the model takes
half a second), breaks connections and flips a bit. power is a SIGKILL too: no machine goes dark
here. A clock that jumps is the monotonic one that the hub and members are given; timers of sockets
and of the kernel stay. How long things last goes by hub.lost_after_s (2: a tenth of the simulated
times).

Without a job members stand in for real ones, with a small vector and no torch; with one they train
its task, by its strategy and codec, over links with the delays and rates of its network (backend
stream). A seed says what goes wrong and when, not in which state it finds the processes. Where a
law breaks, logs, journal and what members gave are kept in a run folder. Ctrl-C leaves nothing.

The laws: every contribution counts once, nothing that was answered is lost, the model is what the
same contributions give without any fault, and all replicas end equal, bit for bit.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit status, as `edgetrain` has it."""
    parser = Parser(
        prog="python -m chaos",
        description="Run a job through seeded schedules of faults, in virtual time or "
        "(--processes) with real processes; judge each by the laws.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    common.add_job(parser)
    parser.add_argument(
        "--processes", action="store_true", help="real processes, on this machine, in real time"
    )
    parser.add_argument(
        "--schedules", type=int, help="how many (default: 100 simulated, 10 with processes)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (default: 0)")
    parser.add_argument(
        "--happenings", type=int, default=5, help="things that go wrong in each (default: 5)"
    )
    parser.add_argument("--kinds", default="", help="only these, by ',' (default: all)")
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="processes: schedules at a time (default: 1)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="processes: things go wrong in the first S seconds (default: 4; with a job, 60 %% of "
        "what a run of it without faults takes)",
    )
    parser.add_argument(
        "--runs",
        default=common.RUNS,
        type=Path,
        help="processes: where the evidence of a broken law is kept (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_intermixed_args(argv)
    return carry_out(lambda: run(arguments), arguments)


def run(arguments: argparse.Namespace) -> int:
    """Run every schedule and report the laws that broke; 1 if one did."""
    from chaos import schedule

    known = schedule.PROCESS_KINDS if arguments.processes else schedule.KINDS
    kinds = schedule.parse_kinds(arguments.kinds, known)
    if arguments.schedules is None:
        arguments.schedules = 10 if arguments.processes else 100
    if arguments.schedules < 1 or arguments.happenings < 0:
        raise ConfigError("--schedules starts at 1, --happenings at 0")
    for option, value in (("--at-once", arguments.at_once), ("--seconds", arguments.seconds)):
        if value is not None and not arguments.processes:
            raise ConfigError(f"{option} is for real processes", "add --processes")
        if value is not None and value <= 0:
            raise ConfigError(f"{option} {value}", "allowed is more than 0")
    report = _Report(arguments)
    outcomes = (
        _real(arguments, kinds, report) if arguments.processes else _simulated(arguments, kinds)
    )
    try:
        with contextlib.closing(outcomes):
            for outcome in outcomes:
                report.add(outcome)
    except KeyboardInterrupt:
        report.say(f"interrupted after {report.verdict()}")
        raise
    common.say(json.dumps(report.as_json()) if arguments.json else report.verdict())
    return 1 if report.broken else 0


class _Report:
    """The outcomes so far, reported to people as they come, and to scripts at the end."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.outcomes: list[Outcome] = []
        self.broken: list[dict[str, Any]] = []
        self.kept: dict[int, str] = {}
        """The folder of evidence, by seed."""
        self.options: tuple[str, ...] = ()
        """Options that repeating a schedule needs besides those that were given."""
        self._arguments = arguments
        self._began = self._said = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line for people; to stderr if scripts read stdout."""
        print(line, file=sys.stderr if self._arguments.json else sys.stdout, flush=True)

    def add(self, outcome: Outcome) -> None:
        """One schedule has ended: report it."""
        self.outcomes.append(outcome)
        if outcome.broken:
            self._add_broken(outcome)
        done, now = len(self.outcomes), time.monotonic()
        if not self._arguments.processes and now - self._said <= _PROGRESS_S:
            return
        self._said = now
        left = (now - self._began) / done * (self._arguments.schedules - done)
        self.say(
            (_in_short(outcome) if self._arguments.processes else "")
            + f"{done} of {self._arguments.schedules} schedules, {len(self.broken)} broke a law, "
            f"{left:.0f} s left"
        )

    def _add_broken(self, outcome: Outcome) -> None:
        found: dict[str, Any] = {
            "seed": outcome.seed,
            "laws": list(outcome.broken),
            "happenings": list(map(str, outcome.happenings)),
            "again": self.command_for(outcome.seed),
        }
        lines = [f"seed {outcome.seed}:", *(f"  {each}" for each in found["happenings"])]
        lines += [f"  BROKEN: {law}" for law in outcome.broken[:8]]
        lines += [f"  again: {found['again']}"]
        if outcome.seed in self.kept:
            found["kept"] = self.kept[outcome.seed]
            lines += [f"  logs, journal, what members gave: {found['kept']}"]
        self.broken.append(found)
        self.say("\n".join(lines))

    def command_for(self, seed: int) -> str:
        """The command that repeats the schedule of this seed."""
        given = self._arguments
        words = ["python", "-m", "chaos", *given.job, *["--processes"][: given.processes]]
        words += ["--seed", str(seed), "--schedules", "1", "--happenings", str(given.happenings)]
        words += ["--kinds", given.kinds] if given.kinds else []
        return shlex.join([*words, *self.options])

    def verdict(self) -> str:
        """All outcomes in one line."""
        happened = sum(len(outcome.happenings) for outcome in self.outcomes)
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        rounds = sum(outcome.rounds for outcome in self.outcomes)
        where = (
            f"{rounds} rounds"
            if self._arguments.processes
            else (f"{seconds / 3600:.1f} virtual hours")
        )
        return f"{len(self.outcomes)} schedules, {happened} things went wrong in {where}: " + (
            f"{len(self.broken)} broke a law" if self.broken else "every law held"
        )

    def as_json(self) -> dict[str, Any]:
        """All outcomes for scripts."""
        seconds = "seconds" if self._arguments.processes else "virtual_seconds"
        return {
            "schedules": len(self.outcomes),
            "happenings": sum(len(outcome.happenings) for outcome in self.outcomes),
            "rounds": sum(outcome.rounds for outcome in self.outcomes),
            seconds: sum(outcome.seconds for outcome in self.outcomes),
            "broken": self.broken,
        }


def _in_short(outcome: Outcome) -> str:
    kinds = ", ".join(happening.kind for happening in outcome.happenings) or "nothing"
    return f"seed {outcome.seed}: {kinds}; {outcome.rounds} rounds, {outcome.seconds:.1f} s\n"


def _simulated(arguments: argparse.Namespace, kinds: tuple[Kind, ...]) -> Outcomes:
    job, beside = common.job_of(arguments, SIMULATED)
    require_simulator()
    from edgetrain.jobs.job import COLLECTIVES, DIRECT
    from edgetrain.jobs.plan import check, with_task
    from edgetrain.jobs.rules import refuse_fallback

    refuse_fallback(job, "`make test-groups` has 50 schedules for it, a simulation cannot have")
    found = running.with_host_pace(arguments, check(job), beside)
    from chaos import (
        among_members,
        averaging,
        behind_gateways,
        in_memory,
        laws,
        schedule,
        simulated,
    )

    planned, hubs, way, able = with_task(found, beside), found.hubs, simulated, schedule.KINDS
    if found.job.hub.replica:
        hubs, way, able = 2, in_memory, in_memory.KINDS
    elif found.job.fleet.gateways:
        hubs, way, able = 1 + len(found.sites), behind_gateways, behind_gateways.KINDS
    elif found.job.fleet.topology in COLLECTIVES:
        way, able = averaging, averaging.KINDS
    elif found.job.fleet.topology == DIRECT:
        way, able = among_members, among_members.KINDS
    elif found.strategy.deals:  # its laws know no pause
        able = schedule.FAULTS
    elif not found.strategy.is_synchronous:
        # Who comes back after it was removed is a newcomer, and may have numbers that it had
        # before: the laws could not tell two contributions of one name and number apart.
        able = tuple(kind for kind in schedule.KINDS if kind != "control-remove")
    if not (kinds := tuple(kind for kind in kinds if kind in able)):
        raise ConfigError(
            f"--kinds {arguments.kinds} cannot happen to this topology here",
            f"allowed are {', '.join(able)}",
        )
    laws.Merging.of(planned)
    calm_s = way.calm_seconds(planned)
    members = planned.job.fleet.members
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        drawn = schedule.draw(seed, members, calm_s, arguments.happenings, kinds, hubs)
        yield way.run(planned, seed, drawn, calm_s)


def _real(arguments: argparse.Namespace, kinds: tuple[Kind, ...], report: _Report) -> Outcomes:
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"--processes does to processes what {sys.platform} cannot", "take Linux, or simulate"
        )
    from chaos import trials

    setting = setting_of(arguments)
    seconds = arguments.seconds or trials.SECONDS
    if setting.task and not arguments.seconds:
        alone = trials.run_all(setting, trials.CALM, [arguments.seed])
        with contextlib.closing(alone):
            calm = _outcome_of(next(alone), arguments, report)
        if calm.broken:
            yield calm
            return
        seconds = float(f"{trials.SHARE * calm.seconds:.3g}")
        report.say(f"without a fault: {calm.rounds} rounds in {calm.seconds:.1f} s")
    report.say(
        f"a hub and {setting.job.fleet.members} members, each a process; what may go wrong in "
        f"{seconds:g} s: {', '.join(kinds)}"
    )
    if setting.task or arguments.seconds:
        report.options = ("--seconds", f"{seconds:g}")
    found = trials.run_all(
        setting,
        trials.Schedules(seconds, arguments.happenings, kinds),
        range(arguments.seed, arguments.seed + arguments.schedules),
        arguments.at_once or 1,
    )
    with contextlib.closing(found):
        for trial in found:
            yield _outcome_of(trial, arguments, report)


def _outcome_of(trial: Trial, arguments: argparse.Namespace, report: _Report) -> Outcome:
    """The outcome of a trial; its folder is kept if a law broke."""
    from chaos import trials
    from edgetrain.runs.folder import create

    outcome = trial.outcome
    if outcome.broken:
        folder = create(arguments.runs, f"chaos-{outcome.seed}")
        trials.keep(trial, folder)
        report.kept[outcome.seed] = str(folder)
    return outcome


def setting_of(arguments: argparse.Namespace) -> Setting:
    """What is run with real processes: the job's own task if a job names one, else stand-ins."""
    from chaos.fleet import Setting, fit
    from edgetrain.fleet.assignment import networks_of
    from edgetrain.jobs.plan import plan
    from edgetrain.jobs.rules import resolve

    words = arguments.job
    job, beside = common.job_of(arguments, STAND_IN)
    if words and ("=" not in words[0] or any(word.startswith("task=") for word in words)):
        planned = plan(job, beside)
        if planned.sites or planned.faults or not planned.presence.is_steady:
            raise ConfigError(
                "chaos with real processes and sites, faults or absences in the job: links are one "
                "by one here, and what goes wrong is drawn",
                "leave them out, or simulate",
            )
        return Setting(fit(planned.job), True, beside, planned.devices, planned.networks)
    resolve(job)
    links = networks_of(job.fleet.network, job.fleet.members)
    return Setting(fit(job), networks=tuple(links))
