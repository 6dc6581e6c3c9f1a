"""Messages over simulated links: when they arrive, in which order, and what they cost."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgetrain.networks import Burst, Direction, Fault, Profile, Site
from edgetrain.networks.fluid import HEADERS
from edgetrain.networks.window import MSS
from edgetrain.simulator.virtual import SECOND, World
from edgetrain.simulator.wires import SimulatedNetwork, wire_bytes
from edgetrain.transport import SILENCE_S


def both_ways(**figures):
    way = Direction(**figures)
    return Profile("test", up=way, down=way)


def sent(profiles, messages, **network):
    """[(member, second, frames)] of what reached the hub; messages are the same of what left."""
    world = World()
    links = SimulatedNetwork(world, profiles, **network)
    wires = {}

    def connect(member):
        wires[member] = links.connect(member)

    for member in range(len(profiles)):
        world.start(f"m{member}", lambda m=member: connect(m))
    while world.step():
        pass
    start, arrived = world.now, []

    def read():
        for sender, frames in links.hub.poll(3600.0):
            member = next(m for m, wire in wires.items() if wire.name == sender)
            arrived.append((member, (world.now - start) / SECOND, frames))

    def reads():
        while len(arrived) < len(messages) and world.now < start + 7200 * SECOND:
            read()

    world.start("hub", reads, start)
    for member, second, frames in messages:
        at = start + round(second * SECOND)
        world.at(at, lambda m=member, f=frames: wires[m].send(f))
    links.start_faults()
    while world.step():
        pass
    return arrived, wires, links


def test_frames_are_counted_with_their_headers():
    assert wire_bytes([b"J", b"x" * 255]) == 1 + 2 + 255 + 2
    assert wire_bytes([b"x" * 256, memoryview(bytes(70_000))]) == 256 + 9 + 70_000 + 9


def test_a_small_message_takes_the_way_up():
    arrived, _, _ = sent([both_ways(delay_ms=40.0)], [(0, 0.0, [b"hello"])])
    assert arrived == [(0, pytest.approx(0.040), [b"hello"])]


def test_a_rate_and_slow_start_cost_what_they_cost():
    size = 50_000
    [(_, fast, _)], _, _ = sent([both_ways(delay_ms=50.0)], [(0, 0.0, [bytes(size)])])
    # 10 segments, then twice as many: 3 flights of 14,480, 28,960 and the rest.
    assert fast == pytest.approx(0.050 + 2 * 0.100, abs=0.001)
    [(_, slow, _)], _, _ = sent([both_ways(rate_mbit=1.0)], [(0, 0.0, [bytes(size)])])
    segments = -(-size // MSS)
    assert slow == pytest.approx(8e-6 * (size + segments * (HEADERS + 14)), rel=0.02)


def test_members_of_a_site_share_its_uplink():
    uplink = both_ways(rate_mbit=8.0)
    near = both_ways(rate_mbit=1000.0)
    alone, _, _ = sent([near] * 4, [(0, 0.0, [bytes(100_000)])], sites=[Site(uplink, (0, 1, 2, 3))])
    messages = [(m, 0.0, [bytes(100_000)]) for m in range(4)]
    together, _, _ = sent([near] * 4, messages, sites=[Site(uplink, (0, 1, 2, 3))])
    last = max(seconds for _, seconds, _ in together)
    assert last == pytest.approx(4 * alone[0][1], rel=0.1)
    apart, _, _ = sent([near] * 4, messages)
    assert max(seconds for _, seconds, _ in apart) < alone[0][1] / 10


directions = st.builds(
    Direction,
    delay_ms=st.sampled_from([0.0, 1.0, 30.0, 200.0]),
    rate_mbit=st.sampled_from([0.0, 0.5, 10.0, 1000.0]),
    loss_percent=st.sampled_from([0.0, 1.0, 20.0]),
    jitter_ms=st.just(0.0),
)


@settings(max_examples=60, deadline=None)
@given(
    up=directions,
    down=directions,
    messages=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 300), st.integers(0, 60_000)),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 3),
    shared=st.booleans(),
)
def test_everything_arrives_once_whole_and_in_order(up, down, messages, seed, shared):
    profile = Profile("test", up=up, down=down)
    sites = [Site(both_ways(rate_mbit=5.0, delay_ms=5.0), (0, 1))] if shared else []
    order = sorted(messages, key=lambda message: message[1])
    numbered = [
        (member, at / 1000, [b"%d" % number, bytes(size)])
        for number, (member, at, size) in enumerate(order)
    ]
    arrived, wires, _ = sent([profile] * 2, numbered, seed=seed, sites=sites)
    for member in (0, 1):
        here = [frames for who, _, frames in arrived if who == member]
        assert here == [frames for who, _, frames in numbered if who == member]
        stream = wires[member].up
        assert stream.received_bytes == sum(map(wire_bytes, here))
        assert stream.sent_bytes == stream.received_bytes + stream.repeated_bytes
    assert arrived == sent([profile] * 2, numbered, seed=seed, sites=sites)[0]


def test_loss_costs_time_and_bytes():
    messages = [(0, 0.0, [bytes(200_000)])]
    [(_, clean, _)], _, _ = sent([both_ways(delay_ms=20.0)], messages)
    burst = Burst(enter_percent=2.0, leave_percent=30.0)
    [(_, lossy, _)], wires, _ = sent([both_ways(delay_ms=20.0, burst=burst)], messages)
    assert lossy > clean
    assert wires[0].up.repeated_bytes > 0


def test_a_link_that_is_down_holds_what_was_sent_until_tcp_tries_again():
    fault = Fault("down", 0.1, 2.0, (0,))
    messages = [(0, 0.0, [b"before"]), (0, 0.2, [b"during"]), (1, 0.2, [b"other"])]
    arrived, _, _ = sent([both_ways(delay_ms=10.0)] * 2, messages, faults=[fault])
    at = {frames[0]: seconds for _, seconds, frames in arrived}
    assert at[b"before"] == pytest.approx(0.010)
    assert at[b"other"] == pytest.approx(0.210)
    assert 2.1 < at[b"during"] < 2.1 + 2.0


@settings(max_examples=40, deadline=None)
@given(
    faults=st.lists(
        st.builds(
            Fault,
            kind=st.sampled_from(["down", "rate"]),
            at_s=st.floats(0, 1),
            for_s=st.floats(0.001, 1),
            members=st.sampled_from([(0,), ()]),
            share=st.just(0.1),
        ),
        max_size=3,
    ),
    times=st.lists(st.floats(0, 2), min_size=2, max_size=12),
)
@example([Fault("down", 0.10, 0.10, (0,))], [0.09, 0.15, 0.21])  # under way, queued, just after
def test_faults_change_no_order(faults, times):
    messages = [(0, at, [b"%d" % number]) for number, at in enumerate(sorted(times))]
    arrived, _, _ = sent([both_ways(delay_ms=30.0, rate_mbit=1.0)], messages, faults=faults)
    assert [frames for _, _, frames in arrived] == [frames for _, _, frames in messages]


def test_a_device_without_power_is_given_up_when_tcp_gives_up():
    world = World()
    links = SimulatedNetwork(world, [both_ways(delay_ms=10.0)])
    seen = []

    def live():
        wire = links.connect(0)
        wire.send([b"hello"])
        world.sleep(1.0)
        wire.power_off()
        wire.send([b"never"])
        seen.append(links.hub.send(wire.name, [b"lost"]))
        world.sleep(SILENCE_S + 0.1)
        seen.append(links.hub.send(wire.name, [b"lost"]))
        seen.append(wire.receive(1.0))

    world.start("m0", live)
    while world.step():
        pass
    assert seen == [True, False, None]
    assert [frames for _, frames in links.hub.poll(0.0)] == [[b"hello"]]
    assert not links.hub.send(b"nobody", [b"x"])
