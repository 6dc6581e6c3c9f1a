"""A hub process with little to live on: few descriptors, and peers that take what they can."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
from command_line import EDGETRAIN, running
from hub_runs import hub_folder, journal_of
from raw_member import RawMember, train

from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.zeromq.curve import new_pair


class Place:
    """A hub process of a job with two members, keyed or not, under limits that a shell sets."""

    def __init__(self, stack, folder: Path, limits: str, *words: str, keyed=True):
        keys = Keyring(folder / "keys")
        pair = keys.init(new_pair)
        pairs = [new_pair(), new_pair()]
        for number, each in enumerate(pairs):
            keys.allow(each.public, f"pi-{number}")
        self.devices = [Credentials(each, pair.public) if keyed else None for each in pairs]
        program = ("sh", "-c", f'{limits}; exec "$@"', "sh", *EDGETRAIN)
        words = ("--keys", str(folder / "keys"), *words) if keyed else words
        self.hub = stack.enter_context(
            running(
                "hub", "members=2", "strategy=local-sgd", "every=1", "--any-job",
                "--bind", "tcp://127.0.0.1:0", *words, cwd=folder, program=program,
            )
        )  # fmt: skip
        self.address = self.hub.until("members join").split()[-1]
        self.hub.until("run folder")

    def join(self, number: int) -> RawMember:
        return RawMember(self.address, self.devices[number], f"pi-{number}").ask()

    def members(self) -> list[RawMember]:
        """Both, after training has begun."""
        found = [self.join(0), self.join(1)]
        for member in found:
            member.start()
        return found

    @contextlib.contextmanager
    def strangers(self, count: int):
        """Connections that say nothing."""
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                end = stack.enter_context(socket.socket())
                end.setblocking(False)
                end.connect_ex(split_address(self.address))
            yield


@pytest.mark.parametrize("keyed", [True, False])
def test_silent_connections_do_not_end_a_hub_with_few_descriptors(keyed, tmp_path):
    """Every round writes a snapshot, which opens files, and reads the kernel's counters."""
    with contextlib.ExitStack() as stack:
        place = Place(stack, tmp_path, "ulimit -n 128", "hub.snapshot_every=1", keyed=keyed)
        members = place.members()
        train(members, 3)
        with place.strangers(500):
            train(members, 30)
            members[1].leave()
            members[1] = place.join(1).start()
            train(members, 10)
        for member in members:
            member.leave()
        assert place.hub.finish() == 0, place.hub.said
    assert "cannot be written" not in place.hub.said
    rounds, _, _ = journal_of(hub_folder(tmp_path) / "journal")
    assert rounds >= 42
