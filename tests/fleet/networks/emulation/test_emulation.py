"""Each backend with real traffic, faults and sites; it leaves nothing behind, even if killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from network_spaces import alive, all_gone, made_by, wait_for

from edgetrain.cli.compare import DEMO
from edgetrain.errors import ConfigError, NetworkError
from edgetrain.fleet.networks import Direction, Fault, Profile, Site, emulate, load
from edgetrain.fleet.networks.emulation import fabric, probe
from edgetrain.fleet.networks.emulation.emulation import Attachment, Emulation
from edgetrain.fleet.networks.emulation.measure import Bench, MeasuringEnd, line_mbit, one_way
from edgetrain.fleet.networks.emulation.packet import member_frames
from edgetrain.fleet.networks.profile import BARE
from edgetrain.jobs import reading

pytestmark = pytest.mark.real

PACKETS, WHY_NOT = probe.packets_possible()
needs_packets = pytest.mark.skipif(not PACKETS, reason=f"no emulated hosts: {WHY_NOT}")
carriers = pytest.mark.parametrize(
    "backend", ["stream", pytest.param("packet", marks=needs_packets)]
)


def both(**figures: float) -> Profile:
    return Profile("test", "", Direction(**figures), Direction(**figures))


def rtts_of(bench: Bench) -> list[float]:
    """A round trip of each client, in ms, on a connection that stands."""
    return [client.do("rtt", count=2, gap_s=0.001)[-1] for client in bench.clients]


def medians(turns: list[list[float]]) -> list[float]:
    """Of each client."""
    return [statistics.median(column) for column in zip(*turns, strict=True)]


def nearest(expected: float, measure: Callable[[], float], tries: int = 5) -> float:
    """The nearest of some measurements, each of which a busy machine may hold up."""
    found: list[float] = []
    while len(found) < tries and not any(each == pytest.approx(expected, 0.05) for each in found):
        found.append(measure())
    return min(found, key=lambda each: abs(each - expected))


@carriers
def test_delay_and_rate_are_there(backend: str) -> None:
    profile = Profile("test", "", Direction(delay_ms=30, rate_mbit=16), Direction(delay_ms=10))
    bare = Profile("bare", "", Direction(), Direction())
    with emulate([profile, profile, bare], backend=backend) as net:
        with Bench(net, (0, 1, 2)) as bench:
            # In turn, so that the round trips of all links suffer alike from a busy machine.
            turns = [rtts_of(bench) for _ in range(10)]
            mbit = nearest(
                16 * 1448 / 1514,
                lambda: line_mbit(bench.client.do("push", seconds=1.5), skip=0.5),
            )
        report = net.report()
    for first, second, plain in (map(min, zip(*turns, strict=True)), medians(turns)):
        assert min(first, second) >= 40
        # A busy machine delivers late, and the emulator says by how much, each way.
        assert max(first, second) - plain < 46 + 2 * report["late_ms_p99"]
    assert mbit == pytest.approx(16 * 1448 / 1514, rel=0.1)
    assert report["backend"] == backend
    assert report["deliveries"] > 100
    assert sum(report["late_histogram_ms"].values()) == report["deliveries"]
    assert set(report) >= {"reason", "kernel", "congestion", "late_ms_p99", "late_limit_ms"}
    on_time = report["late_ms_p99"] <= report["late_limit_ms"]
    assert report["timing_ok"] == (on_time and not report.get("ring_dropped"))
    last = net.report()
    assert last["deliveries"] >= report["deliveries"]
    assert net.report() is last  # kept after the end
    net.close()


@carriers
def test_large_messages_arrive_whole_in_both_ways(backend: str) -> None:
    with emulate([both(delay_ms=1)], backend=backend) as net, Bench(net) as bench:
        (seconds,) = bench.client.do("messages", size=20_000_000, count=1, fresh=True)
        assert seconds < 10
        assert bench.client.do("pull", seconds=0.3)[-1][1] > 10_000_000


@needs_packets
def test_loss_and_order_of_packets() -> None:
    profile = both(delay_ms=20, jitter_ms=4, loss_percent=10)
    with emulate([profile], backend="packet") as net, Bench(net) as bench:
        seen = one_way(bench, 4000, 0.0002)
    assert seen.in_order
    assert 8 < seen.lost_percent < 12
    # Jitter is even around the delay; a busy machine makes some of the delays longer.
    assert 18 < statistics.median(seen.delays_ms) < 22


def send_while_it_stands_still(net: Emulation, bench: Bench, count: int) -> None:
    bench.client.do("echoes", count=1, gap_s=0.001)
    os.kill(net.pid or 0, signal.SIGSTOP)
    try:
        bench.client.do("datagrams", count=count, gap_s=0.0, size=64)
    finally:
        os.kill(net.pid or 0, signal.SIGCONT)
    bench.client.do("echoes", count=1, gap_s=0.01)


@needs_packets
def test_a_burst_that_waits_for_the_emulator_is_not_lost() -> None:
    """A message of 400 kB leaves in 140 packets at once where the round trip is long."""
    with emulate([both(delay_ms=1)], backend="packet") as net, Bench(net) as bench:
        send_while_it_stands_still(net, bench, 400)
        assert len(bench.server.do("arrivals")) == 400
        assert net.report()["ring_dropped"] == 0


@needs_packets
def test_an_emulator_that_drops_what_it_is_too_slow_for_is_not_trusted() -> None:
    with emulate([both(delay_ms=1)], backend="packet") as net, Bench(net) as bench:
        send_while_it_stands_still(net, bench, 4000)
        report = net.report()
    assert report["ring_dropped"] > 0
    assert report["timing_ok"] is False


def test_rings_of_a_large_fleet_are_small() -> None:
    assert member_frames(1) == member_frames(16) == 512
    assert member_frames(32) == 256
    assert member_frames(64) == member_frames(1000) == 128


def test_loss_costs_the_stream_what_it_costs_tcp() -> None:
    with emulate([both(delay_ms=20, loss_percent=2)], backend="stream") as net, Bench(net) as bench:
        (seconds,) = bench.client.do("messages", size=1_000_000, count=1, fresh=False)
    assert seconds > 1  # 0.2 s without loss; Mathis says 3.5 s


@needs_packets
def test_corrupted_and_duplicated_packets_do_no_harm() -> None:
    profile = both(delay_ms=1, corrupt_percent=2, duplicate_percent=5)
    with emulate([profile], backend="packet") as net, Bench(net) as bench:
        (seconds,) = bench.client.do("messages", size=300_000, count=1, fresh=True)
        assert seconds < 20


@needs_packets
def test_a_site_shares_its_uplink() -> None:
    site = Site(both(delay_ms=5, rate_mbit=10), (0, 1))
    with emulate([both(delay_ms=1)] * 3, backend="auto", sites=[site]) as net:
        assert net.backend == "packet"
        with Bench(net, (0, 1, 2)) as bench:
            of_site, _, alone = map(min, zip(*[rtts_of(bench) for _ in range(10)], strict=True))

            def both_push() -> float:
                for client in bench.clients[:2]:
                    client.begin("push", seconds=1.5)
                return sum(line_mbit(c.result(), skip=0.5) for c in bench.clients[:2])

            total = nearest(10 * 1448 / 1514, both_push)
    assert of_site >= 12
    assert alone >= 1.95  # a packet may leave a timer tick early
    assert of_site - alone == pytest.approx(10, abs=2)
    assert total == pytest.approx(10 * 1448 / 1514, rel=0.2)


@contextlib.contextmanager
def between(server: Attachment, client: Attachment, to: str) -> Iterator[MeasuringEnd]:
    """A client that measures the way to a server, both at the address `to`."""
    ends = [
        MeasuringEnd(replace(server, hubs=(to,)), "server"),
        MeasuringEnd(replace(client, hubs=(to,)), "client"),
    ]
    try:
        yield ends[1]
    finally:
        for end in ends:
            end.close()


@carriers
def test_each_member_reaches_each_hub_over_its_own_link(backend: str) -> None:
    links = [both(delay_ms=5), both(delay_ms=20)]
    with emulate(links, backend=backend, hubs=[BARE, BARE, BARE]) as net:
        assert len({*net.hub_addresses}) == 3
        for hub in range(3):
            for member, link in enumerate(links):
                to, own = net.attachment(member).hubs[hub], net.hub_attachment(hub)
                server = MeasuringEnd(own, "server")
                client = MeasuringEnd(replace(net.attachment(member), hubs=(to,)), "client")
                try:
                    took = min(client.do("rtt", count=5, gap_s=0.001))
                finally:
                    client.close()
                    server.close()
                assert 0.99 * link.rtt_ms <= took < link.rtt_ms + 9  # clocks are slewed


@needs_packets
def test_hubs_have_links_and_members_reach_each_other() -> None:
    links, hubs = [both(delay_ms=5), both(delay_ms=10)], [BARE, both(delay_ms=20, rate_mbit=8)]
    with emulate(links, backend="packet", hubs=hubs) as net:
        one, other = net.attachment(0), net.attachment(1)
        with between(net.hub_attachment(1), one, one.hubs[1]) as client:
            assert 50 <= min(client.do("rtt", count=5, gap_s=0.001)) < 60
            mbit = nearest(
                8 * 1448 / 1514, lambda: line_mbit(client.do("push", seconds=1.5), skip=0.5)
            )
            assert mbit == pytest.approx(8 * 1448 / 1514, rel=0.2)
        with between(other, one, f"tcp://{other.host}:7001") as client:
            assert 30 <= min(client.do("rtt", count=5, gap_s=0.001)) < 39


@needs_packets
def test_nobody_connects_to_a_member_behind_nat() -> None:
    with emulate([both(delay_ms=1)] * 2, backend="packet", nat=[1]) as net:
        one, other = net.attachment(0), net.attachment(1)
        with between(one, other, f"tcp://{one.host}:7001") as client:
            assert client.do("rtt", count=1, gap_s=0.001)
        to = f"tcp://{other.host}:7001"
        with between(other, one, to) as client, pytest.raises(NetworkError, match="timed out"):
            client.do("rtt", count=1, gap_s=0.001)


@pytest.mark.parametrize("backend", ["none", "stream", "tc"])
def test_what_a_backend_cannot_do_for_nodes_is_refused(backend: str) -> None:
    for asked in ({"nat": [0]}, {"hubs": [both(delay_ms=1)]}):
        if backend == "tc" and "hubs" in asked:
            continue
        with pytest.raises(NetworkError, match=f"'{backend}'.*backend packet"):
            emulate([both(delay_ms=1)], backend=backend, **asked)


@carriers
def test_a_link_goes_down_and_comes_back(backend: str) -> None:
    faults = (Fault("down", 0.0, 0.5, (0,)),)
    emulation = emulate([both(delay_ms=1)] * 2, backend=backend, faults=faults)
    with emulation as net, Bench(net, (0, 1)) as bench:
        for client in bench.clients:
            client.do("rtt", count=2, gap_s=0.001)
        net.start_faults()
        bench.clients[0].begin("messages", size=1000, count=1, fresh=backend == "packet")
        (free,) = bench.clients[1].do("messages", size=1000, count=1, fresh=False)
        (held,) = bench.clients[0].result()
    assert free < 0.4
    assert held > 0.35


@carriers
def test_a_rate_drops_for_a_time(backend: str) -> None:
    faults = (Fault("rate", 0.0, 60, share=0.25),)
    profile = both(delay_ms=1, rate_mbit=40)
    with emulate([profile], backend=backend, faults=faults) as net, Bench(net) as bench:
        net.start_faults()
        mbit = nearest(
            10 * 1448 / 1514,
            lambda: line_mbit(bench.client.do("push", seconds=1.5), skip=0.6),
        )
    assert mbit == pytest.approx(10 * 1448 / 1514, rel=0.2)


def test_none_is_the_hub_as_it_is() -> None:
    with emulate([load("none")]) as net:
        assert net.backend == "none"
        assert net.attachment(0).address == net.hub_address == net.hub_attachment().address
        assert net.report()["timing_ok"]
    assert emulate([load("none")], ("127.0.0.1", 4711)).hub_address == "tcp://127.0.0.1:4711"


@carriers
def test_an_attachment_travels_by_pickle(backend: str) -> None:
    with emulate([both(delay_ms=1)], backend=backend) as net:
        attachment = pickle.loads(pickle.dumps(net.attachment(0)))
        assert attachment == net.attachment(0)
        assert attachment.address.startswith("tcp://")
    if attachment.namespace is not None:
        with pytest.raises(NetworkError, match="has ended"):
            attachment.enter()


def test_the_demonstrations_run_on_packets_where_namespaces_are_allowed() -> None:
    job = reading.load(None, DEMO)
    assert job.fleet.backend == "auto"
    backend, reason = probe.choose(job.fleet.backend, [load(job.fleet.network)])
    assert backend == ("packet" if PACKETS else "stream")
    assert WHY_NOT in reason


_STATES = """
import os, psutil
from edgetrain.fleet.networks.emulation import fabric, linux
fabric.become_able()
for _ in range(400):
    hosts = fabric.build(2, "reno")
    core = os.open("/proc/self/ns/net", os.O_RDONLY)
    for host in hosts:
        linux.setns(host.namespace, linux.CLONE_NEWNET)
        print(psutil.net_if_stats()["eth0"].isup)
    linux.setns(core, linux.CLONE_NEWNET)
    for fd in (core, *(host.namespace for host in hosts)):
        os.close(fd)
"""


@needs_packets
def test_links_run_as_soon_as_there_are_hosts() -> None:
    """One of 300 is called running up to a second after it came up."""
    seen = subprocess.run([sys.executable, "-c", _STATES], capture_output=True, text=True)
    assert seen.stdout.split() == ["True"] * 800, seen.stderr


@needs_packets
def test_links_that_never_run_are_said_not_to() -> None:
    class Dead:
        def is_running(self, name: str) -> bool:
            return False

    times = iter(range(100))
    with pytest.raises(NetworkError, match="do not run after 5 s"):
        fabric.wait_until_running([Dead()], lambda seconds: None, lambda: float(next(times)))
    assert next(times) < 10


@needs_packets
def test_the_hub_keeps_its_port() -> None:
    with emulate([both(delay_ms=1)], ("127.0.0.1", 4711), backend="packet") as net:
        assert net.hub_address == net.attachment(0).address == "tcp://10.77.0.1:4711"


def test_what_cannot_be_asked() -> None:
    lossy = both(delay_ms=1, loss_percent=1)
    with pytest.raises(ConfigError, match="200 times"):
        emulate([lossy], backend="stream", congestion="none")
    with pytest.raises(ConfigError, match="did you mean 'packet'"):
        emulate([lossy], backend="packets")
    with pytest.raises(ConfigError, match="no model in the stream backend"):
        emulate([lossy], backend="stream", congestion="bbr")
    with pytest.raises(ConfigError, match="one network profile per member"):
        emulate([])
    with pytest.raises(NetworkError, match="no shared uplinks"):
        emulate([lossy], backend="stream", sites=[Site(lossy, (0,))])
    with pytest.raises(NetworkError, match="not usable here"):
        emulate([lossy], ("192.0.2.1", 0), backend="stream")


@needs_packets
def test_an_unknown_congestion_control_names_those_there_are() -> None:
    with pytest.raises(NetworkError, match=r"'vegan' cannot be pinned.*reno"):
        emulate([both(delay_ms=1)], backend="packet", congestion="vegan")


# -- nothing is left behind -----------------------------------------------------------------------

_VICTIM = """
import os, sys, time
from edgetrain.fleet.networks import Direction, Profile, emulate
way = Direction(delay_ms=1)
net = emulate([Profile("test", "", way, way)], backend=sys.argv[1])
child = os.fork()  # a member, which also holds the pipes to the emulator open
if child == 0:
    net.attachment(0).enter()
    time.sleep(600)
print(net.pid, child, flush=True)
time.sleep(600)
"""


@carriers
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_its_parent(backend: str, number: signal.Signals) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert victim.stdout is not None
    emulator, member = map(int, victim.stdout.readline().split())
    assert alive(emulator)
    made = made_by(emulator)
    assert len(made) == (3 if backend == "packet" else 0)  # hub, member, and between them
    victim.send_signal(number)
    victim.wait()
    assert wait_for(lambda: not alive(emulator))
    if backend == "packet":  # processes in its hosts have ended too
        assert wait_for(lambda: not alive(member))
    elif alive(member):
        os.kill(member, signal.SIGKILL)
    assert all_gone(made)
    victim.stdout.close()


@carriers
def test_nothing_is_left_after_success_and_failure(backend: str) -> None:
    with emulate([both(delay_ms=1)], backend=backend) as net:
        emulator = net.pid
        made = made_by(emulator)
    assert not alive(emulator)
    assert all_gone(made)
    failing = emulate([both(delay_ms=1)], backend=backend)
    emulator = failing.pid
    made = made_by(emulator)
    with contextlib.suppress(RuntimeError), failing:
        raise RuntimeError("on purpose")
    assert not alive(emulator)
    assert all_gone(made)


_ORDINARY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@needs_packets
def test_an_ordinary_user_may_emulate_too() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from edgetrain.fleet.networks.emulation import fabric;"
        "print(fabric.become_able()); print(len(fabric.build(3, 'reno')))"
    )
    checkout = str(Path(__file__).parents[4])
    for program in (sys.executable, "/usr/bin/python3"):
        said = subprocess.run(
            [*_ORDINARY, "sh", "-c", 'exec "$0" -c "$1" "$2"', program, code, checkout],
            capture_output=True,
            text=True,
            check=False,
        )
        if said.returncode == 0:
            assert said.stdout.split("\n")[:2] == ["in a user namespace, without root", "3"]
            return
    pytest.skip(f"no Python 3.11 that an ordinary user may run: {said.stderr[-200:]}")


_ENDS = """
import pickle, socket, struct, sys
own = pickle.loads(bytes.fromhex(sys.argv[1]))
own.enter()
host, port = own.address.removeprefix("tcp://").split(":")
if sys.argv[2] == "hub":
    listener = socket.create_server((host, int(port)))
    print("listening", flush=True)
    end, _ = listener.accept()
else:
    end = socket.create_connection((host, int(port)), timeout=60)
print(struct.unpack_from("=I", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 80)[0])
print(open("/proc/sys/net/ipv4/tcp_rmem").read().split()[1], flush=True)
sys.stdin.read()
"""
"""An end of a connection: its congestion window (tcpi_snd_cwnd), and its first receive buffer."""


@needs_packets
@pytest.mark.parametrize(("first", "says"), [(30, ["30", "300000"]), (0, ["10", "131072"])])
def test_hosts_begin_with_the_windows_of_their_profile(first: int, says: list[str]) -> None:
    profile = both(delay_ms=1, first_window=first, receive_kb=300 if first else 0)
    ends: list[subprocess.Popen[str]] = []

    def start(attachment: Attachment, role: str) -> Iterator[str]:
        words = [sys.executable, "-c", _ENDS, pickle.dumps(attachment).hex(), role]
        ends.append(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        said = ends[-1].stdout
        assert said is not None
        return (line.strip() for line in said)

    with emulate([profile], backend="packet") as net:
        hub = start(net.hub_attachment(), "hub")
        assert next(hub) == "listening"
        member = start(net.attachment(0), "member")
        found = [[next(lines), next(lines)] for lines in (hub, member)]
        for end in ends:
            end.communicate(timeout=60)
    assert found == [says, says]


@needs_packets
def test_hosts_keep_their_windows_where_the_profile_says_so() -> None:
    kept, forgotten = (
        Profile(str(restarts), "", *[Direction(delay_ms=1, slow_start_after_idle=restarts)] * 2)
        for restarts in (False, True)
    )
    look = (
        "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1])).enter(); "
        "print(open('/proc/sys/net/ipv4/tcp_slow_start_after_idle').read().strip(), end='')"
    )
    for profiles, says in (([kept, forgotten], "011"), ([kept], "00")):
        with emulate(profiles, backend="packet") as net:
            ends = [*(net.attachment(m) for m in range(len(profiles))), net.hub_attachment()]
            found = [
                subprocess.run(
                    [sys.executable, "-c", look, pickle.dumps(end).hex()],
                    capture_output=True, text=True, check=True,
                ).stdout
                for end in ends
            ]  # fmt: skip
        assert "".join(found) == says


@needs_packets
def test_an_emulator_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    with emulate([both(delay_ms=1)] * 3, backend="packet"):
        pass
    assert "ResourceWarning" not in capfd.readouterr().err
