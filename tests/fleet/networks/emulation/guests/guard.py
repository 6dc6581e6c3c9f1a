"""Runs as root inside user-mode-linux: real `tc`, and the guard that restores the interface.

Prints one line per finding, "ok NAME" or "FAILED NAME: what was seen"; exits with the failures.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks import Direction, Profile
from edgetrain.fleet.networks.emulation import guard, linux, tc
from edgetrain.fleet.networks.emulation.netlink import Netlink, Wire

os.environ["EDGETRAIN_STATE"] = "/run/edgetrain"
PORT, OTHER_PORT = 5555, 6666
DEVICE = "eth0"
failures = 0


def say(name: str, good: bool, seen: object = "") -> None:
    global failures
    failures += not good
    print(f"ok {name}" if good else f"FAILED {name}: {seen}", flush=True)


def wire() -> int:
    """eth0 here, eth0 of another namespace there, 10.1.0.1 and 10.1.0.2; returns the other's fd."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    linux.unshare(linux.CLONE_NEWNET)
    there = os.open("/proc/self/ns/net", os.O_RDONLY)
    far = Netlink()
    linux.setns(here, linux.CLONE_NEWNET)
    near = Netlink()
    near.add_veth(DEVICE, DEVICE, there, Wire(bytes.fromhex("020000000001"), 1500, 65_536))
    for link, address, space in ((near, "10.1.0.1", here), (far, "10.1.0.2", there)):
        linux.setns(space, linux.CLONE_NEWNET)
        index = socket.if_nametoindex(DEVICE)
        link.up(DEVICE, index, arp=False)
        link.add_address(index, address, 24)
        link.add_route("10.1.0.0", 24, index, address)
        for words in _tagged(address[-1]):
            subprocess.run(["ip", *words.split()], check=True)
    linux.setns(here, linux.CLONE_NEWNET)
    return there


#: Networks beside 10.1.0.0/24 on the same wire: the second family, a VLAN tag, both.
BESIDE = {"IPv6": "fd01::", "a VLAN": "10.2.0.", "IPv6 in a VLAN": "fd02::"}


def _tagged(end: str) -> Iterator[str]:
    yield f"addr add fd01::{end}/64 dev eth0 nodad"
    yield "link add link eth0 name v5 type vlan id 5"
    yield "link set v5 up"
    yield f"addr add 10.2.0.{end}/24 dev v5"
    yield f"addr add fd02::{end}/64 dev v5 nodad"


def serve(there: int) -> None:
    """Echo servers on both ports, in the other namespace, of both families."""

    def echo(port: int) -> None:
        linux.setns(there, linux.CLONE_NEWNET)
        with socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True
        ) as listener:
            while True:
                end, _ = listener.accept()
                threading.Thread(target=answer, args=(end,), daemon=True).start()

    def answer(end: socket.socket) -> None:
        with end:
            while data := end.recv(100):
                end.sendall(data)

    for port in (PORT, OTHER_PORT):
        threading.Thread(target=echo, args=(port,), daemon=True).start()
    time.sleep(0.3)


def round_trip_ms(port: int, patience: float = 0.6, network: str = "10.1.0.") -> float | None:
    """Median of five small exchanges, None where nothing comes back."""
    try:
        with socket.create_connection((f"{network}2", port), timeout=patience) as end:
            took = []
            for _ in range(5):
                began = time.monotonic()
                end.sendall(b"x")
                end.recv(1)
                took.append(1000 * (time.monotonic() - began))
    except OSError:
        return None
    return sorted(took)[2]


def qdiscs() -> str:
    return subprocess.run(
        ["tc", "qdisc", "show", "dev", DEVICE], capture_output=True, text=True, check=True
    ).stdout


def devices() -> str:
    return subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


_HELPER = tc.Shaping(DEVICE, Profile("none"), (PORT,)).helper


def untouched() -> bool:
    return "netem" not in qdiscs() and "prio" not in qdiscs() and _HELPER not in devices()


def profile(**figures: float) -> Profile:
    return Profile("test", "", Direction(**figures), Direction(**figures))


def shaped(figures: Profile) -> tc.Shaping:
    return tc.Shaping(DEVICE, figures, (PORT,))


def delays_both_ways() -> None:
    guard.apply(shaped(profile(delay_ms=40)), guard.ShapingLimits(120))
    slow, free = round_trip_ms(PORT), round_trip_ms(OTHER_PORT)
    say("delay both ways", slow is not None and 79 < slow < 100, slow)
    say("another port is untouched", free is not None and free < 20, free)
    for name, network in BESIDE.items():
        slow, free = (round_trip_ms(port, network=network) for port in (PORT, OTHER_PORT))
        say(f"delay both ways in {name}", slow is not None and 79 < slow < 100, slow)
        say(f"another port is untouched in {name}", free is not None and free < 20, free)
    guard.clear(DEVICE)
    say("clear puts it back", untouched(), qdiscs() + devices())


def total_loss() -> None:
    guard.apply(shaped(profile(loss_percent=100)), guard.ShapingLimits(120))
    lost, free = round_trip_ms(PORT), round_trip_ms(OTHER_PORT)
    say("all is lost on the job's port", lost is None, lost)
    say("with all lost, another port is untouched", free is not None and free < 20, free)
    guard.clear(DEVICE)


def time_is_over() -> None:
    guard.apply(shaped(profile(delay_ms=40)), guard.ShapingLimits(40))
    say("applied", "netem" in qdiscs(), qdiscs())
    say("put back when the time is over", wait_for(untouched, 60), qdiscs())


def renewals() -> None:
    guard.apply(shaped(profile(delay_ms=40)), guard.ShapingLimits(600, renew_seconds=20))
    for _ in range(4):
        time.sleep(6)
        guard.renew(DEVICE)
    say("renewals keep it", "netem" in qdiscs(), qdiscs())
    say("put back when renewals stop", wait_for(untouched, 60), qdiscs())


def owner_killed() -> None:
    owner = os.fork()
    if owner == 0:
        guard.apply(shaped(profile(delay_ms=40)), guard.ShapingLimits(600, owner=os.getpid()))
        time.sleep(60)
    say("applied by its owner", wait_for(lambda: "netem" in qdiscs(), 20), qdiscs())
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    say("put back when the owner is killed", wait_for(untouched, 60), qdiscs() + devices())


def refusals() -> None:
    subprocess.run(["tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *_TBF], check=True)
    try:
        guard.apply(shaped(profile(delay_ms=40)), guard.ShapingLimits(120))
        say("a foreign qdisc is refused", False, "it was taken")
    except NetworkError as error:
        say("a foreign qdisc is refused", "tbf" in str(error), error)
    say("and left alone", "tbf" in qdiscs(), qdiscs())
    subprocess.run(["tc", "qdisc", "del", "dev", DEVICE, "root"], check=True)
    for name, words in (
        ("two tags", "link v5 name q type vlan id 6"),
        ("802.1ad", "link eth0 name q type vlan proto 802.1ad id 7"),
        ("encryption", "link eth0 name q type macsec"),
    ):
        subprocess.run(["ip", "link", "add", *words.split()], check=True)
        try:
            guard.apply(shaped(profile(delay_ms=40)), guard.ShapingLimits(120))
            say(f"{name} is refused", False, "it was taken")
        except NetworkError as error:
            say(f"{name} is refused", "eth0 carries q" in str(error), error)
        subprocess.run(["ip", "link", "del", "q"], check=True)


_TBF = ("rate", "10mbit", "burst", "16kb", "latency", "50ms")


def failing_command() -> None:
    class Broken(tc.Shaping):
        def commands(self) -> list[list[str]]:
            return [*super().commands(), ["tc", "qdisc", "add", "dev", DEVICE, "bogus"]]

    try:
        guard.apply(Broken(DEVICE, profile(delay_ms=40), (PORT,)), guard.ShapingLimits(120))
        say("a failing command is reported", False)
    except NetworkError as error:
        say("a failing command is reported", "bogus" in str(error), error)
    say("and everything put back", untouched(), qdiscs() + devices())


def every_word() -> None:
    """netem takes each word that a profile can turn into."""
    from edgetrain.fleet.networks import Burst

    rich = Direction(
        delay_ms=40,
        jitter_ms=5,
        distribution="pareto",
        rate_mbit=20,
        burst=Burst(1, 20, 90, 0.1),
        reorder_percent=1,
        duplicate_percent=0.5,
        corrupt_percent=0.1,
    )
    for command in tc.whole(DEVICE, rich):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        say("netem takes every word", done.returncode == 0, done.stderr)
    subprocess.run(["tc", "qdisc", "del", "dev", DEVICE, "root"], check=True)


def main() -> None:
    serve(wire())
    for part in (
        delays_both_ways,
        total_loss,
        time_is_over,
        renewals,
        owner_killed,
        refusals,
        failing_command,
        every_word,
    ):
        try:
            part()
        except Exception as error:  # a guest reports, the host fails the test
            say(part.__name__, False, repr(error))
            guard.clear(DEVICE)
    sys.exit(failures)


if __name__ == "__main__":
    main()
