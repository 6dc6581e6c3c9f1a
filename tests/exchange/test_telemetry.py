"""What members say of themselves: how large it is, how often it counts, and what never is in it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
import time
from pathlib import Path
from typing import get_args

import children
import numpy as np
import pytest
from loopback import Loopback
from torch import nn

from edgetrain import codecs, strategies
from edgetrain.exchange.further_messages import Masking
from edgetrain.exchange.hub.effects import Reported
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.masks.aggregator import Aggregator
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.telemetry import Readings, SlowReadings, Sums, Telemeter
from edgetrain.exchange.messages import PROTOCOL, Base, Join, Telemetry, pack, unpack
from edgetrain.exchange.seam import Request
from edgetrain.exchange.transport import Traffic
from edgetrain.jobs.job import Privacy
from edgetrain.runs.data import RunData
from edgetrain.runs.folder import metrics_path, read_metrics
from edgetrain.runs.metrics.lines import format_line
from edgetrain.runs.summary import summarise
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.training.hub_recorder import MOST_NAMES, HubRecorder, Statuses
from edgetrain.training.member.member import Member, bind, release_of
from edgetrain.training.member.readings import readings_of
from edgetrain.vectors.vector import checksum

ZEROS = np.zeros(3, np.float32)
PERIOD_S = 5.0
CURVE_BYTES = 2 * (33 + 2)
"""What encryption and ZMTP add to a message of two frames."""


def hub_with(status_s):
    """A hub that the member "a" has joined."""
    hub = Hub(
        Terms(find("local-sgd"), 1), Policy(1, status_s=status_s), Mean(), codecs.Dense(),
        codecs.Dense(),
    )  # fmt: skip
    hub.handle(b"a", Join(PROTOCOL, "", "model", 3, "a", 1.0, checksum(ZEROS), 1), 0.0)
    hub.handle(b"a", Base(0, 1, ZEROS.tobytes()), 0.0)
    assert hub.started
    return hub


def passed_on(hub, message, now):
    return [e for e in hub.handle(b"a", message, now) if isinstance(e, Reported)]


# -- size -----------------------------------------------------------------------------------------


def size(message):
    return sum(map(len, pack(message)))


def test_a_message_is_small_in_the_longest_of_runs():
    year = 365 * 86_400_000
    large = Telemetry(
        10**9, 10**9, year, year, year, year, year, 10**5, 10**14, 10**14, 1 << 19, 85, 1,
        10**9, "",
    )  # fmt: skip
    assert size(large) <= 120
    first = Telemetry(
        0, 0, memory_mb=300, versions="12.34.56 3.13.11 2.13.0+cu130.abcdefghijk"[:40]
    )
    assert size(first) <= 120


def test_an_encrypted_member_spends_less_than_25_bytes_a_second():
    usual = Telemetry(
        70_000, 14_000, 86_400_000, 16_000_000, 400_000, 60_000, 0, 2030,
        4 * 10**9, 4 * 10**9, 900, 71, 0, 500_000,
    )  # fmt: skip
    assert (size(usual) + CURVE_BYTES) / PERIOD_S < 25, size(usual)


def test_what_changes_slowly_costs_less_than_a_byte_a_second():
    usual = Telemetry(70_000, 14_000, 86_400_000, 16_000_000)
    slow = dataclasses.replace(
        usual, disk_mb=118_000, swap_mb=900, mhz=2400, under_voltage=0, wifi_dbm=-61,
        unix_ms=1_790_000_000_000,
    )  # fmt: skip
    assert unpack(pack(slow)) == slow
    assert len(pack(usual)[1]) == len(pack(dataclasses.replace(usual, unix_ms=0))[1])
    assert (size(slow) - size(usual)) / 60 < 1
    keys = Statuses().keys_of("a", slow)
    assert (keys["disk_free_bytes"], keys["wifi_dbm"]) == (118_000 << 20, -61)
    assert keys["under_voltage"] is False
    assert abs(keys["clock_s"]) < 1e9
    assert Statuses().keys_of("a", usual)["clock_s"] is None


def test_it_is_read_once_a_minute():
    now = [0.0]
    read = readings_of(clock=lambda: now[0])
    said = []
    for at in (0.0, 5.0, 59.0, 60.0, 65.0):
        now[0] = at
        said.append(read().slow != SlowReadings())
    assert said == [True, False, False, True, False]


# -- the hub --------------------------------------------------------------------------------------


def test_a_hub_that_wants_none_passes_nothing_on():
    assert passed_on(hub_with(0.0), Telemetry(1, 0), 1.0) == []


def test_an_honest_member_is_always_heard():
    hub = hub_with(PERIOD_S)
    times = [0.1, *(0.1 + PERIOD_S * n for n in range(1, 50)), 247.0]
    assert [len(passed_on(hub, Telemetry(n, 0), t)) for n, t in enumerate(times)] == [1] * 51


def test_ten_thousand_reports_a_second_are_two_a_period():
    hub, passed = hub_with(PERIOD_S), 0
    for number in range(20_000):
        passed += len(passed_on(hub, Telemetry(number, 0), 10.0 + number / 10_000))
    assert passed == 4
    assert sum(len(passed_on(hub, Telemetry(9, 0), 13.0 + n / 100)) for n in range(1000)) <= 5


def test_reports_under_ever_new_names_are_forgotten():
    statuses = Statuses()
    for number in range(MOST_NAMES + 100):
        statuses.keys_of(f"m{number}", Telemetry(1, 0))
    assert len(statuses) == MOST_NAMES


# -- the hub's folder -----------------------------------------------------------------------------


def test_sums_become_the_seconds_of_the_steps_between():
    statuses = Statuses()
    statuses.keys_of("a", Telemetry(0, 0, versions="1"))
    first = statuses.keys_of("a", Telemetry(10, 2, 1000, 300, 100, sent_bytes=50))
    then = statuses.keys_of("a", Telemetry(20, 4, 3000, 1200, 200, sent_bytes=90))
    assert (first["pace_s"], first["compute_s"], first["steps"]) == (0.1, 0.6, 10)
    assert (then["pace_s"], then["compute_s"], then["wait_s"]) == (0.2, 1.0, 0.9)
    assert then["sent_bytes"] == 90
    assert then["celsius"] is then["throttled"] is then["joules"] is then["round_trip_s"] is None


def test_every_key_of_a_status_line_is_documented():
    page = (Path(__file__).parents[2] / "docs/reference/run-folder.md").read_text("utf-8")
    chapter = page.partition("**status**")[2].partition("**event**")[0]
    keys = Statuses().keys_of("a", Telemetry(1, 0))
    assert [key for key in ("about", "name", *keys) if f"`{key}`" not in chapter] == []


def test_a_process_that_was_started_again_begins_at_its_own_step():
    statuses = Statuses()
    statuses.keys_of("a", Telemetry(100, 20, 10_000, 4000))
    assert statuses.keys_of("a", Telemetry(90, 18, 20_000, versions="1"))["steps"] == 0
    assert statuses.keys_of("a", Telemetry(95, 19, 21_000, 500))["compute_s"] == 0.5


def told(t, step, **other):
    return {
        "kind": "status", "t": t, "member": "hub", "about": "m0", "step": step, "steps": step,
        "at": t, "compute_s": 0.3 * step, "wait_s": 0.1 * step, "overhead_s": 0.0,
        "sent_bytes": 10 * step, "received_bytes": 0, "round": 0, **other,
    }  # fmt: skip


def test_what_members_told_the_hub_is_the_state_of_a_hubs_folder():
    data = RunData().add_all([told(4.0, 10, name="pi-3", round_trip_s=0.2, celsius=61)])
    member = data.members["m0"]
    assert (member.step, member.seconds_per_step, member.parts[:2]) == (10, 0.4, (0.3, 0.1))
    assert (member.enrolled, member.round_trip_s, member.celsius) == ("pi-3", 0.2, 61)


def test_nothing_counts_twice_where_members_write_lines_of_their_own():
    own = {
        "kind": "step", "t": 3.0, "member": "m0", "step": 6, "steps": 6, "compute_s": 3.0,
        "wait_s": 0.0, "overhead_s": 0.0, "sent_bytes": 7, "received_bytes": 0, "round": 1,
        "loss": 0.5,
    }  # fmt: skip
    for lines in itertools.permutations([told(4.0, 10, round_trip_s=0.2), own]):
        member = RunData().add_all(lines).members["m0"]
        assert (member.step, member.lines, member.seconds[0]) == (6, 6, 3.0)
        assert (member.sent_bytes, member.round_trip_s) == (7, 0.2)


def test_the_hub_writes_status_lines_under_the_enrolled_name(tmp_path):
    now = itertools.count()
    recorder = HubRecorder(
        tmp_path, lambda: next(now), lambda: Traffic(0, 0, 0, 0.0),
        name_of=lambda sender: {b"a": "pi-3"}[sender],
    )  # fmt: skip
    hub = hub_with(PERIOD_S)
    (report,) = passed_on(hub, Telemetry(5, 1, celsius=50, throttled=0), 1.0)
    recorder(report)  # before training there is no file
    recorder(children.Note("started", "hub", "1 members"))
    recorder(report)
    recorder.close()
    (line,) = read_metrics(metrics_path(tmp_path).parent, "status")
    assert (line["about"], line["name"], line["celsius"]) == ("a", "pi-3", 50)
    assert line["throttled"] is False
    assert "joules" not in line
    assert len(format_line(line)) < 500


# -- the member -----------------------------------------------------------------------------------


def test_a_telemeter_says_it_when_it_is_time_and_versions_once():
    now, said = [100.0], []
    meter = Telemeter(
        5.0, 90.0, lambda: now[0], lambda: Sums(3, 1, now[0], 0.5, 0.25),
        lambda: Traffic(10, 20, 0, 0.1), said.append,
    )  # fmt: skip
    meter.versions = "1 2 3"
    meter.read = lambda: Readings(3 << 20, 61.4, True, 12.6)
    for at in (100.0, 101.0, 104.9, 105.0, 105.1, 111.0):
        now[0] = at
        meter.poll()
    assert [(m.t_ms, m.versions) for m in said] == [(10_000, "1 2 3"), (15_000, ""), (21_000, "")]
    assert (said[0].memory_mb, said[0].celsius, said[0].throttled, said[0].joules) == (3, 61, 1, 13)
    assert (said[0].wait_ms, said[0].round_trip_us100, said[0].sent_bytes) == (500, 1000, 0)


def test_a_telemeter_that_is_never_wanted_says_nothing():
    meter = Telemeter(
        0.0, 0.0, lambda: 1.0, lambda: Sums(0, 0, 0.0, 0.0, 0.0), lambda: Traffic(0, 0, 0, 0.0),
        pytest.fail,
    )  # fmt: skip
    meter.poll()
    meter.say()


class Wire(Loopback):
    """A wire that remembers what members sent."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def deliver(self, name, frames):
        self.sent.append([bytes(frame) for frame in frames])
        super().deliver(name, frames)


@pytest.mark.parametrize(("private", "masked"), [*itertools.product([False, True], repeat=2)])
def test_no_loss_and_no_figure_is_on_the_wire(private, masked):
    """Of members with loops of their own, over a hub that wants a report after every step: plain,
    with [privacy], with masks, and with both."""
    wires, losses = Wire(), []
    release = release_of(Privacy(unit="member", noise=1.0)) if private else None
    members = 3 if masked else 1
    hub = children.HubThread(wires, members=members, policy={"status_s": 0.001})
    if masked:
        pytest.importorskip("cryptography", reason="masks need edgetrain[private]")
        row, codec = strategies.find("local-sgd"), codecs.parse("fp32")
        hub.hub = Hub(
            Terms(row, 1), Policy(members, heartbeat_s=0.05, status_s=0.001),
            row.merge_rule(), codec, codec, Aggregator(MaskTerms(members, members, 64.0)),
        )  # fmt: skip

    def train(index):
        model = children.model(0)
        optim = children.optimizer("sgd", model)
        link = Link(wires.connect(), time.monotonic)
        request = Request("", f"m{index}", secure=masked)
        with Member.join(link, bind(model, optim), optim, request, release=release) as member:
            for step in range(8):
                optim.zero_grad()
                x, y = children.batch(index, step)
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                losses.append(loss.item())
                member.step()

    with hub.serving():
        children.in_threads(*(functools.partial(train, index) for index in range(members)))
    assert len(losses) == 8 * members
    masking = {kind.kind for kind in get_args(Masking)}
    assert any(frames[0] in masking for frames in wires.sent) == masked
    reports = [unpack(frames) for frames in wires.sent if frames[0] == Telemetry.kind]
    assert len(reports) >= 3, "as it began, in between, as it left"
    assert {report.step for report in reports} >= {1, 8}
    assert sum(report.versions != "" for report in reports) == members
    headers = b"".join(frames[1] for frames in wires.sent)
    for loss in losses:
        for spelled in (struct.pack(">d", loss), struct.pack(">f", loss), f"{loss:.4f}".encode()):
            assert spelled not in headers
    for report in reports:  # whole numbers, none of which can be a loss or a figure
        values = dataclasses.asdict(report)
        assert type(values.pop("versions")) is str
        assert all(type(value) is int for value in values.values())
        assert set(values) == {
            "step", "round", "t_ms", "wait_ms", "overhead_ms", "eval_ms", "end_ms",
            "round_trip_us100", "sent_bytes", "received_bytes", "memory_mb", "celsius", "throttled",
            "joules", "disk_mb", "swap_mb", "mhz", "under_voltage", "wifi_dbm", "unix_ms",
        }  # fmt: skip


# -- what one member says decides nothing -------------------------------------------------------


def lie(t, **other):
    return told(t, 10**9, **{
        "about": "liar", "at": 3.5e10, "compute_s": 1e10, "wait_s": 1e10, "overhead_s": 1e10,
        "sent_bytes": 10**18, "received_bytes": 10**18, "peak_bytes": 1 << 60, "joules": 1e15,
        **other,
    })  # fmt: skip


def merged(t, round):
    return {
        "kind": "round", "t": t, "member": "hub", "round": round, "members": [], "missing": [],
        "local_steps": 5, "delay": 5, "cpu_s": 0.1, "peak_bytes": 1 << 20,
        "sent_bytes": 400 * (round + 1), "received_bytes": 300 * (round + 1),
    }  # fmt: skip


@pytest.mark.parametrize("honest", [1, 2, 3])
def test_one_lying_member_does_not_decide_the_hubs_summary(honest, tmp_path):
    lines = [
        told(4.0 * n, 10 * n, steps=10, compute_s=3.0, about=f"m{m}", peak_bytes=1 << 20, joules=9)
        for n in range(1, 4)
        for m in range(honest)
    ]
    lines += [merged(2.0 * n, n) for n in range(6)] + [lie(n) for n in (1.0, 5.0, 12.0)]
    with metrics_path(tmp_path).open("wb") as file:
        file.writelines(format_line(line) for line in sorted(lines, key=lambda line: line["t"]))
    found = summarise(tmp_path)
    assert found["seconds"] <= 12.0
    assert found["steps"] <= 30 + 15
    assert (found["sent_bytes"], found["received_bytes"]) == (1800, 2400)
    assert found["seconds_per_step"] <= 0.4
    assert found["compute_s"] + found["wait_s"] + found["overhead_s"] <= 0.41
    assert found["peak_bytes"] == 1 << 20
    assert found["joules"] == 9 * (honest + 1)
    assert found["rounds"] == 6
