"""Real fleets whose hub has a group step in: four of six devices are killed, and while the group
trains one of its ranks, its leader and the hub. About two minutes each."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from chaos.hub import HubProcess, free_port
from command_line import TINY

from edgetrain.exchange.hub.journal import Journal
from edgetrain.fleet.networks import Attachment
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import journal_settings
from edgetrain.runs.folder import read_metrics
from edgetrain.training import processes
from edgetrain.training.emulated import PRELOAD, member_process
from edgetrain.training.hub import HubRequest

pytestmark = [pytest.mark.groups, pytest.mark.timeout(900), pytest.mark.usefixtures("own_imports")]

MEMBERS, AFTER_S, BACK_S, GONE_S = 6, 2.0, 4.0, 2.0
START_S = 20.0
"""A group that steps in trains within this time of the decision, and is gone within it."""
PATIENCE_S = 200.0

# A task that takes its time until a file is there.
UNHURRIED = (
    TINY
    + """

import time
from pathlib import Path


class Unhurried(Tiny):
    def __init__(self, go, width=4, seed=0):
        super().__init__(width, seed)
        self.go = Path(go)

    def model(self):
        wide = torch.nn.Linear(3, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
        return torch.nn.Sequential(*wide, torch.nn.ReLU(), torch.nn.Linear(64, self.width))

    def evaluate(self, model):
        return {"loss": float(model[0].weight.detach().square().sum())}

    def batches_from(self, member, members, batch, seed, start):
        for step, each in enumerate(self.batches(member, members, batch, seed)):
            if step < start:
                continue
            if not self.go.exists():
                time.sleep(0.15)
            yield each
"""
)


def processes_below(pid):
    """(pid, command line) of all processes that this one started, and so on."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            continue
        if parent == pid:
            found += [(int(entry.name), words), *processes_below(int(entry.name))]
    return found


def leader_of(hub):
    """The process of a group's leader."""
    return next(pid for pid, words in processes_below(hub.process.pid) if "stepping_in" in words)


def rank_of(hub):
    """A rank that is not the leader."""
    below = processes_below(leader_of(hub))
    servers = [pid for pid, words in below if "forkserver" in words]
    ranks = [pid for pid, _ in processes_below(servers[0]) if pid not in servers[:1]]
    return ranks[-1] if ranks else None


class Devices:
    """The six devices: a process each, started again where a test says so."""

    def __init__(self, planned, folder, port):
        self._planned, self._folder = planned, folder
        self._context = processes.fork_server(PRELOAD)
        self._began = self._context.Value("d", time.monotonic())
        self._way = Attachment((f"tcp://127.0.0.1:{port}",))
        self._running = {}
        self.ended = []

    def start(self, *indexes):
        for index in indexes:
            place = (index, "host", self._planned.beside)
            self._running[index] = processes.start(
                self._context, f"m{index}", member_process, self._planned, self._folder, self._way,
                self._began, place,
            )  # fmt: skip

    def kill(self, *indexes):
        for index in indexes:
            self._running[index].process.kill()
            self._running[index].process.join()

    def wait(self):
        """Until all have come to their end."""
        for child in self._running.values():
            child.process.join(PATIENCE_S)
            assert child.exit_code == 0, child.error

    def close(self):
        processes.stop_all(list(self._running.values()))


@pytest.mark.parametrize("seed", range(5))
def test_a_group_steps_in_and_out_whatever_of_it_is_killed(seed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    rng = random.Random(seed)
    port, members = free_port(), tmp_path / "members"
    members.mkdir()
    job = load(None, [
        "task=unhurried:Unhurried", f"data.go={tmp_path / 'go'}", f"members={MEMBERS}",
        "steps=3000", "batch=256", "strategy=dga", "every=4", "delay=4", "landing=0",
        "servers.fallback=when-needed", "servers.data.width=4",
        f"servers.after_s={AFTER_S}", f"servers.back_s={BACK_S}", f"hub.gone_s={GONE_S}",
        "hub.beat_s=0.2", "servers.snapshot_every=20",
    ])  # fmt: skip
    (tmp_path / "unhurried.py").write_text(UNHURRIED)
    planned = plan(job, tmp_path)
    request = HubRequest(
        planned.job, f"tcp://127.0.0.1:{port}", True, runs=tmp_path / "runs", beside=tmp_path
    )
    hub, devices = HubProcess(tmp_path, request), Devices(planned, members, port)
    outages = []
    try:
        hub.when("listening")
        devices.start(*range(MEMBERS))
        hub.when("hub started", patience_s=PATIENCE_S)
        (folder,) = (tmp_path / "runs").iterdir()
        time.sleep(rng.uniform(1, 3))

        killed_at = time.monotonic()
        devices.kill(2, 3, 4, 5)
        trains_at = hub.when("servers joined", patience_s=PATIENCE_S)
        joins = 1
        for what in rng.sample(["rank", "leader", "hub"], 3):
            time.sleep(rng.uniform(0.5, 3))
            if what == "hub":
                down_at = time.monotonic()
                hub.kill()
                hub = HubProcess(tmp_path, HubRequest(**{**vars(request), "resume": folder}))
                hub.when("m0 back", patience_s=PATIENCE_S)
                outages.append((down_at, hub.when("m1 back", patience_s=PATIENCE_S)))
                joins = 0
            elif what == "leader":
                os.kill(leader_of(hub), signal.SIGKILL)
            elif (rank := rank_of(hub)) is not None:
                os.kill(rank, signal.SIGKILL)
            else:
                continue  # a machine of one core
            joins += 1
            hub.when("servers joined", joins, PATIENCE_S)

        before = sum("servers left" in line for _, line in hub.said)
        back_at = time.monotonic()
        devices.start(2, 3, 4, 5)
        for index in (2, 3, 4, 5):
            hub.when(f"m{index} joined", patience_s=PATIENCE_S)
        all_at = hub.when("hub servers: out", patience_s=PATIENCE_S)
        gone_at = hub.when("servers left", before + 1, PATIENCE_S)
        (tmp_path / "go").touch()
        devices.wait()
        hub.when("done: ", patience_s=PATIENCE_S)
    finally:
        hub.kill()
        devices.close()

    print(f"\ntrains {trains_at - killed_at:.1f} s after four of six were killed (after_s "
          f"{AFTER_S:g}), gone {gone_at - back_at:.1f} s after they were started again "
          f"(back_s {BACK_S:g}, decided at {all_at - back_at:.1f} s)")  # fmt: skip
    check_waits(members, outages)
    check_bases(planned, members, folder)
    assert trains_at - killed_at <= AFTER_S + START_S
    assert 0 < gone_at - back_at <= BACK_S + START_S


def check_waits(members, outages):
    """No device waits longer than `hub.gone_s` and a trip, the hub's own restart apart."""
    # Before its first step a device waits for the fleet to begin.
    steps = [line for line in read_metrics(members, "step") if line["step"] > 1]
    longest = max(line["wait_s"] for line in steps if line["member"] in ("m0", "m1"))
    restart_s = max((end - start for start, end in outages), default=0.0)
    print(f"longest wait of a device: {longest:.1f} s (gone_s {GONE_S:g}, restart {restart_s:.1f})")
    assert longest <= GONE_S + restart_s + 1.0


def check_bases(planned, members, folder):
    """The replicas that come to the end together agree, and the journal replays to their bits."""
    events = read_metrics(members, "event")
    ended = [each for each in events if each["event"] == "finished"]
    bases = {re.search(r"base (\w+)", each["reason"])[1] for each in ended}
    journal = Journal(folder / "journal", journal_settings(planned.job), print)
    try:
        hub = hub_of(planned)
        hub.restore(journal.state, journal.records(), 0.0)
    finally:
        journal.close()
    assert f"{hub.checksum(hub.round):016x}" in bases
    known = {f"{hub.checksum(applied):016x}" for applied in range(hub.round + 1)}
    print(f"{len(ended)} devices ended with {bases}, the journal after {hub.round} rounds")
    assert bases <= known
