"""What a hub's process holds: its memory and its journal are searched for what members gave.

The hub is a process as `edgetrain hub` starts it; the members are in this one, which keeps every
contribution. One member holds its contribution back, so that those of the others are at the hub and
the round is open: without masks they are found there, which shows that the search can find.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from children import in_threads
from command_line import EDGETRAIN, running, write_tiny

from edgetrain.exchange.masks.fixed_point import FixedPoint
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import KINDS
from edgetrain.exchange.seam import Entry, Request, Submission
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs import reading
from edgetrain.jobs.resolved import mask_terms_of
from edgetrain.vectors.vector import Buffer, checksum

pytestmark = pytest.mark.real

MEMBERS, ELEMENTS, ROUNDS = 3, 5000, 3
NEEDLE = 32
"""Bytes in a row that are looked for, at several places of a vector."""


def memory_of(pid: int) -> Iterator[bytes]:
    """All that a process can read and write, region by region; without pages of zeros, which most
    of the stacks are."""
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            where, rights = line.split()[:2]
            if not rights.startswith("rw") or "[v" in line:
                continue
            start, end = (int(part, 16) for part in where.split("-"))
            try:
                memory.seek(start)
                pages = np.frombuffer(memory.read(end - start), np.uint64).reshape(-1, 512)
            except OSError:  # a guard page
                continue
            yield pages[pages.any(axis=1)].tobytes()


def needles(vector: np.ndarray, share: float) -> list[bytes]:
    """A contribution as it may lie there: its floats, and their encoding, at a few places."""
    words = np.empty(vector.size, np.uint32)
    FixedPoint(8.0, MEMBERS).encode(vector, words, share)
    forms = [vector.tobytes(), (vector * np.float32(share)).tobytes(), words.tobytes()]
    places = [4 * at for at in (1013, ELEMENTS - NEEDLE // 4)]
    return [form[place : place + NEEDLE] for form in forms for place in places]


class Searched:
    """What was found of which member, and where."""

    def __init__(self, given: dict[tuple[int, int], list[bytes]]) -> None:
        self._given = given
        self.found: set[tuple[str, int, int]] = set()

    def look_at(self, pid: int, folder: Path, rounds: Iterable[int]) -> None:
        """Look for what was given in these rounds, unless it was found before."""
        sought = {key: wanted for key, wanted in self._given.items() if key[1] in rounds}

        def look(where: str, data: bytes) -> None:
            for (member, round), wanted in sought.items():
                found = where, member, round
                if found not in self.found and any(needle in data for needle in wanted):
                    self.found.add(found)

        for region in memory_of(pid):
            look("memory", region)
        for path in (folder / "journal").iterdir():
            look("journal", path.read_bytes())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Counted(MemberSocket):
    """A socket that counts the messages of each kind that it receives."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.heard: Counter[str] = Counter()

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        frames = super().receive(timeout_s)
        if frames is not None:
            self.heard[KINDS[bytes(frames[0])].__name__] += 1
        return frames


class Fleet:
    """Members over real sockets, in one thread."""

    def __init__(self, address: str) -> None:
        self.sockets = [Counted(address) for _ in range(MEMBERS)]
        self.links = [Link(socket, time.monotonic) for socket in self.sockets]

    def pump(self, until: Callable[[Counter[str]], bool], seconds: float = 60.0) -> None:
        """Let the members take in and answer what comes, until something holds of how many messages
        of each kind have come."""
        end = time.monotonic() + seconds
        for counted in self.sockets:
            counted.heard.clear()
        while not until(sum((counted.heard for counted in self.sockets), Counter())):
            assert time.monotonic() < end, "it did not come to that"
            for link in self.links:
                link.poll()
            time.sleep(0.002)

    def wait_for_beats(self) -> None:
        """Until what was sent has been taken in: the hub beats only between messages."""
        self.pump(lambda heard: heard["Beat"] >= 4 * len(self.links))


def join_all(links: list[Link], agreed: MaskTerms | Literal[False]) -> list[Entry]:
    """All members join and train; equal parameters, so that none are sent."""

    def join(i: int) -> Entry:
        zeros = np.zeros(ELEMENTS, np.float32)
        request = Request("model", f"m{i}", float(i + 1), secure=agreed)
        return links[i].join(request, zeros, checksum(zeros))

    return in_threads(*[lambda i=i: join(i) for i in range(len(links))])


@pytest.mark.parametrize(("strategy", "secure"), [("dga", False), ("fedavg", True)])
def test_no_single_contribution_is_in_the_memory_or_journal_of_a_hub(strategy, secure, tmp_path):
    table = {"name": strategy, "local_steps": 1, "reply_codec": "bf16", "secure": secure}
    job = write_tiny(
        tmp_path,
        fleet={"members": MEMBERS},
        strategy=table,
        hub={"heartbeat_s": 0.05, "fsync": "never"},
    )
    address = f"tcp://127.0.0.1:{free_port()}"
    words = "hub", job, "--bind", address, "--any-job"
    with running(*words, cwd=tmp_path, program=EDGETRAIN) as hub:
        hub.until("waiting for")
        (folder,) = (tmp_path / "runs").iterdir()
        agreed = mask_terms_of(reading.load(tmp_path / job)) or False
        fleet = Fleet(address)
        links = fleet.links
        started = join_all(links, agreed)
        given: dict[tuple[int, int], list[bytes]] = {}
        generator = np.random.default_rng(7)
        searched = Searched(given)

        def submit(member: int, round: int) -> None:
            vector = generator.standard_normal(ELEMENTS).astype(np.float32)
            share = (member + 1) / MEMBERS if strategy == "fedavg" else 1.0
            given[member, round] = needles(vector, share)
            weight, start = float(member + 1) if strategy == "fedavg" else 1.0, started[member]
            links[member].submit(Submission(round, vector, weight, 0, start.checksum))

        for round in range(ROUNDS):
            held_back = round % MEMBERS
            for member in range(MEMBERS):
                if member != held_back:
                    submit(member, round)
            fleet.pump(lambda heard: not any(link.outbox.waiting for link in links))
            fleet.wait_for_beats()
            searched.look_at(hub.process.pid, folder, [round])
            submit(held_back, round)
            fleet.pump(lambda heard, r=round: all(r in link.inbox.rounds for link in links))
        searched.look_at(hub.process.pid, folder, range(ROUNDS))
        for link in links:
            link.leave("done")
        hub.finish()
    assert len(given) == MEMBERS * ROUNDS
    if secure:
        assert not searched.found
    else:
        places = {(where, member) for where, member, _ in searched.found}
        assert places == {(w, m) for w in ("memory", "journal") for m in range(MEMBERS)}
