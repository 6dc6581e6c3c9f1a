"""What a hub does so that a group of servers steps in: processes, pauses and lines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.effects import Note, Reported
from edgetrain.exchange.messages import Telemetry
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.fallback import in_words, quorum_of, steps_in, why_never
from edgetrain.jobs.plan import check
from edgetrain.jobs.reading import load
from edgetrain.training.fallback import LEAVE_S, SteppingIn, Told
from edgetrain.training.simulated import simulation

ON = ("fleet.device=host:6", "servers.fallback=when-needed", "servers.data.partition=iid",
      "servers.after_s=30", "servers.back_s=60")  # fmt: skip


class Group:
    """A group that a test ends."""

    def __init__(self, told):
        self.told, self.end, self.asked, self.killed = told, None, False, False
        self.last = ""

    def ended(self):
        return self.end

    def said(self):
        return self.last

    def leave(self):
        self.asked = True

    def kill(self):
        self.killed = True


class Room:
    """A hub's members by name, and the groups that were started for them."""

    def __init__(self, folder, *words):
        self.now, self.groups, self.said = 0.0, [], []
        self.steering, self.delay = SimpleNamespace(stands=False), SimpleNamespace(local_steps=5)
        self.delay.merged_steps = 0
        job = check(load(None, [*ON, *words])).job
        told = Told(job, "tcp://127.0.0.1:1", folder, None, None, False)
        self.servers = SteppingIn(told, lambda: self.now, self.said.append, start=self._start)
        self.servers(Note("started", "hub", "6 members"))
        self.said.clear()

    def _start(self, told):
        self.groups.append(Group(told))
        return self.groups[-1]

    def see(self, here, at, lost=""):
        """The hub with the members `here`; the connections of those in `lost` are gone."""
        names = [f"m{each}" if each.isdigit() else "servers" for each in here]
        members = [SimpleNamespace(name=each, unreachable_since=None) for each in names]
        members += [SimpleNamespace(name=f"m{each}", unreachable_since=1.0) for each in lost]
        self.now = at
        rounds = SimpleNamespace(delay=self.delay)
        self.servers.look(
            SimpleNamespace(started=True, members=members, rounds=rounds, steering=self.steering)
        )

    def train(self, here, until, speed):
        """All at `speed` steps a second."""
        for at in range(int(self.now) + 1, int(until) + 1):
            self.delay.merged_steps += speed
            self.see(here, at)

    @property
    def lines(self):
        return [note.reason for note in self.said if isinstance(note, Note)]


def test_a_group_is_started_for_the_missing_and_asked_to_leave(tmp_path):
    room = Room(tmp_path)
    room.see("012345", 0)
    room.see("05", 10, lost="1234")
    room.see("05", 39)
    assert not room.groups
    room.see("05", 40)
    (group,) = room.groups
    assert group.told.missing == (1, 2, 3, 4)
    room.see("05s", 50)
    room.see("0125s", 60)
    room.see("0125s", 119)
    assert not group.asked
    room.see("0125s", 120)
    assert group.asked
    assert not group.killed, "it finishes its step"
    room.see("0125s", 120 + LEAVE_S)
    assert group.killed
    assert len(room.groups) == 1
    first, second = room.lines
    assert first.startswith("in for m1, m2, m3, m4: 2 of 6 members are here for 30 s")
    assert second.startswith("out: 4 of 6 members are here for 60 s")


def test_a_group_that_cannot_start_is_tried_again_with_growing_pauses(tmp_path):
    room = Room(tmp_path)
    room.see("05", 0)
    at, started = 30.0, []
    while len(room.groups) < 6:
        before = len(room.groups)
        room.see("05", at)
        if len(room.groups) > before:
            started.append(at)
            room.groups[-1].end = "torch is not there"
        at += 1.0
    room.see("05", at)
    pauses = [later - earlier for earlier, later in itertools.pairwise(started)]
    assert [round(each) for each in pauses] == [6, 11, 21, 41, 81], "a tick is a second here"
    failed = [line for line in room.lines if "torch is not there" in line]
    assert len(failed) == 6, "one line each"
    assert failed[0] == "the group ended; again in 5 s: torch is not there"


def test_a_group_that_comes_to_the_end_of_the_job_is_not_started_again(tmp_path):
    room = Room(tmp_path)
    room.see("05", 0)
    room.see("05", 30)
    room.groups[0].end = ""
    for at in range(31, 1000, 10):
        room.see("05", at)
    assert len(room.groups) == 1
    assert len(room.lines) == 1


def test_members_that_have_finished_start_no_group(tmp_path):
    room = Room(tmp_path)
    for index in range(4):
        room.servers(Note("left", f"m{index}", "done"))
    for at in range(0, 100, 5):
        room.see("45", at)
    assert not room.groups


def test_closing_ends_the_group(tmp_path):
    room = Room(tmp_path)
    room.see("05", 0)
    room.see("05", 30)
    room.servers.close()
    room.servers.close()
    assert room.groups[0].killed


def slow_room(folder, said, end=""):
    """A room in which a slow fleet needs servers: the planner's process `said` how fast
    these are."""
    room = Room(folder, "servers.fallback=when-faster")
    room.see("012345", 0)
    (asked,) = room.groups
    assert asked.told.asks
    assert asked.told.missing == (0, 1, 2, 3, 4, 5)
    room.train("012345", 40, 1)
    assert len(room.groups) == 1, "nothing is decided before that is known"
    asked.last, asked.end = said, end
    return room


def report(room, step, t_ms, wait_ms):
    room.servers(Reported("servers", b"", Telemetry(step, 0, t_ms, wait_ms)))


def test_a_group_steps_in_for_slow_devices_and_out_when_they_keep_up_with_it(tmp_path):
    room = slow_room(tmp_path, "10.0")
    room.train("012345", 80, 2)
    _, group = room.groups
    assert not group.told.asks
    assert group.told.missing == (0, 1, 2, 3, 4, 5)
    assert room.lines[-1] == (
        "in for m0, m1, m2, m3, m4, m5: 6 of 6 members took 2 steps a second for 30 s, servers "
        "would take 10"
    )
    report(room, 100, 1000, 0)
    report(room, 180, 41000, 20000)  # 80 steps in 20 s, besides waiting: slower than planned
    room.train("012345s", 180, 2)
    assert not group.asked, "2 steps a second are less than 4"
    room.train("012345s", 300, 4)
    assert group.asked, "the rounds wait for the group"
    assert "took 4 steps a second for 30 s, servers would take 4" in room.lines[-1]


def test_people_who_pause_a_job_make_it_no_slow_one(tmp_path):
    room = slow_room(tmp_path, "10.0")
    room.train("012345", 50, 10)
    room.steering.stands = True
    room.train("012345", 500, 0)
    assert len(room.groups) == 1
    assert room.lines == []


@pytest.mark.parametrize(("said", "end"), [("", "it fits nowhere"), ("a warning", "")])
def test_servers_of_unknown_speed_step_in_for_members_that_go_only(tmp_path, said, end):
    room = slow_room(tmp_path, said, end)
    room.train("012345", 200, 1)
    (line,) = room.lines
    assert line == f"only for members that go: the servers' speed is not known: {end or said}"
    room.train("05", 300, 1)
    assert len(room.groups) == 2


def test_what_the_process_is_told_can_be_read_again(tmp_path):
    told = Told(
        check(load(None, [*ON])).job, "tcp://[::1]:5", tmp_path, tmp_path, None, True, (2, 4)
    )
    assert Told.of_json(told.to_json()) == told


def test_the_quorum_is_half_of_the_members_where_a_group_steps_in():
    job = check(load(None, [*ON])).job
    assert quorum_of(job) == 3
    assert quorum_of(replace(job, hub=replace(job.hub, quorum=5))) == 5
    assert hub_of(check(job)).policy.quorum == 3
    assert hub_of(check(job)).policy.stand_in == "servers"


def test_a_job_without_it_is_what_it_was():
    plain, on = load(None, ["fleet.device=host:6"]), load(None, [*ON])
    assert check(plain).job.digest() == check(on).job.digest()
    assert quorum_of(plain) == 1
    assert hub_of(check(plain)).policy.stand_in == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=sync-sgd"], "the optimizer's state is only in the members"),
        (["strategy=fedbuff(2, 0.5)"], "have no rounds together"),
        (["hub.hubs=['tcp://a:1', 'tcp://b:1']", "strategy.ranges=4"], "one hub yet"),
        (["gateways=true"], "joins one hub yet"),
        (["topology=ring", "strategy=fedavg"], "joins one hub yet"),
        (["topology=direct", "strategy.ranges=4"], "joins one hub yet"),
        (["strategy.secure=true", "strategy=local-sgd"], "masks are removed from the sum"),
        (["privacy=example", "noise=1"], "members' data are private"),
        (["train.lr_reference_batch=64"], "ranks or stages are not members"),
        (["hub.replica=tcp://b:1", "hub.quorum=4"], "a replica stands in for one hub"),
    ],
)
def test_what_no_group_can_step_in_for_is_refused_in_a_line(words, said):
    with pytest.raises(ConfigError) as refused:
        check(load(None, [*ON, *words]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["servers.fallback=never"], "'never'"),
        (["servers.placement=data=2"], "'auto' fits the members"),
        (["servers.cluster=c.toml"], "on the hub's machine"),
        (["fleet.device=host:5, servers"], "a group is there"),
    ],
)
def test_plan_says_why_no_group_would_step_in(words, said):
    job = load(None, [*ON, *words])
    assert said in why_never(job)
    assert not steps_in(job)


def test_plan_says_that_a_group_steps_in_for_slow_devices():
    words = in_words(load(None, [*ON, "fleet.members=6", "servers.fallback=when-faster"]))
    assert words == (
        "with fewer than 3 of 6 members, or at less than 0.8 of the servers' pace, for 30 s a "
        "group on the hub's machine steps in for the others"
    )
    assert "pace" not in in_words(load(None, [*ON]))


def test_without_data_no_group_steps_in():
    assert "servers.data" in why_never(load(None, ["servers.fallback=when-needed"]))


def test_a_simulation_has_no_group_that_steps_in(tmp_path):
    with pytest.raises(ConfigError, match="a simulation cannot have a group that steps in"):
        simulation.run(check(load(None, [*ON])), tmp_path)
