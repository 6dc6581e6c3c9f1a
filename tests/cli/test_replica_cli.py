"""A hub that is killed for good: its replica goes on, and members find it by the hub alone."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from command_line import edgetrain, running, write_tiny
from hub_runs import free_port, hub_folder, journal_of, keys, wait_for_rounds

from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import public_key
from edgetrain.runs.folder import read_summary

pytestmark = pytest.mark.real

ROUNDS = 60


def write_job(cwd, **hub) -> tuple[str, str, str]:
    """The job's file, and the addresses of hub and replica."""
    cwd.mkdir(exist_ok=True)
    hub_at, replica_at = (f"tcp://localhost:{free_port()}" for _ in range(2))
    job = write_tiny(
        cwd,
        fleet={"members": 2, "pace_s": 0.01},
        train={"steps": 2 * ROUNDS},
        strategy={"name": "dga", "local_steps": 2, "delay": 6, "final_sync": 0.0},
        hub={"heartbeat_s": 0.2, "fsync": "never", "quorum": 2, "replica": replica_at, **hub},
    )
    return job, hub_at, replica_at


def trained(cwd, *, killed: bool):
    """(rounds, checksum of the base, contributions counted) at the end of a job; encrypted where
    the hub is killed, so that members need the replica's key from it."""
    job, hub_at, replica_at = write_job(cwd)
    pis = [keys(cwd, f"pi-{i}") if killed else () for i in range(2)]
    second = keys(cwd, "replica", "pi-0", "pi-1") if killed else ()
    first = keys(cwd, "hub-keys", "pi-0", "pi-1", "replica") if killed else ()
    with contextlib.ExitStack() as stack:
        start = lambda *words: stack.enter_context(running(*words, cwd=cwd))  # noqa: E731
        hub = start("hub", job, "--bind", hub_at, *first)
        if killed:
            public = public_key(hub.until("public key is").split()[-1])
            for _, ring in (*pis, second):  # as enrolment does
                Keyring(Path(ring)).pin_hubs({hub_at: public})
        else:
            hub.until("members join")
        folder = hub_folder(cwd)
        flags = ("--replica-of", hub_at, "--runs", "copies")
        replica = start("hub", job, "--bind", replica_at, *flags, *second)
        replica.until("replica of the hub")
        hub.until("it is here")
        members = [
            start("member", job, "--hub", hub_at, "--index", str(i), *pi)
            for i, pi in enumerate(pis)
        ]
        if killed:
            wait_for_rounds(folder, 10)
            hub.process.kill()
            replica.until("taking over")
        assert [member.finish() for member in members] == [0, 0], [m.said for m in members]
        assert replica.finish() == 0, replica.said
        if not killed:
            assert hub.finish() == 0, hub.said
            assert read_summary(folder)["status"] == "finished"
    (copied,) = (cwd / "copies").iterdir()
    return journal_of(copied / "journal")


def test_a_replica_takes_over_from_a_hub_that_was_killed_with_the_same_bits(tmp_path):
    calm = trained(tmp_path / "calm", killed=False)
    found = trained(tmp_path / "killed", killed=True)
    assert found[:2] == calm[:2]
    assert found[0] == ROUNDS
    assert sorted(found[2]) == sorted(calm[2])
    assert len(found[2]) == len(set(found[2])) == 2 * ROUNDS


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hub.quorum=1"], r"hub.quorum = 1 and hub.replica: .*say hub.quorum=2 or more"),
        (["hub.replica=nowhere"], "nowhere"),
        (["hub.on_disk_full=go on"], "hub.on_disk_full = 'go on' and hub.replica"),
        (["strategy.name=ssp(2)", "hub.quorum=2"], r"ssp\(2\) and hub.quorum = 2"),
        (["--no-journal"], "hub.replica = .* and --no-journal"),
        (["--any-job"], "hub.replica = .* and --any-job"),
        (["--replica-of", "tcp://localhost:1", "--no-journal"], "--replica-of and --no-journal"),
    ],
)
def test_bad_input_costs_one_line(tmp_path, overrides, said):
    job, hub_at, _ = write_job(tmp_path)
    words = ["hub", job, "--bind", hub_at, *overrides]
    done = edgetrain(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(said, " ".join((done.stdout + done.stderr).split()))


def test_a_replica_that_is_its_own_hub_is_refused(tmp_path):
    job, _, replica_at = write_job(tmp_path)
    done = edgetrain("hub", job, "--bind", replica_at, cwd=tmp_path)
    assert (done.returncode, "is this hub itself" in done.stdout + done.stderr) == (2, True)
    done = edgetrain("hub", job, "--bind", replica_at, "--replica-of", replica_at, cwd=tmp_path)
    assert (done.returncode, "own address" in done.stdout + done.stderr) == (2, True)
