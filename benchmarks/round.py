"""What a round of dense averaging costs, beside a bare ZeroMQ star and gloo's all-reduce.

    python benchmarks/round.py                       4 members, 11 M parameters: about a minute
    python benchmarks/round.py --members 8 --elements 1000000 --json
    python benchmarks/round.py --topologies star,direct,ring,butterfly     and tree

Nothing is trained: an optimizer that changes one number, `local-sgd` with local_steps = 1, so each
step is one round of 4 bytes an element up and 4 bytes down. Hub and members are processes of their
own, on loopback. The star moves the same bytes in the same parts with pyzmq alone: sum on arrival,
no checksum, no membership. Blocks of rounds take turns, so that noise of the machine meets all
alike, and the ratios are medians over neighbouring blocks. The first turn warms up and is not
counted (its memory is). Gloo's all-reduce has no middle: each byte is sent where it is added up.

With `--topologies`: these beside gloo and nothing else, blocks in turns as before. `star` is our
hub and members, `direct` the same job with members that share 16 ranges of the vector; members of a
`ring`, `butterfly` or `tree` hand sums on to each other over connections of our own
(exchange/peers), and have no model: they average a vector, as gloo does.

Beside that, what being joined costs a loop between two exchanges: the steps of an ordinary loop
(a network of 0.6 M parameters in 62 tensors, SGD with momentum, batches of 32), alone and joined to
a hub whose rounds do not end.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from harness import machine, progress

from edgetrain.strategies import find
from edgetrain.training import processes

PATIENCE_S = 120.0
TENSORS = 62
"""Parameter tensors of the model, as many as a ResNet-18 has."""

TOPOLOGIES = ("star", "direct", "ring", "butterfly", "tree")

RANGES = 16
"""That the members of a direct job share."""

STEPS = 300
"""Steps of a loop at a turn."""


# -- what runs in the processes -------------------------------------------------------------------


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def bytes_after_torch() -> int:
    """Import torch, and nothing else; the peak then."""
    import torch

    torch.set_num_threads(1)
    return peak_bytes()


def obey(pipe: Connection, one_round: Callable[[], object], report: Callable[[], Any]) -> None:
    """Play as many rounds as the parent says, until it says 0."""
    pipe.send(None)
    while rounds := pipe.recv():
        began = time.monotonic()
        for _ in range(rounds):
            one_round()
        pipe.send((began, time.monotonic(), report()))


def hub(pipe: Connection, members: int, strategy: str = "local-sgd", local_steps: int = 1) -> None:
    """Our hub."""
    from edgetrain import codecs
    from edgetrain.exchange.hub.protocol import Hub
    from edgetrain.exchange.hub.serve import serve
    from edgetrain.exchange.hub.terms import Policy, Terms
    from edgetrain.exchange.zeromq.hub_socket import HubSocket
    from edgetrain.strategies.merging.rule import Mean

    socket = HubSocket("tcp://127.0.0.1:0")
    pipe.send(socket.address)
    terms = Terms(find(strategy), local_steps)
    pure = Hub(terms, Policy(members), Mean(), codecs.Dense(), codecs.Dense())
    serve(pure, socket, time.monotonic, lambda effect: None)
    socket.close()


def direct_hub(pipe: Connection, members: int) -> None:
    """Our hub, where the members reduce."""
    from edgetrain.exchange.hub.serve import serve
    from edgetrain.exchange.zeromq.hub_socket import HubSocket
    from edgetrain.jobs.building import hub_of

    socket = HubSocket("tcp://127.0.0.1:0")
    pipe.send(socket.address)
    pure = hub_of(direct_job(members), any_job=True)
    serve(pure, socket, time.monotonic, lambda effect: None)
    socket.close()


def direct_job(members: int) -> Any:
    """The job of `hub`, with members that reduce."""
    from edgetrain.jobs.reading import load
    from edgetrain.jobs.rules import resolve

    words = ["strategy=local-sgd", "local_steps=1", "delay=0", "steps=1000000", "topology=direct"]
    return resolve(load(None, [*words, f"members={members}", f"ranges={RANGES}"]))


def member(pipe: Connection, address: str, elements: int, of_direct: int = 0) -> None:
    """Our member: a model, an optimizer that does next to nothing, and `step`. `of_direct`: the
    members of its job, if these reduce."""
    baseline = bytes_after_torch()
    import torch

    from edgetrain.exchange.member.link import PATIENCE_S, Link
    from edgetrain.exchange.seam import Request
    from edgetrain.exchange.zeromq.member_socket import MemberSocket
    from edgetrain.tasks.flat import FlatModel
    from edgetrain.training.member.direct import peer_exchange
    from edgetrain.training.member.member import Member

    class Nudge:
        """Not a torch.optim.Optimizer: the first of those imports torch._dynamo, some 75 MB that
        every training with torch pays and a round of ours does not cause."""

        def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
            self.param_groups = [{"params": list(params)}]

        def step(self) -> None:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0] += 1.0

    torch.manual_seed(0)
    cuts = [elements * i // TENSORS for i in range(TENSORS + 1)]
    model = torch.nn.ParameterList(
        torch.rand(stop - start) for start, stop in itertools.pairwise(cuts)
    )
    flat, nudge = FlatModel(model), Nudge(model.parameters())
    socket, request = MemberSocket(address), Request("")
    way: Any = None
    if of_direct:
        listen = "tcp://127.0.0.1:0"
        way, here = peer_exchange(direct_job(of_direct), socket, None, listen, PATIENCE_S)
        request = Request("", address=here)
    joined = Member.join(way or Link(socket, time.monotonic), flat, nudge, request)

    def report() -> dict[str, Any]:
        traffic = joined.traffic()
        return {
            "sent_bytes": traffic.sent_bytes,
            "received_bytes": traffic.received_bytes,
            "checksum": joined.half.checksum,
            "baseline_bytes": baseline,
            "peak_bytes": peak_bytes(),
        }

    obey(pipe, joined.step, report)
    joined.close()


def loop(pipe: Connection, address: str = "") -> None:
    """An ordinary loop, joined if there is an address."""
    import torch

    import edgetrain

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(140, 140) for _ in range(TENSORS // 2)]
    model = torch.nn.Sequential(*(each for one in layers for each in (one, torch.nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    joined = edgetrain.join(address, model, optimizer) if address else None
    x = torch.randn(32, 140)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    obey(pipe, step, lambda: None)
    if joined is not None:
        joined.abandon("done")


def star_hub(pipe: Connection, members: int, elements: int, rounds: int) -> None:
    """The star's middle: add up what comes, part by part, and send the mean to everyone."""
    import numpy as np
    import zmq

    socket = zmq.Context().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    pipe.send(f"tcp://127.0.0.1:{port}")
    clients = [socket.recv_multipart()[0] for _ in range(members)]
    for client in clients:  # nobody's first part may come before another one's hello
        socket.send_multipart([client, b"all are here"])
    both = np.empty((2, elements), np.float32)
    parts = star_parts(elements)
    for round in range(rounds):
        total = both[round % 2]  # the other one may still be on its way
        arrived = dict.fromkeys(clients, 0)
        seen = [0] * len(parts)
        for _ in range(members * len(parts)):
            who, payload = socket.recv_multipart(copy=False)
            part = arrived[who.bytes]
            arrived[who.bytes] += 1
            out = total[parts[part]]
            values = np.frombuffer(payload.buffer, np.float32)
            if seen[part]:
                np.add(out, values, out=out)
            else:
                np.copyto(out, values)
            seen[part] += 1
        total *= np.float32(1 / members)
        for here in parts:
            for client in clients:
                socket.send_multipart([client, total[here].data], copy=False)
    pipe.recv()


def star_client(pipe: Connection, address: str, elements: int) -> None:
    """The star's end: send a vector, overwrite it with what comes back."""
    baseline = bytes_after_torch()
    import numpy as np
    import zmq

    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    socket.send(b"hello")
    socket.recv()
    vector = np.zeros(elements, np.float32)
    parts = star_parts(elements)

    def one_round() -> None:
        vector[0] += 1
        for here in parts:
            socket.send(vector[here].data, copy=False)
        for here in parts:
            vector[here] = np.frombuffer(socket.recv(copy=False).buffer, np.float32)

    def report() -> dict[str, Any]:
        moved = 4 * elements
        return {
            "sent_bytes": moved,
            "received_bytes": moved,
            "baseline_bytes": baseline,
            "peak_bytes": peak_bytes(),
        }

    obey(pipe, one_round, report)


def star_parts(elements: int) -> list[slice]:
    """The parts in which our dense codec sends."""
    from edgetrain.codecs.base import DENSE_PART_ELEMENTS
    from edgetrain.vectors.parts import parts_of

    return list(parts_of(elements, DENSE_PART_ELEMENTS))


def gloo_rank(pipe: Connection, rank: int, members: int, elements: int, store: str) -> None:
    """A rank of torch.distributed: one all-reduce of the flat vector."""
    baseline = bytes_after_torch()
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=members)
    vector = torch.zeros(elements)

    def one_round() -> None:
        vector[0] += 1
        dist.all_reduce(vector)
        vector.div_(members)

    obey(pipe, one_round, lambda: {"baseline_bytes": baseline, "peak_bytes": peak_bytes()})
    dist.destroy_process_group()


def circle(
    pipe: Connection, here: Connection, topology: str, place: int, members: int, elements: int
) -> None:
    """A member of a ring, butterfly or tree: one average of the flat vector."""
    baseline = bytes_after_torch()
    import numpy as np

    from edgetrain.exchange.messages import Map, Peer
    from edgetrain.exchange.peers.circle import Circle, Turn
    from edgetrain.exchange.peers.dialled import dialling
    from edgetrain.exchange.peers.listener import listen
    from edgetrain.exchange.peers.neighbours import Neighbours

    listener, address = listen("tcp://127.0.0.1:0", None)
    here.send(address)
    names = [str(index) for index in range(members)]
    peers = tuple(Peer(name, where, "") for name, where in zip(names, here.recv(), strict=True))
    neighbours = Neighbours.of(Map(1, False, 1, names[place], 0, 1, peers), encrypted=False)
    listener.let_in(neighbours)
    joined = Circle(listener, dialling(None), time.monotonic, PATIENCE_S)
    joined.accept(neighbours)
    vector = np.zeros(elements, np.float32)
    rounds = itertools.count()
    mean = [vector]

    def one_round() -> None:
        vector[0] += 1
        turn = Turn(next(rounds), 0, topology, tuple(names), (1.0,) * members)
        mean[:] = joined.average(turn, vector)

    def report() -> dict[str, Any]:
        return {
            "checksum": functools.reduce(lambda crc, piece: zlib.crc32(piece.data, crc), mean, 0),
            "baseline_bytes": baseline,
            "peak_bytes": peak_bytes(),
        }

    obey(pipe, one_round, report)
    joined.close()
    listener.close()


# -- the parent -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """What one block of rounds cost, per round."""

    seconds: float
    cpu_s: float


class Fleet:
    """Processes that play rounds together."""

    def __init__(self, name: str, context: Any) -> None:
        self.name = name
        self.children: list[processes.Child] = []
        self.blocks: list[Block] = []
        self.reports: list[list[dict[str, Any]]] = []
        self._players: list[Connection] = []
        self._context = context

    def start(self, name: str, target: Callable[..., None], *arguments: Any) -> Connection:
        """Start a process; our end of a pipe to it."""
        ours: Connection
        ours, theirs = self._context.Pipe()
        child = processes.start(self._context, f"{self.name}-{name}", target, theirs, *arguments)
        self.children.append(child)
        theirs.close()
        return ours

    def players(
        self, count: int, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
    ) -> None:
        """Start those who obey, and wait until all are ready."""
        for index in range(count):
            self.add_player(str(index), target, *arguments[index])
        self.wait_for_players()

    def add_player(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        """Start one that obeys."""
        self._players.append(self.start(name, target, *arguments))

    def wait_for_players(self) -> None:
        """Wait until all are ready."""
        for pipe in self._players:
            self.hear(pipe)

    def pipe(self) -> tuple[Connection, Connection]:
        """Both ends of a pipe, the second for a process to be started."""
        ours, theirs = self._context.Pipe()
        return ours, theirs

    def hear(self, pipe: Connection) -> Any:
        """What a process says, unless one has ended or all are silent."""
        deadline = time.monotonic() + PATIENCE_S
        while not pipe.poll(0.2):
            failed = [c for c in self.children if not c.running]
            if failed:
                raise SystemExit(
                    f"{failed[0].name} ended ({failed[0].exit_code}) {failed[0].error}"
                )
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: silent for {PATIENCE_S:g} s")
        return pipe.recv()

    def play(self, rounds: int) -> Block:
        """A block of rounds by everyone."""
        before = self.cpu_s()
        for pipe in self._players:
            pipe.send(rounds)
        heard = [self.hear(pipe) for pipe in self._players]
        seconds = max(ended for _, ended, _ in heard) - min(began for began, _, _ in heard)
        self.reports.append([report for _, _, report in heard])
        self.blocks.append(Block(seconds / rounds, (self.cpu_s() - before) / rounds))
        return self.blocks[-1]

    def cpu_s(self) -> float:
        """Of all processes, their threads included."""
        # The clock of another process, as clock_getcpuclockid(3) makes it on Linux.
        clocks = [(~int(child.process.pid or 0) << 3) | 2 for child in self.children]
        return sum(time.clock_gettime(clock) for clock in clocks)

    def dismiss(self) -> None:
        """Let everyone go."""
        for pipe in self._players:
            pipe.send(0)


@contextmanager
def fleets(args: argparse.Namespace, store: Path) -> Iterator[list[Fleet]]:
    """Ours, the star and gloo, ready to play; nothing of them is left afterwards."""
    count, elements = args.members, args.elements
    rounds = args.block * (args.turns + 1)
    with playing("ours", "star", "gloo", "bare", "joined") as made:
        ours, star, gloo, bare, joined = made
        start_ours(ours, args)
        middle = star.start("hub", star_hub, count, elements, rounds)
        address = star.hear(middle)
        star.players(count, star_client, [(address, elements)] * count)
        start_gloo(gloo, args, store)
        bare.players(1, loop, [()])
        # Rounds that are longer than what is measured.
        endless = joined.hear(joined.start("hub", hub, 1, "fedavg", 1 << 30))
        joined.players(1, loop, [(endless,)])
        yield made
        for fleet in made:
            fleet.dismiss()
        middle.send(None)


@contextmanager
def playing(*names: str) -> Iterator[list[Fleet]]:
    """Fleets without a process; whatever they start has ended afterwards."""
    context = processes.fork_server([])
    made = [Fleet(name, context) for name in names]
    try:
        yield made
        for fleet in made:
            for child in fleet.children:
                child.process.join(10.0)
    finally:
        processes.stop_all([child for fleet in made for child in fleet.children])


def start_ours(fleet: Fleet, args: argparse.Namespace, *, direct: bool = False) -> None:
    """Our hub and members; `direct`: the members reduce."""
    address = fleet.hear(fleet.start("hub", direct_hub if direct else hub, args.members))
    of_direct = args.members if direct else 0
    fleet.players(args.members, member, [(address, args.elements, of_direct)] * args.members)


def start_gloo(fleet: Fleet, args: argparse.Namespace, store: Path) -> None:
    """Ranks of an all-reduce."""
    where = f"file://{store / 'gloo'}"
    ranks = [(rank, args.members, args.elements, where) for rank in range(args.members)]
    fleet.players(args.members, gloo_rank, ranks)


def start_circle(fleet: Fleet, args: argparse.Namespace, topology: str) -> None:
    """Members of a collective, which tell each other their addresses here."""
    pairs = [fleet.pipe() for _ in range(args.members)]
    for place, (_, theirs) in enumerate(pairs):
        arguments = (theirs, topology, place, args.members, args.elements)
        fleet.add_player(str(place), circle, *arguments)
    addresses = [fleet.hear(ours) for ours, _ in pairs]
    for ours, _ in pairs:
        ours.send(addresses)
    fleet.wait_for_players()


@contextmanager
def topologies(args: argparse.Namespace, store: Path) -> Iterator[list[Fleet]]:
    """Those named, and gloo."""
    with playing(*args.topologies, "gloo") as made:
        for fleet in made[:-1]:
            if fleet.name in ("star", "direct"):
                start_ours(fleet, args, direct=fleet.name == "direct")
            else:
                start_circle(fleet, args, fleet.name)
        start_gloo(made[-1], args, store)
        yield made
        for fleet in made:
            fleet.dismiss()


def threads() -> set[tuple[int, int]]:
    """(process, thread) of everything under this process."""
    found = psutil.Process().children(recursive=True)
    return {(child.pid, thread.id) for child in found for thread in child.threads()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Play the blocks in turns; what came out, as a dictionary."""
    with tempfile.TemporaryDirectory() as folder, fleets(args, Path(folder)) as made:
        rounds = {fleet.name: args.block for fleet in made}
        rounds["bare"] = rounds["joined"] = STEPS
        for fleet in made:
            fleet.play(rounds[fleet.name])
        before = threads()
        for turn in range(args.turns):
            for fleet in made[turn % 2 :] + made[: turn % 2]:
                block = fleet.play(rounds[fleet.name])
                if not args.json:
                    done = f"turn {turn + 1} of {args.turns}"
                    progress(f"{done}: {fleet.name} {block.seconds:.3f} s a round")
        after = threads()
        return result(args, made, before, after)


def measure_topologies(args: argparse.Namespace) -> dict[str, Any]:
    """Play the blocks of the topologies and gloo in turns; what came out, as a dictionary."""
    with tempfile.TemporaryDirectory() as folder, topologies(args, Path(folder)) as made:
        for turn in range(args.turns + 1):
            for fleet in made[turn % 2 :] + made[: turn % 2]:
                block = fleet.play(args.block)
                if not args.json:
                    progress(f"turn {turn} of {args.turns}: {fleet.name} {block.seconds:.3f} s")
    gloo = made[-1]
    for fleet in made[:-1]:
        if len({report["checksum"] for report in fleet.reports[-1]}) != 1:
            raise SystemExit(f"{fleet.name}: the replicas differ")
    return {
        "members": args.members,
        "elements": args.elements,
        "rounds": args.block * args.turns,
        **{fleet.name: figures(fleet, 4 * args.elements) for fleet in made},
        "to_gloo": {fleet.name: ratios(fleet, gloo) for fleet in made[:-1]},
    }


def result(
    args: argparse.Namespace,
    made: list[Fleet],
    before: set[tuple[int, int]],
    after: set[tuple[int, int]],
) -> dict[str, Any]:
    """Medians over the blocks, and the ratios of neighbours."""
    ours, star, gloo, bare, joined = made
    vector = 4 * args.elements
    checksums = {report["checksum"] for report in ours.reports[-1]}
    if len(checksums) != 1:
        raise SystemExit("the replicas differ")
    played = args.block * args.turns
    moved = {
        way: max(
            (last[way] - first[way]) / played
            for first, last in zip(ours.reports[0], ours.reports[-1], strict=True)
        )
        for way in ("sent_bytes", "received_bytes")
    }
    return {
        "members": args.members,
        "elements": args.elements,
        "rounds": played,
        **{fleet.name: figures(fleet, vector) for fleet in (ours, star, gloo)},
        "step_s": {
            fleet.name: statistics.median(block.seconds for block in fleet.blocks[1:])
            for fleet in (bare, joined)
        },
        "joined_to_bare": ratios(joined, bare),
        "bytes": moved,
        "star_bytes": {"sent_bytes": vector, "received_bytes": vector},
        "ours_to_star": ratios(ours, star),
        "ours_to_gloo": ratios(ours, gloo),
        "processes": {"before": len({p for p, _ in before}), "after": len({p for p, _ in after})},
        "threads": {"before": len(before), "after": len(after), "the_same": before == after},
    }


def figures(fleet: Fleet, vector: int) -> dict[str, Any]:
    """One fleet's medians and its players' largest peak."""
    blocks = fleet.blocks[1:]
    over = max(r["peak_bytes"] - r["baseline_bytes"] for r in fleet.reports[-1])
    return {
        "seconds": statistics.median(b.seconds for b in blocks),
        "cpu_s": statistics.median(b.cpu_s for b in blocks),
        "peak_over_torch_bytes": over,
        "peak_over_torch_vectors": over / vector,
        "peak_beyond_four_vectors_bytes": over - 4 * vector,
        "blocks": [asdict(block) for block in blocks],
    }


def ratios(ours: Fleet, other: Fleet) -> dict[str, float]:
    """Medians of the ratios of blocks that were played next to each other."""
    pairs = list(zip(ours.blocks[1:], other.blocks[1:], strict=True))
    return {
        "seconds": statistics.median(a.seconds / b.seconds for a, b in pairs),
        "cpu_s": statistics.median(a.cpu_s / b.cpu_s for a, b in pairs),
        "worst_seconds": max(a.seconds / b.seconds for a, b in pairs),
        "worst_cpu_s": max(a.cpu_s / b.cpu_s for a, b in pairs),
    }


def show_costs(found: dict[str, Any], names: Iterable[str]) -> None:
    """What a round costs each of these."""
    million = found["elements"] / 1e6
    print(
        f"{found['members']} members, {million:g} M parameters ({4 * million:g} MB), "
        f"{found['rounds']} rounds, medians of blocks"
    )
    print(f"{'':9} {'s/round':>8} {'CPU s/round':>12} {'peak over import torch':>24}")
    for name in names:
        row = found[name]
        print(
            f"{name:9} {row['seconds']:8.3f} {row['cpu_s']:12.3f} "
            f"{row['peak_over_torch_vectors']:9.2f} vectors "
            f"(four {row['peak_beyond_four_vectors_bytes'] / 1e6:+.0f} MB)"
        )


def show_ratio(name: str, other: str, ratio: dict[str, float]) -> None:
    """How one compares with another."""
    print(
        f"{name} / {other}: {ratio['seconds']:.2f} in seconds, {ratio['cpu_s']:.2f} in CPU "
        f"seconds (worst block {ratio['worst_seconds']:.2f}, {ratio['worst_cpu_s']:.2f})"
    )


def show_topologies(found: dict[str, Any]) -> None:
    """The table of `--topologies`."""
    show_costs(found, [*found["to_gloo"], "gloo"])
    for name, ratio in found["to_gloo"].items():
        show_ratio(name, "gloo", ratio)


def show(found: dict[str, Any]) -> None:
    """The table."""
    show_costs(found, ("ours", "star", "gloo"))
    for other in ("star", "gloo"):
        show_ratio("ours", other, found[f"ours_to_{other}"])
    ratio, step_s = found["joined_to_bare"], found["step_s"]
    print(
        f"a loop's step between exchanges: {1000 * step_s['joined']:.3f} ms joined, "
        f"{1000 * step_s['bare']:.3f} ms alone: {ratio['seconds']:.3f} in seconds, "
        f"{ratio['cpu_s']:.3f} in CPU seconds"
    )
    up, down = found["bytes"]["sent_bytes"], found["bytes"]["received_bytes"]
    vector = 4 * found["elements"]
    print(
        f"bytes a round of a member, at the socket: {up:,.0f} up ({up / vector:.4f} vectors), "
        f"{down:,.0f} down ({down / vector:.4f})"
    )
    count, threads = found["processes"], found["threads"]
    print(
        f"processes {count['before']} before, {count['after']} after; threads "
        f"{threads['before']} before, {threads['after']} after, "
        f"{'the same ones' if threads['the_same'] else 'not the same ones'}"
    )


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, of the command line or of these words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--elements", type=int, default=11_000_000)
    parser.add_argument("--rounds", type=int, default=30, help="of each kind (default: 30)")
    parser.add_argument("--block", type=int, default=5, help="rounds at a turn (default: 5)")
    parser.add_argument(
        "--topologies", type=lambda text: text.split(","), default=[], metavar="NAMES",
        help=f"of {', '.join(TOPOLOGIES)}, separated by commas: these, and gloo",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    if unknown := sorted({*args.topologies} - {*TOPOLOGIES}):
        parser.error(f"--topologies {unknown[0]}: one of {', '.join(TOPOLOGIES)}")
    args.block = min(args.block, args.rounds)
    args.turns = -(-args.rounds // args.block)
    return args


def main() -> None:
    args = parsed()
    try:
        found = (measure_topologies if args.topologies else measure)(args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    progress("")
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(machine())
        (show_topologies if args.topologies else show)(found)


if __name__ == "__main__":
    main()
