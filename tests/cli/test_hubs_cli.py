"""A job with several hubs, as processes: the bits of one hub, whoever dies; encrypted."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from command_line import edgetrain, running, write_tiny
from hub_runs import free_port, journal_of, keys, wait_for_rounds

from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import public_key

pytestmark = pytest.mark.real

HUBS = 3


def hub_folder(cwd: Path, number: int) -> Path:
    (found,) = (cwd / f"runs{number}").glob("*-hub")
    return found


def trained(cwd: Path, hubs: int) -> bytes:
    """A job of two members; the model that it ends with. Of several hubs one is killed."""
    cwd.mkdir()
    addresses = [f"tcp://localhost:{free_port()}" for _ in range(hubs)]
    job = write_tiny(
        cwd,
        data={"width": 200},
        fleet={"members": 2, "pace_s": 0.01},
        train={"steps": 60},
        strategy={
            "name": "dga", "local_steps": 2, "delay": 6, "final_sync": 0.0, "codec": "int8",
            "ranges": HUBS,
        },
        hub={"heartbeat_s": 0.2, "fsync": "never", "hubs": addresses if hubs > 1 else []},
    )  # fmt: skip
    pis = [keys(cwd, f"pi-{i}") for i in range(2)]
    with contextlib.ExitStack() as stack:

        def start(*words: str):
            return stack.enter_context(running(*words, cwd=cwd))

        def serve(number: int, *words: str):
            where = "--bind", addresses[number - 1], "--runs", f"runs{number}"
            more = ("--number", str(number)) if hubs > 1 else ()
            return start("hub", *words, *where, *more, *doors[number - 1])

        doors = [keys(cwd, f"hub-{i}", "pi-0", "pi-1") for i in range(hubs)]
        served = [serve(1 + number, job) for number in range(hubs)]
        for number, hub in enumerate(served):
            hub.until("members join")
            public = hub.until("public key is").split()[-1]
            for _, ring in pis:  # as enrolment does
                Keyring(Path(ring)).pin_hubs({addresses[number]: public_key(public)})
        joined = () if hubs > 1 else ("--hub", addresses[0])
        members = [
            start("member", job, *joined, "--index", str(i), *pi) for i, pi in enumerate(pis)
        ]
        if hubs > 1:
            folder = hub_folder(cwd, 2)
            wait_for_rounds(folder, 8)
            served[1].process.send_signal(signal.SIGKILL)
            served[1].finish()
            served[1] = serve(2, "--resume", str(folder))
            served[1].until("resumed after")
        assert [member.finish() for member in members] == [0, 0], [m.said for m in members]
        assert [hub.finish() for hub in served] == [0] * hubs, [h.said for h in served]
    rounds = set()
    for number in range(hubs):
        merged, _, counted = journal_of(hub_folder(cwd, 1 + number) / "journal")
        assert len(counted) == len(set(counted))
        rounds.add(merged)
    assert len(rounds) == 1
    (model,) = cwd.glob("runs/*/model.safetensors")
    return model.read_bytes()


def test_three_hubs_of_which_one_dies_are_one(tmp_path):
    assert trained(tmp_path / "three", HUBS) == trained(tmp_path / "one", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hub.hubs=['tcp://a:1', 'tcp://b:1']",), "2 hubs share 1 ranges"),
        (("hub.hubs=['tcp://a:1', 'tcp://a:1']", "ranges=4"), "one address twice"),
        (("hub.hubs=['tcp://a:1', 'b']", "ranges=4"), "b"),
        (("hub.hubs=['tcp://a:1', 'tcp://b:1']", "ranges=4", "strategy=ssp(2)"), "out of step"),
        (("hub.hubs=['tcp://a:1', 'tcp://b:1']", "ranges=4", "merge=median"), "compares members"),
        (("hub.hubs=['tcp://a:1', 'tcp://b:1']", "ranges=4", "--number", "3"), "allowed are 1 to"),
        (("--number", "2"), "--number 2: allowed are 1 to 1"),
        (("ranges=4", "codec=auto"), "looks at the whole vector"),
        (("ranges=4", "strategy=streaming-diloco(2, 0.5)"), "a fragment a round"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, said, tmp_path):
    done = edgetrain("hub", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there is no hub to join"),
        (("hub.hubs=['tcp://a:1', 'tcp://b:1']", "ranges=2", "--hub", "tcp://a:1"), "leave --hub"),
        (("hub.hubs=['tcp://a:1', 'tcp://b:1']", "ranges=2", "--hub-key", "x"), "one hub's"),
    ],
)
def test_a_member_is_told_which_hubs_to_join(words, said, tmp_path):
    done = edgetrain("member", "--index", "0", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
