"""One chaos schedule over a simulated fleet: run it, and judge it by the laws.

The simulator (`training.simulated`) knows nothing of chaos. Here its interventions are called as a
schedule says, and two observers record what the judge needs: a tap on the network sees each
contribution as a member hands it over, and the hub's journal shows each round before members are
told of it.

    happening                           intervention
    hub, disk                           `FailingHub.crash`, `fill_disk` (`machines`)
    kill, power, pause                  `machines.kill`, `SimulatedMember.cut_power`, `Process.hold`
    cut, corrupt-up, corrupt-down       `MemberWire.cut`, `machines.damage_next_message`
    clock                               `MachineClock.jump`, of the hub or of a member
    link, partition, slow               `SimulatedNetwork.strike`
    control-pause, control-remove, control-stop  `People`, who tell the lead
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from chaos import laws
from chaos.dealings import Dealings, too_late
from chaos.laws import Answers, Merging, Outcome, Witness
from chaos.machines import FailingSimulation, damage_next_message, kill
from chaos.schedule import Happening
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.further_messages import Assign, Computed
from edgetrain.exchange.hub.collective import BASE_GONE
from edgetrain.exchange.hub.journal import Journal, JournalDisk, JournalSettings
from edgetrain.exchange.hub.records import Record, Round
from edgetrain.exchange.member.doubled import Doubled
from edgetrain.exchange.member.driver import Flat
from edgetrain.exchange.messages import Contribute, unpack
from edgetrain.fleet.networks import Fault
from edgetrain.fleet.networks.nodes import hub_node
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.resolved import Resolved, journal_settings
from edgetrain.runs.folder import read_metrics
from edgetrain.tasks.flat import FlatModel
from edgetrain.training.simulated.simulation import Simulation
from edgetrain.training.simulated.virtual import SECOND
from edgetrain.training.simulated.wires import MemberWire
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.ranges import shared
from edgetrain.vectors.vector import Buffer, checksum

MOST_TIMES, MOST_S = 20.0, 120.0
"""A run stands still if it takes this many times the seconds that it takes without faults, and this
many seconds more."""

SLOW_SHARE = 0.05
"""Of its rate, on a link that is slow."""


def run(
    planned: Resolved,
    seed: int,
    happenings: Sequence[Happening],
    calm_s: float,
    judge: Callable[[Resolved, FailingSimulation, Seen, Path, Merging], list[str]] | None = None,
) -> Outcome:
    """Run a planned job through one schedule, and judge it. `calm_s`: its virtual seconds without
    faults, see `calm_seconds`. `judge`: None: every reply is merged again. ConfigError for a job
    that no verdict can be given on."""
    merging = Merging.of(planned)
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="edgetrain-chaos-") as made:
        folder = Path(made)
        seen = Seen(lambda: simulation.seconds)
        settings = journal_settings(planned.job)

        def open_journal(hub: int, disk: JournalDisk) -> Journal:
            show = functools.partial(seen.see_round, hub)
            return _ShownJournal(show, _journal_of(folder, hub), settings, disk)

        def schedule() -> None:
            for happening in happenings:
                simulation.at(happening.at_s, functools.partial(strike, simulation, happening))

        simulation = FailingSimulation(planned, folder, open_journal, schedule)
        simulation.network.tap = seen.see_message
        simulation.hub.tap = seen.see_sent
        try:
            try:
                simulation.run(lambda: None, 1.0, time.monotonic, MOST_TIMES * calm_s + MOST_S)
                simulation.verdict()
            except EdgetrainError as error:
                broken.append(f"the run failed: {error}")
            simulation.close()
            broken += (judge or judge_replies)(planned, simulation, seen, folder, merging)
            if merging.search is not None:
                hub = planned.job.hub
                beats = (
                    1.25 * hub.heartbeat_s
                )  # it sends to everyone, and looks four times as often
                broken += too_late(
                    seen.dealings, happenings, hub.lost_after_s + beats, simulation.seconds
                )
            ended = ends_of(simulation, folder)[0].values()
        finally:
            simulation.close()
    base = max(ended, key=lambda end: end.applied).base if ended else ""
    return Outcome(
        seed, tuple(happenings), len(seen.rounds[0]), simulation.seconds, tuple(broken), base
    )


def strike(simulation: FailingSimulation, happening: Happening) -> None:
    """Let it happen now, to those of its members that are still there."""
    until = simulation.world.now + round(happening.for_s * SECOND)
    members = [simulation.members[index] for index in happening.members]
    hubs = [simulation.hubs[number] for number in happening.hubs]
    times = (0.0, happening.for_s, happening.members)
    match happening.kind:
        case "hub":
            for hub in hubs or [simulation.hub]:
                hub.crash(until)
        case "blackout":
            for hub in simulation.hubs:
                hub.crash(until)
            for member in members:
                member.cut_power(until)
        case "disk":
            for hub in hubs or [simulation.hub]:
                hub.fill_disk(until)
        case "partition" if hubs:
            simulation.network.strike(Fault("partition", *times, hubs=happening.hubs))
        case "link" | "partition":
            simulation.network.strike(Fault("down", *times, hubs=happening.hubs))
        case "slow":
            simulation.network.strike(Fault("rate", *times, SLOW_SHARE, happening.hubs))
        case "clock":
            for clock in [each.clock for each in (*members, *hubs)] or [simulation.hub.clock]:
                clock.jump(happening.for_s)
        case "power":
            for member in members:
                member.cut_power(until)
        case "kill":
            for member in members:
                kill(member, simulation.network, until)
        case "pause":
            for machine in (*members, *hubs):
                machine.process.hold(until)
        case "cut":
            running = [member for member in simulation.members if not member.process.over]
            for wire in [wire for member in running for wire in member.wires]:
                if wire.node in happening.members or hub_node(wire.hub.node) in happening.hubs:
                    wire.cut()
        case "corrupt-up" | "corrupt-down":
            for member in members:
                upwards = happening.kind == "corrupt-up"
                damage_next_message(member, simulation.network, upwards)
        case "control-pause" | "control-remove" | "control-stop":
            simulation.hub.people.begin(happening)
            simulation.world.at(until, functools.partial(_heal, simulation, happening))


def _heal(simulation: FailingSimulation, happening: Happening) -> None:
    """What people told has lasted long enough; a member that was refused is started again."""
    simulation.hub.people.heal(happening)
    for member in (simulation.members[index] for index in happening.members):
        if member.process.over and member.process.error:
            member.end_process(simulation.world.now)


class Seen:
    """What members contributed or answered, and the rounds that members may have been told of."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.answers: dict[int, Answers] = defaultdict(Answers)
        """By the hub's number, as `witness` and `rounds`."""
        self.dealings, self._clock = Dealings(), clock
        self.witness: dict[int, Witness] = defaultdict(Witness)
        self.rounds: dict[int, dict[int, Round]] = defaultdict(dict)
        """By number. A hub that lost a round with its journal may write another one for it."""

    def see_message(self, wire: MemberWire, frames: Sequence[Buffer]) -> None:
        """A member hands over a packed message."""
        message = unpack(list(frames))
        hub = hub_node(wire.hub.node)
        if isinstance(message, Contribute):
            witness = self.witness[hub]
            witness.saw(f"m{wire.node}", message.round, message.part, message.payload)
        elif isinstance(message, Computed):
            self.answers[hub].saw(message)
            if hub == 0:  # it is the lead that hands out
                self.dealings.saw_answer(f"m{wire.node}", message, self._clock())

    def see_sent(self, to: bytes, frames: Sequence[Buffer]) -> None:
        """The hub sends a packed message over the connection of this name."""
        message = unpack(list(frames))
        if isinstance(message, Assign):
            self.dealings.saw_given(to.decode().partition("-")[0], message, self._clock())

    def see_round(self, hub: int, record: Round) -> None:
        """A hub has written a round. Its payloads are copied: they are valid only now."""
        payloads = tuple(bytes(payload) for payload in record.reply)
        self.rounds[hub][record.round] = replace(record, reply=payloads)
        self.dealings.closed.setdefault(record.round, self._clock())


class _ShownJournal(Journal):
    """A journal that shows each round that it was given."""

    def __init__(
        self,
        show: Callable[[Round], None],
        folder: Path,
        settings: JournalSettings,
        disk: JournalDisk,
    ) -> None:
        super().__init__(folder, settings, disk=disk)
        self._show = show

    def append(self, record: Record) -> None:
        super().append(record)
        if isinstance(record, Round):
            self._show(record)


def ends_of(
    simulation: FailingSimulation, folder: Path
) -> tuple[dict[str, laws.Ended], list[str], list[str]]:
    """How members ended, at the end or as people ended the job; those whose contributions have to
    count; and broken laws."""
    events = list(read_metrics(folder, "event"))
    trained = [member.training for member in simulation.members if member.training is not None]
    halves, people = {member.name: member.half for member in trained}, simulation.hub.people
    ended = {
        event["member"]: laws.Ended(
            halves[event["member"]].applied, event["reason"].rpartition("base ")[2]
        )
        for event in events
        if event["event"] == "finished" and "base " in event["reason"]
    }
    for member in simulation.members if people.stopped_at is not None else ():
        was_told = member.process.over and not member.process.error and not member.was_off
        if was_told and member.name in halves:
            half = halves[member.name]
            ended.setdefault(member.name, laws.Ended(half.applied, f"{half.checksum:016x}"))
    # Only contributions that were answered are promised to count. A member that the hub had given
    # up as the job ended may have others, as one that people removed. Among members that average,
    # one that came back once all others had ended finds nobody who has the parameters.
    late = {
        e["about"] for e in events if ended and e["event"] == "refused" and BASE_GONE in e["reason"]
    }
    given_up = people.removed.union(late, *(hub.given_up for hub in simulation.hubs))
    # Who was told of the end before it had begun to train has nothing that could end.
    idle = {
        f"m{i}" for i, member in enumerate(simulation.members)
        if people.stopped_at is not None and member.training is None and not member.process.error
    }  # fmt: skip
    given_up |= idle
    names = [f"m{i}" for i, member in enumerate(simulation.members) if not member.was_off]
    steady = [name for name in names if name not in given_up]
    broken = [
        f"{event.get('about')}: {event['reason']}"
        for event in events
        if event["event"] == "error" and event.get("about") not in given_up
    ]
    missing = [name for name in steady if name not in ended]
    if missing:
        broken.append(f"{', '.join(missing)} never came to the end")
    return ended, steady, broken


def judge_replies(
    planned: Resolved, simulation: FailingSimulation, seen: Seen, folder: Path, merging: Merging
) -> list[str]:
    """The laws that the schedule broke. Everything has ended."""
    ended, steady, broken = ends_of(simulation, folder)
    torch.manual_seed(planned.job.seed)
    flat: Flat = FlatModel(simulation.task.model())
    if planned.strategy.has_variates:
        flat = Doubled(flat)
    merging = merging.bound(layouts.read(flat.description, flat.elements))
    judged = list[laws.Judged]()
    for hub, stretch in enumerate(shared(planned.job.strategy.ranges, planned.hubs)):
        rounds = tuple(seen.rounds[hub][number] for number in sorted(seen.rounds[hub]))
        initial = flat.params[stretch.of(flat.elements)].copy()
        own = merging.of_stretch(stretch, flat.elements)
        answers = None if merging.search is None else seen.answers[hub]
        if answers is not None:  # each hub's goes on by itself
            own = replace(own, search=planned.strategy.search())
            assert own.search is not None
            own.search.summed_in = np.float64 if stretch.count > 1 else np.float32
        judged.append(laws.Judged(rounds, seen.witness[hub], own, initial, answers))
        if planned.job.hub.on_disk_full == "stop":  # else it has what came after the last gap
            broken += _missing_in_journal(_journal_of(folder, hub), rounds)
            if answers is not None:
                broken += _replayed(planned, hub, _journal_of(folder, hub), rounds)
    stopped_at = simulation.hub.people.stopped_at
    return broken + laws.judge_hubs(judged, ended, steady, stopped_at=stopped_at)


def _journal_of(folder: Path, hub: int) -> Path:
    return folder / f"journal-{hub}"


def _missing_in_journal(folder: Path, told: Sequence[Round]) -> list[str]:
    """Compare the journal, opened again, with the rounds that members were told of."""
    with contextlib.closing(Journal(folder)) as journal:
        kept = list(journal.replies(journal.tail or 0))
    later = told[-len(kept) :] if kept else []
    same = [_content(record) for record in kept] == [_content(record) for record in later]
    return [] if same and (kept or not told) else ["the journal has not what members were told"]


def _replayed(planned: Resolved, number: int, folder: Path, told: Sequence[Round]) -> list[str]:
    """Restore a hub from the journal: it is to know the base that the last round led to."""
    hub = hub_of(planned, number=number)
    with contextlib.closing(Journal(folder)) as journal:
        if journal.state is None:
            return []
        hub.restore(journal.state, journal.records(), 0.0)
    base = 0 if hub.base is None else checksum(hub.base)
    wanted = told[-1].checksum if told else base
    return [] if base == wanted else [f"replayed, the journal leads to base {base:016x}"]


def _content(record: Round) -> tuple[object, ...]:
    return record.round, record.counted, record.checksum, b"".join(map(bytes, record.reply))


def calm_seconds(planned: Resolved) -> float:
    """Virtual seconds that the job takes if nothing goes wrong."""
    with tempfile.TemporaryDirectory(prefix="edgetrain-chaos-") as made:
        simulation = Simulation(planned, Path(made), False)
        try:
            simulation.run(lambda: None, 1.0, time.monotonic)
            simulation.verdict()
        finally:
            simulation.close()
    return simulation.seconds
