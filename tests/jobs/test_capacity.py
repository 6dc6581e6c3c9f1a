"""Capacity planning: its laws, its queues against a plain loop, its TCP against the event-driven
window, its sizes against real messages."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import codecs
from edgetrain.errors import ConfigError
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.messages import Contribute, pack
from edgetrain.fleet import devices, networks
from edgetrain.fleet.devices.speed import StepTimes
from edgetrain.fleet.networks import Burst, Direction, Profile
from edgetrain.jobs.capacity.averaging import Hubs
from edgetrain.jobs.capacity.estimate import CapacityQuestion, Kind, answer, answers
from edgetrain.jobs.capacity.flows import AccessStreams, Ports, StepTimesOfMany
from edgetrain.jobs.capacity.parcels import ExchangeSizes, contribution, reply
from edgetrain.jobs.capacity.question import Options, question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.reports.tables import left_out

BOARD = devices.load("raspberry-pi-4b")
CALM = dataclasses.replace(
    BOARD, step_jitter=None, slow_chance=None, throttle_after_s=None, throttle_factor=None
)
JITTERY = dataclasses.replace(CALM, step_jitter=0.2)
FP32 = codecs.parse("fp32")


def question(
    members=8,
    network="wan-200ms",
    local_steps=5,
    delay=20,
    elements=1000,
    step_s=0.05,
    hubs=None,
    device=CALM,
    codec="fp32",
    **more,
):
    network = networks.load(network) if isinstance(network, str) else network
    kind = Kind(device, step_s, network)
    coder = codecs.parse(codec)
    exchange = ExchangeSizes(local_steps, Delay(delay or 0, delay is None), elements, coder, coder)
    return CapacityQuestion(members, (kind,), exchange, hubs or Hubs(), **{"rounds": 40, **more})


def bare(rtt_ms, rate_mbit=0.0):
    way = Direction(delay_ms=rtt_ms / 2, rate_mbit=rate_mbit)
    return Profile("bare", "", way, way)


# -- laws -----------------------------------------------------------------------------------------


def test_one_member_without_a_network_only_computes():
    found = answer(question(1, "none", delay=0))
    assert found.wait_s == 0
    assert found.seconds == pytest.approx(40 * 5 * 0.05)
    assert found.speed_up == pytest.approx(1.0)
    assert found.bottleneck.startswith("computing")


def test_waiting_for_a_reply_is_a_round_trip_and_the_line():
    found = answer(question(8, bare(200, 100), local_steps=1, delay=0))
    sent, got = (parcel(1000, FP32).bytes for parcel in (contribution, reply))
    line_s = sum((size + -(-size // 1448) * 66) * 8e-8 for size in (sent, got))
    assert found.wait_s == pytest.approx(0.2 + line_s, rel=1e-6)


def test_a_delay_beyond_the_round_trip_waits_for_nothing():
    for delay, waits in ((5, False), (4, False), (3, True), (0, True)):
        found = answer(question(8, bare(195), delay=delay))  # the round trip is just under 4 steps
        assert (found.steady_wait_share > 0) is waits
        assert found.seconds >= 40 * 5 * 0.05 + 0.195  # the last reply is waited for


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([0, 100, 400]))
def test_more_delay_never_takes_longer(one, other, rtt_ms):
    few, many = sorted((one, other))
    slow, fast = (
        answer(question(9, bare(rtt_ms), delay=delay, elements=300, rounds=12))
        for delay in (few, many)
    )
    assert fast.wait_s <= slow.wait_s + 1e-9


@given(
    st.integers(1, 60), st.integers(1, 60), st.integers(0, 12), st.integers(0, 300),
    st.sampled_from([0.0, 1.0, 10.0]),
)  # fmt: skip
def test_more_members_never_take_less(one, other, delay, rtt_ms, rate_mbit):
    few, many = sorted((one, other))
    hubs = Hubs(rate_mbit=rate_mbit, message_s=1e-4, merge_bytes_per_s=1e8)
    small, large = (
        answer(question(n, bare(rtt_ms), delay=delay, hubs=hubs, rounds=8)) for n in (few, many)
    )
    assert large.seconds >= small.seconds - 1e-9


@given(st.integers(1, 60_000), st.integers(1, 60_000), st.integers(0, 12), st.integers(0, 300))
def test_more_bytes_never_take_less(one, other, delay, rtt_ms):
    few, many = sorted((one, other))
    small, large = (
        answer(question(5, bare(rtt_ms, 50), delay=delay, elements=n, rounds=8))
        for n in (few, many)
    )
    assert large.seconds >= small.seconds - 1e-9


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 12))
def test_a_longer_way_never_takes_less(one, other, delay):
    near, far = (
        answer(question(5, bare(rtt_ms, 50), delay=delay, rounds=8))
        for rtt_ms in sorted((one, other))
    )
    assert far.seconds >= near.seconds - 1e-9


def test_one_shard_and_no_gateway_is_the_flat_fleet():
    flat = answer(question(20, device=JITTERY, hubs=Hubs(rate_mbit=20)))
    same = answer(question(20, device=JITTERY, hubs=Hubs(1, 0, 0, rate_mbit=20)))
    assert same == flat


def test_gateways_of_one_member_that_cost_nothing_are_the_flat_fleet():
    flat = answer(question(20, bare(200), delay=3, device=JITTERY))
    each = answer(question(20, bare(200), delay=3, device=JITTERY, hubs=Hubs(gateways=20)))
    assert each.seconds == pytest.approx(flat.seconds, rel=1e-12)
    assert each.round_seconds == pytest.approx(flat.round_seconds)


def test_a_shared_uplink_without_a_limit_is_the_flat_fleet():
    flat = answer(question(20, delay=3, device=JITTERY))
    site = answer(question(20, delay=3, device=JITTERY, hubs=Hubs(uplinks=4)))
    assert site.seconds == pytest.approx(flat.seconds, rel=1e-12)


def test_a_shared_uplink_carries_one_after_the_other():
    """Ten replies leave one after the other, so the next contributions come one after the other,
    and the last of those is alone on the line: eleven lines a round."""
    shared = answer(question(20, "none", delay=0, hubs=Hubs(uplinks=2, uplink=bare(0, 10))))
    size = contribution(1000, FP32).bytes
    line_s = (size + -(-size // 1448) * 66) * 8e-7
    assert shared.round_seconds[-1] == pytest.approx(5 * 0.05 + 11 * line_s, rel=0.01)
    busy = 10 * line_s / shared.round_seconds[-1]
    assert shared.busy["sites' uplinks"] == pytest.approx(busy, rel=0.02)


def test_shards_share_the_hubs_work():
    slow = Hubs(rate_mbit=100)
    one = answer(question(50, "none", delay=0, elements=1_000_000, hubs=slow))
    four = answer(
        question(50, "none", delay=0, elements=1_000_000, hubs=dataclasses.replace(slow, shards=4))
    )
    assert four.wait_s == pytest.approx(one.wait_s / 4, rel=0.01)
    assert four.hub_received_bytes_per_s == pytest.approx(
        one.hub_received_bytes_per_s * one.seconds / four.seconds / 4, rel=0.01
    )


def test_a_port_sends_one_rounds_replies_after_those_of_the_last():
    """With a delay nobody waits at first; the port is the limit all the same."""
    asked = question(10, "none", delay=40, step_s=0.001, hubs=Hubs(rate_mbit=10), rounds=60)
    exchange = dataclasses.replace(asked.exchange, ratio=50.0, reply_ratio=1.0)
    found = answer(dataclasses.replace(asked, exchange=exchange))
    size = reply(1000, FP32).bytes
    line_s = (size + -(-size // 1448) * 66) * 8e-7
    assert found.seconds == pytest.approx(60 * 10 * line_s, rel=0.02)
    assert found.bottleneck.startswith("hub's port, sending")


def test_gateways_take_the_load_off_the_hub():
    slow = Hubs(rate_mbit=100, gateway_rate_mbit=100)
    flat = answer(question(100, "none", delay=0, elements=100_000, hubs=slow))
    tree = answer(
        question(
            100, "none", delay=0, elements=100_000, hubs=dataclasses.replace(slow, gateways=10)
        )
    )
    # In lines a round: 10 + 10 contributions and 10 + 10 replies, against 100 and 100.
    assert tree.wait_s == pytest.approx(flat.wait_s * 40 / 200, rel=0.01)


# -- rounds ---------------------------------------------------------------------------------------


def test_the_whole_fleet_waits_for_the_slowest():
    slow = dataclasses.replace(question(2, "none", delay=0).kinds[0], step_s=0.1)
    mixed = dataclasses.replace(
        question(8, "none", delay=0), kinds=(question().kinds[0],) * 3 + (slow,)
    )
    mixed = dataclasses.replace(
        mixed,
        kinds=tuple(dataclasses.replace(k, network=networks.load("none")) for k in mixed.kinds),
    )
    found = answer(mixed)
    assert found.seconds == pytest.approx(40 * 5 * 0.1)
    assert "slow members" in found.bottleneck


def test_a_deadline_closes_a_round_without_the_late():
    kinds = [question(network="none").kinds[0]] * 9
    kinds.append(dataclasses.replace(kinds[0], step_s=10.0))
    asked = dataclasses.replace(
        question(10, "none", delay=0, deadline_s=1.0), kinds=tuple(kinds), quorum=1, rounds=5
    )
    found = answer(asked)
    assert found.late > 0
    fast_round_s = np.median(found.round_seconds)
    assert fast_round_s < 10 * 5  # nobody but the slow one waits for the slow one
    patient = answer(dataclasses.replace(asked, quorum=10))
    assert patient.late == 0
    assert patient.seconds == pytest.approx(5 * 5 * 10.0)


def test_an_automatic_delay_hides_the_round_trip():
    found = answer(question(8, "wan-500ms", delay=None, rounds=60))
    assert 10 <= found.delay <= 13
    assert found.steady_wait_share == 0
    assert answer(question(8, "wan-500ms", delay=0, rounds=60)).steady_wait_share > 0.5


def test_rounds_that_would_get_longer_are_said_to_be_left_out():
    """With an automatic delay that a run cannot bear, the hub lets K grow; capacity does not."""
    short = question(8, bare(4000), delay=None, rounds=12)
    assert "longer rounds than 5 steps" in answer(short).left_out
    assert "local_steps=10" in answer(short).left_out
    for asked in (question(8, bare(4000), delay=0, rounds=12), question(8, bare(50), delay=None)):
        assert answer(asked).left_out == ""


def test_that_slow_start_ends_early_where_delays_vary_is_said_to_be_left_out():
    """1.3 MB a round over 4g-good: 400 ms a step in the simulator, 178 planned."""
    assert "slow start" in answer(question(8, "4g-good", elements=325_000)).left_out
    for network, elements in (("4g-good", 10_000), ("wan-200ms", 325_000), ("wifi", 325_000)):
        assert answer(question(8, network, elements=elements)).left_out == ""


def test_what_figures_leave_out_is_a_line_below_the_table_that_fits_a_terminal():
    said = "members would make rounds longer than 5 steps, which is left out (try local_steps=10)"
    rows = [{"members": 10, "left_out": ""}, {"members": 1000, "left_out": said}]
    lines = left_out(rows)
    assert " ".join(line.strip() for line in lines) == f"left out: {said}, with 1,000 members"
    assert max(map(len, lines)) <= 80
    assert "with" not in " ".join(left_out(rows[1:]))
    assert left_out(rows[:1]) == []


def test_synchronous_sgd_waits_at_each_step():
    sync, avg = (
        answer(question(8, bare(200), local_steps=local_steps, delay=0, rounds=200 // local_steps))
        for local_steps in (1, 5)
    )
    assert sync.wait_s == pytest.approx(5 * avg.wait_s)


def test_an_answer_is_deterministic_in_its_question():
    asked = question(200, "4g-bad", device=JITTERY)
    assert answer(asked) == answer(asked)
    assert answer(dataclasses.replace(asked, seed=1)).seconds != answer(asked).seconds


def test_a_table_has_the_same_fleet_in_other_sizes():
    asked = question(8, hubs=Hubs(gateways=100, gateway_rate_mbit=1000, rate_mbit=1000))
    found = answers(asked, (10, 1000))
    assert [each.members for each in found] == [10, 1000]
    assert found[1] == answer(dataclasses.replace(asked, members=1000))


def test_a_hundred_thousand_members_take_seconds():
    hubs = Hubs(shards=4, gateways=100, gateway_rate_mbit=1000, rate_mbit=10_000, message_s=1e-5)
    began = time.process_time()
    found = answer(question(100_000, "home-fixed", device=JITTERY, hubs=hubs, rounds=20))
    assert time.process_time() - began < 60 * 20 / 100
    assert len(found.round_seconds) == 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"members": 0}, "members = 0"),
        ({"rounds": 0}, "rounds = 0"),
        ({"hubs": Hubs(shards=0)}, "shards = 0"),
        ({"hubs": Hubs(gateways=9)}, "gateways = 9 .*0 to 8"),
        ({"hubs": Hubs(gateways=2, uplinks=2)}, "exclude each other"),
        ({"quorum": 9}, "quorum = 9"),
        ({"step_s": 0.0}, "no speed .*pace_s"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        answer(question(**change))


# -- queues ---------------------------------------------------------------------------------------


def by_hand(arrivals, service):
    """First come first served, one message after the other, however the rounds lie."""
    free, ends = -np.inf, {}
    for key in sorted(arrivals, key=lambda key: (arrivals[key], key)):
        free = ends[key] = max(arrivals[key], free) + service
    return ends


TIMES = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@given(TIMES, st.integers(1, 3))
def test_a_queue_is_first_come_first_served(arrivals, ports):
    ports = min(ports, len(arrivals))
    served = Ports(len(arrivals), ports, 2.0)
    first = np.array(arrivals, float)
    begin, end = served.serve(first, first)
    for port in range(ports):
        here = {i: first[i] for i in range(len(first)) if served.port[i] == port}
        assert {i: end[i] for i in here} == by_hand(here, 2.0)
    assert (begin == end - 2.0).all()


@given(TIMES, st.lists(st.integers(0, 20), min_size=12, max_size=12))
def test_a_round_queues_with_those_of_earlier_ones_that_come_later(first, gaps):
    """The second round's messages may overtake the first's; the port is never idle over work."""
    served = Ports(len(first), 1, 2.0)
    one = np.array(first, float)
    two = one + np.array(gaps[: len(first)], float)
    served.serve(one, one)
    _, end = served.serve(two, two)
    arrivals = {(0, i): t for i, t in enumerate(one)} | {(1, i): t for i, t in enumerate(two)}
    done = by_hand(arrivals, 2.0)
    assert end.max() == max(done[1, i] for i in range(len(two)))


def test_a_message_is_passed_on_while_it_arrives():
    served = Ports(2, 1, 1.0)
    _, end = served.serve(np.array([0.0, 0.0]), np.array([5.0, 5.0]), tail_s=0.5)
    assert end.tolist() == [5.5, 5.5]  # as fast as it comes: the port was ready long before


# -- connections ----------------------------------------------------------------------------------


def event_driven(profile, size, count, gap_s):
    """What messages of one size take over a simulated connection, `gap_s` from one to the next."""
    pytest.importorskip("greenlet")
    from edgetrain.training.simulated.virtual import World
    from edgetrain.training.simulated.wires import SimulatedNetwork

    world = World()
    network = SimulatedNetwork(world, [profile])
    sent, there = [], []

    def hub():
        while len(there) < count:
            there.extend(world.clock() for _ in network.hub.poll(1.0))

    def member():
        wire = network.connect(0)
        for _ in range(count):
            sent.append(world.clock())
            wire.send([bytes(size - 9)])
            world.sleep(gap_s)

    world.start("hub", hub)
    world.start("member", member)
    while world.step():
        pass
    return [arrival - departure for departure, arrival in zip(sent, there, strict=True)]


@pytest.mark.parametrize("rate_mbit", [0.0, 20.0, 100.0])
@pytest.mark.parametrize("rtt_ms", [50, 200])
@pytest.mark.parametrize(
    ("size", "gap_s"),
    [
        (19_000, 0.1),
        (19_000, 1.0),
        (40_000, 0.35),
        (400_000, 0.5),
        (400_000, 3.0),
        (4_000_000, 3.0),
    ],
)
def test_a_connection_is_as_fast_as_the_event_driven_one(rate_mbit, rtt_ms, size, gap_s):
    """Slow start, the window of messages in flight, idle restart, the line: in sum. Large messages
    on long lines are coarser: a plan knows no queue that ends slow start early. No pause is as long
    as a timeout to the tick (0.3 s at 50 ms): one would halve the window and the other not."""
    profile = bare(rtt_ms, rate_mbit)
    wanted = event_driven(profile, size, 8, gap_s)
    stream = AccessStreams([profile.up], np.array([rtt_ms / 1000]), np.random.default_rng(0))
    took = []
    for place in range(8):
        at = np.array([1.0 + place * gap_s])
        took.append(float((stream.send(at, size)[1] - at)[0]))
    large = size > 100_000 and rtt_ms > 100
    assert sum(took) == pytest.approx(sum(wanted), rel=0.4 if large else 0.2)
    assert took[0] == pytest.approx(wanted[0], rel=0.06)


def test_a_link_with_a_larger_first_window_sends_more_at_once():
    ways = [Direction(delay_ms=50, first_window=first) for first in (0, 20, 30)]
    stream = AccessStreams(ways, np.full(3, 0.1), np.random.default_rng(0))
    for at in (1.0, 9.0):  # a pause takes a window back to the first
        _, last = stream.send(np.full(3, at), 43_000)
        assert last - at == pytest.approx([0.15, 0.15, 0.05], abs=1e-6)


def test_loss_costs_round_trips_and_timeouts():
    rng = np.random.default_rng(0)
    way = Direction(delay_ms=50, rate_mbit=100, loss_percent=5)
    stream = AccessStreams([way] * 20_000, np.full(20_000, 0.1), rng)
    _, last = stream.send(np.zeros(20_000), 10 * 1448)
    late = last - np.median(last[last < 0.06])
    hit = late > 1e-6
    assert hit.mean() == pytest.approx(1 - 0.95**10, rel=0.05)
    assert 0.09 < np.median(late[hit]) < 0.11
    # A repetition that is lost too, or the last segment, which nothing behind it misses.
    assert (late > 0.3).mean() == pytest.approx(hit.mean() * 0.05 + 0.05, rel=0.2)


def test_a_burst_is_one_hole():
    burst = Burst(enter_percent=0.25, leave_percent=25)
    ways = [
        Direction(delay_ms=50, burst=burst),
        Direction(delay_ms=50, loss_percent=burst.mean_percent),
    ]
    hits = []
    for way in ways:
        stream = AccessStreams([way] * 20_000, np.full(20_000, 0.1), np.random.default_rng(1))
        _, last = stream.send(np.zeros(20_000), 10 * 1448)
        hits.append((last > 0.051).mean())
    assert hits[0] == pytest.approx(hits[1] / 4, rel=0.15)


# -- steps ----------------------------------------------------------------------------------------


def test_steps_have_the_moments_of_a_device_that_is_emulated():
    device = dataclasses.replace(CALM, step_jitter=0.3, slow_chance=0.1, slow_factor=3.0)
    one = [StepTimes(device, 0.1, 0, member) for member in range(3000)]
    for count in (1, 5):
        drawn = StepTimesOfMany([device] * 3000, [0.1] * 3000, np.random.default_rng(0)).take(count)
        wanted = np.array([sum(times(s) for s in range(count)) for times in one])
        assert drawn.mean() == pytest.approx(wanted.mean(), rel=0.02)
        assert drawn.std() == pytest.approx(wanted.std(), rel=0.1)


def test_a_board_without_a_fan_gets_slow():
    hot = dataclasses.replace(CALM, throttle_after_s=10.0, throttle_factor=2.0)
    found = answer(question(4, "none", device=hot, step_s=0.1))
    assert found.round_seconds[0] == pytest.approx(0.5)
    assert found.round_seconds[-1] == pytest.approx(1.0)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk(0.01) | q2"])
@pytest.mark.parametrize("elements", [1, 4810, 3_000_000])
def test_a_parcel_is_what_is_sent(codec, elements):
    """The frames of every part, each behind its ZMTP flag and length."""
    codec = codecs.parse(codec)
    parts = [codec.part_elements] * (elements // codec.part_elements)
    parts += [elements % codec.part_elements] * bool(elements % codec.part_elements)
    total = 0
    for part, size in enumerate(parts):
        payload = bytes(codec.max_bytes(size))
        frames = pack(Contribute(100, part, len(parts), 1.0, 100, (1 << 64) - 1, 20, payload))
        total += sum(len(frame) + (2 if len(frame) < 256 else 9) for frame in frames)
    assert contribution(elements, codec).bytes == total
    assert contribution(elements, codec).parts == len(parts)


def test_a_measured_ratio_stands_in_for_the_most():
    parcel = contribution(1_000_000, codecs.parse("topk(0.01) | q2"), ratio=100.0)
    assert parcel.bytes == pytest.approx(40_000, rel=0.01)


# -- against the simulator ------------------------------------------------------------------------


SIMULATED = {
    "sync-sgd, 200 ms": ("strategy=sync-sgd", "delay=0", "network=wan-200ms"),
    "fedavg, 500 ms": ("strategy=fedavg", "delay=0", "network=wan-500ms"),
    "dga, 500 ms": ("strategy=dga(paper)", "delay=12", "network=wan-500ms"),
    "fedavg, uplink": (
        "strategy=fedavg", "delay=0", "network=ethernet", "fleet.sites=home-fixed: 0-7",
    ),
    "fedavg, loss": ("strategy=fedavg", "delay=0", "network=4g-medium"),
}  # fmt: skip
"""As in benchmarks/capacity.py."""


@pytest.mark.parametrize("name", SIMULATED)
def test_a_plan_agrees_with_the_event_driven_simulation(name, tmp_path):
    """Seconds per step, within 7 % (20 % with loss, in the mean of many draws); the bytes too."""
    pytest.importorskip("greenlet")
    from edgetrain.training.simulated import simulation

    words = ("members=8", "pace_s=0.05", "steps=100", "optimizer={ name = 'sgd', lr = 0.2 }")
    job = load(None, [*words, *SIMULATED[name]])
    folder = tmp_path / "run"
    folder.mkdir()
    summary = simulation.run(plan(job), folder)
    rounds = 100 // summary["local_steps"]
    question = question_of(
        resolve(job), Options(rounds=rounds, hub_rate_mbit=0, merge_bytes_per_s=0)
    )
    found = answer(question)
    tolerance, draws = (0.20, 20) if "loss" in name else (0.07, 1)
    planned = [
        answer(dataclasses.replace(question, seed=seed)).seconds_per_step for seed in range(draws)
    ]
    expected = sum(planned) / draws
    assert 1 / summary["steps_per_second"] == pytest.approx(expected, rel=tolerance)
    assert summary["sent_bytes"] == pytest.approx(8 * found.member_sent_bytes, rel=0.03)


def test_long_replies_share_a_line_as_simulated(tmp_path):
    """They end together, so that the next contributions come together, too: 8 + 8 lines a round."""
    pytest.importorskip("greenlet")
    from edgetrain.training.simulated import simulation

    line = "[both]\nrate_mbit = 20\ndelay_ms = 10\n[source]\nrate_mbit = 'x'\ndelay_ms = 'x'\n"
    (tmp_path / "line.toml").write_text(f"title = 'a line'\n{line}")
    words = ("task=edgetrain.tasks:sized", "data.elements=75000", "members=8", "steps=6",
             "network=none", f"fleet.sites={tmp_path}/line.toml: 0-7", "pace_s=0.01",
             "local_steps=1", "strategy=fedavg")  # fmt: skip
    job = load(None, words)
    (folder := tmp_path / "run").mkdir()
    summary = simulation.run(plan(job), folder)
    options = Options(rounds=6, parameters=75_000, hub_rate_mbit=0, merge_bytes_per_s=0)
    found = answer(question_of(resolve(job), options))
    assert 1 / summary["steps_per_second"] == pytest.approx(found.seconds_per_step, rel=0.05)


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.real
def test_the_command_says_what_the_fleet_waits_for(tmp_path, monkeypatch, capsys):
    from edgetrain.__main__ import main

    monkeypatch.chdir(tmp_path)
    words = ["--parameters", "11e6", "--step-seconds", "0.4", "--members", "50", "--rounds", "20"]
    words += ["--hub-rate", "0", "--merge-rate", "0"]
    assert main(["capacity", *words, "network=wan-200ms", "delay=20"]) == 0
    said = capsys.readouterr().out
    assert "50 members (raspberry-pi-4b, 400 ms a step, wan-200ms)" in said
    assert "44.0 MB up" in said
    assert "bottleneck      members' uplinks:" in said
    assert "100,000" in said
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"job.toml", "summary.json", "capacity.png"}


@pytest.mark.real
def test_the_command_answers_in_json_without_torch(tmp_path):
    import json
    import subprocess
    import sys

    from command_line import environment

    code = """
import sys
from edgetrain.__main__ import main
main(["capacity", "--parameters", "1000", "--step-seconds", "0.1", "--rounds", "5", "--json"])
assert "torch" not in sys.modules and "greenlet" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["members"] for row in found["table"]] == [10, 100, 1_000, 10_000, 100_000]
    assert len(found["round_seconds"]) == 5
    assert found["bottleneck"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parameters", "1.5"], "not a whole number"),
        (["--parameters", "9", "device=host,raspberry-pi-4b"], "has no speed"),
        (["--parameters", "9", "--step-seconds", "1", "--gateways", "5"], "gateways = 5"),
        (["--parameters", "9", "--step-seconds", "1", "--uplink", "wify"], "did you mean 'wifi'"),
        (["--parameters", "9", "--step-seconds", "1", "codec=int9"], "did you mean 'int8'"),
        (
            ["task=edgetrain.tasks:char_lm", "data.width=65536", "data.heads=16"],
            "parameters: with their gradients they take",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    from edgetrain.__main__ import main

    monkeypatch.chdir(tmp_path)
    try:
        status = main(["capacity", *words])
    except SystemExit as ended:  # argparse's own refusal
        status = ended.code
    assert status == 2
    assert says in capsys.readouterr().err
