"""What a contribution costs a hub of many members: its CPU, beside a bare ROUTER with NumPy.

    python benchmarks/hub_cpu.py                      8, 32, 128 and 512 members of 10 k parameters
    python benchmarks/hub_cpu.py --members 1000,4000 --turns 0      joining alone

Both hubs are processes of their own, on loopback. The members of each are one process without
torch: a DEALER each, which joins, sends its contribution, and waits for the reply. The bare hub is
the star of round.py: it adds up what comes and sends the mean to everyone, one frame a message.
Blocks of rounds take turns, figures are medians over them, and the ratio is that of neighbouring
blocks. CPU seconds are those of the hub's process with all its threads, so that other work on the
machine changes them little. `joined`: from the first connection to the last member's `Start`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from harness import machine, progress
from round import Fleet, hub, obey, playing, star_hub, star_parts

from edgetrain.exchange import messages
from edgetrain.exchange.hub.base_transfer import base_messages
from edgetrain.vectors.vector import checksum

BLOCK = 4096
"""Contributions at a turn, about."""
AT_ONCE = 512
"""Members that ask to join before one of them has an answer: a hub ends connections of which it has
heard nothing if there are a thousand."""
MOST_ROUNDS = 1 << 30
"""Of a star that is ended when it is not needed any more."""


def many(pipe: Connection, address: str, members: int, elements: int, ours: bool) -> None:
    """Members in one process: of ours, or of the star."""
    import numpy as np
    import zmq

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, members + 8)
    vector = np.ones(elements, np.float32)
    parts = star_parts(elements)
    began = time.monotonic()
    ends, known, number = [], checksum(vector), 0
    for place in range(members):
        ends.append(context.socket(zmq.DEALER))
        ends[-1].connect(address)
        about = ("", "model", vector.size, f"m{place}", 1.0, known, place + 1)
        hello = messages.pack(messages.Join(messages.PROTOCOL, *about)) if ours else [b"hello"]
        ends[-1].send_multipart(hello)
        if ours and not place:  # who comes first brings what all begin with
            messages.unpack(ends[0].recv_multipart())
            for part in base_messages(vector):
                ends[0].send_multipart(messages.pack(part))
        elif ours and place % AT_ONCE == 0:
            ends[-1].recv_multipart()
    for end in ends:
        while ours and end.recv_multipart()[0] != messages.Start.kind:
            pass
        if not ours:
            end.recv()
    joined_s = time.monotonic() - began

    def one_round() -> None:
        nonlocal known, number
        frames: list[list[Any]] = [[vector[here].data] for here in parts]
        if ours:
            given = enumerate(vector[here].data for here in parts)
            frames = [
                messages.pack(
                    messages.Contribute(number, part, len(parts), 1.0, number, known, 0, payload)
                )
                for part, payload in given
            ]
        for end in ends:
            for each in frames:
                end.send_multipart(each)
        for end in ends:
            for _ in parts:
                while (heard := end.recv_multipart())[0] == messages.Beat.kind:
                    pass
        if ours:
            reply = messages.unpack(heard)
            assert isinstance(reply, messages.Reply), reply
            known, number = reply.checksum, number + 1

    obey(pipe, one_round, lambda: {"joined_s": joined_s})


class Side:
    """A hub, ours or bare, and its members."""

    def __init__(self, made: Sequence[Fleet], args: argparse.Namespace, members: int) -> None:
        self._hub, self._members = made
        ours = self._hub.name == "ours"
        if ours:
            self.way = self._hub.start("hub", hub, members, args.strategy)
        else:
            self.way = self._hub.start("hub", star_hub, members, args.elements, MOST_ROUNDS)
        address = self._hub.hear(self.way)
        before = self._hub.cpu_s()
        self._members.players(1, many, [(address, members, args.elements, ours)])
        self.join_cpu_s = self._hub.cpu_s() - before
        self.cpu_s: list[float] = []
        self._count = members

    def play(self, rounds: int) -> None:
        """A block of rounds; the hub's CPU seconds for a contribution."""
        before = self._hub.cpu_s()
        self._members.play(rounds)
        self.cpu_s.append((self._hub.cpu_s() - before) / rounds / self._count)

    @property
    def joined_s(self) -> float:
        """Seconds until all its members were in."""
        return float(self._members.reports[0][0]["joined_s"])

    def stop(self) -> None:
        """End it."""
        self._members.dismiss()
        for child in self._hub.children:
            child.stop()


def measure(args: argparse.Namespace, members: int) -> dict[str, float]:
    """The figures of a fleet of so many, ours and bare in turns."""
    with playing("ours", "ours", "bare", "bare") as made:
        sides = [Side(made[:2], args, members), Side(made[2:], args, members)]
        rounds = max(1, BLOCK // members)
        for turn in range(args.turns + 1):
            for side in sides[:: 1 if turn % 2 else -1]:
                side.play(rounds if turn else 1)
            if not args.json:
                progress(f"{members} members, turn {turn} of {args.turns}")
        ours, bare = sides
        for side in sides:
            side.stop()
    pairs = list(zip(ours.cpu_s[1:], bare.cpu_s[1:], strict=True))
    found = {"members": members, "joined_s": ours.joined_s, "join_cpu_s": ours.join_cpu_s}
    if pairs:
        found["ours_us"] = 1e6 * statistics.median(ours.cpu_s[1:])
        found["bare_us"] = 1e6 * statistics.median(bare.cpu_s[1:])
        found["ratio"] = statistics.median(a / b for a, b in pairs)
        found["lowest"] = min(a / b for a, b in pairs)
        found["highest"] = max(a / b for a, b in pairs)
    return found


def show(found: dict[str, float]) -> None:
    """A line."""
    line = (
        f"{found['members']:7,} members: joined in {found['joined_s']:.2f} s, "
        f"{found['join_cpu_s']:.2f} CPU s of the hub"
    )
    if "ratio" in found:
        line += (
            f"; a contribution {found['ours_us']:.0f} us, bare {found['bare_us']:.0f} us: "
            f"{found['ratio']:.2f} times ({found['lowest']:.2f} to {found['highest']:.2f})"
        )
    print(line, flush=True)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, of the command line or of these words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", default="8,32,128,512", help="how many, with commas")
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--strategy", default="local-sgd", help="of one step a round")
    parser.add_argument("--turns", type=int, default=7, help="blocks of each (default: 7)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def main() -> None:
    """The command."""
    args = parsed()
    if not args.json:
        print(machine(), flush=True)
    everything = []
    for members in map(int, args.members.split(",")):
        everything.append(measure(args, members))
        progress("")
        if not args.json:
            show(everything[-1])
    if args.json:
        print(json.dumps(everything, indent=2))


if __name__ == "__main__":
    main()
