"""A hub, the gateway of a site and its members, as processes: the bits of a star, encrypted."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from command_line import edgetrain, running, write_tiny
from hub_runs import free_port, journal_of, keys, wait_for_rounds
from wrong_hubs import at_first

from edgetrain.__main__ import main
from edgetrain.runs.folder import read_metrics

pytestmark = pytest.mark.real


def run_folder(cwd: Path, name: str) -> Path:
    (found,) = (cwd / "runs").glob(f"*-{name}")
    return found


def trained(cwd: Path, sites: bool) -> tuple[int, int]:
    """A job of two members; what the hub's journal ends with. With `sites` they are behind a
    gateway that is killed on the way, and whose first address is another fleet's hub's."""
    cwd.mkdir()
    job = write_tiny(
        cwd,
        fleet={"members": 2, "pace_s": 0.01, "gateways": True},
        train={"steps": 60},
        strategy={"name": "dga", "local_steps": 2, "delay": 6, "final_sync": 0.0, "codec": "int8"},
        hub={"heartbeat_s": 0.2, "fsync": "never"},
    )
    top, here = (f"tcp://localhost:{free_port()}" for _ in range(2))
    joined = here if sites else top
    pis = [keys(cwd, f"pi-{i}") for i in range(2)]
    gate = keys(cwd, "gate", "pi-0", "pi-1")
    door, pinned = keys(cwd, "hub", "gate"), ""
    with contextlib.ExitStack() as stack:

        def start(*words: str):
            return stack.enter_context(running(*words, cwd=cwd))

        hub = start("hub", job, "--bind", top, *(door if sites else ()))
        hub.until("members join")
        if sites:
            public = hub.until("public key is").split()[-1]
            wrong = stack.enter_context(at_first("other key", cwd))
            up = "--above", wrong, "--above", top, "--members", "2", "--name", "s0", "--bind", here
            up = (*up, *gate, "--above-key", public)
            gateway = start("gateway", job, *up)
            gateway.until("members join")
            pinned = gateway.until("public key is").split()[-1]
        ends = [(*pi, "--hub-key", pinned) if sites else () for pi in pis]
        members = [
            start("member", job, "--hub", joined, "--index", str(i), *end)
            for i, end in enumerate(ends)
        ]
        if sites:
            folder = run_folder(cwd, "gateway")
            wait_for_rounds(folder, 8)
            gateway.process.send_signal(signal.SIGKILL)
            gateway.finish()
            gateway = start("gateway", "--resume", str(folder), *up)
            gateway.until("resumed after")
            assert gateway.finish() == 0, gateway.said
            assert "bytes to the hub above" in gateway.said
        assert [member.finish() for member in members] == [0, 0], [m.said for m in members]
        assert hub.finish() == 0, hub.said
    if sites:
        last = list(read_metrics(folder, "round"))[-1]
        assert last["above_sent_bytes"] > 0
        assert 0 < last["above_received_bytes"] < last["sent_bytes"]
    rounds, checksum, counted = journal_of(run_folder(cwd, "hub") / "journal")
    assert len(counted) == len(set(counted))
    return rounds, checksum


def test_a_site_behind_a_gateway_that_dies_is_a_star(tmp_path):
    assert trained(tmp_path / "site", sites=True) == trained(tmp_path / "star", sites=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gateways=false",), "fleet.gateways = false: the hub of this job lets no gateway in"),
        (("gateways=true", "secure=true", "strategy=fedavg"), "masks are removed from the sum"),
        (("gateways=true", "merge=median"), "compares members"),
        (("gateways=true", "strategy=ssp(2)"), "have no rounds together"),
        (("gateways=true", "strategy=streaming-diloco(2, 0.5)"), "a fragment a round"),
        (("gateways=true", "strategy=sync-sgd", "codec=powersgd(2)"), "mean something at one hub"),
        (("gateways=true", "--members", "9"), "--members 9: allowed are 1 to 4"),
        (("gateways=true", "--above", "tcp://nowhere.invalid:5"), "nowhere.invalid"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, said, tmp_path):
    given = words if "--above" in words else (*words, "--above", "tcp://localhost:7")
    given = given if "--members" in given else (*given, "--members", "2")
    done = edgetrain("gateway", *given, cwd=tmp_path)
    assert done.returncode in (2, 75)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_one_machine_plays_gateways_at_sites_only(verb, tmp_path):
    done = edgetrain(verb, "gateways=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "gateways = true without sites: no gateway would stand anywhere" in done.stderr


def test_a_gateway_is_not_above_itself(tmp_path):
    for bind in ("tcp://localhost:5551", "tcp://*:5551"):
        words = "gateway", "gateways=true", "--members", "2", "--above", "tcp://localhost:5551"
        done = edgetrain(*words, "--bind", bind, cwd=tmp_path)
        assert done.returncode == 2
        assert "gateway's own address" in done.stderr


def test_who_may_not_join_a_gateway_or_be_one_is_told_in_one_line(tmp_path):
    job = write_tiny(
        tmp_path,
        fleet={"members": 2, "gateways": True},
        train={"steps": 60},
        strategy={"name": "dga"},
        hub={"heartbeat_s": 0.2, "lost_after_s": 0.4},
    )
    top, here, alone = (f"tcp://localhost:{free_port()}" for _ in range(3))
    pis = [keys(tmp_path, f"pi-{i}") for i in range(3)]
    stranger = keys(tmp_path, "stranger")
    gate, door = keys(tmp_path, "gate", "pi-0", "pi-1", "pi-2"), keys(tmp_path, "hub", "gate")
    impostor = keys(tmp_path, "impostor", "pi-2")
    with contextlib.ExitStack() as stack:

        def start(*words: str):
            return stack.enter_context(running(*words, cwd=tmp_path))

        def told(*words: str) -> str:
            """The last line of a process that ends because it may not do what it wants."""
            command = start(*words)
            assert command.finish() == 2, command.said
            return command.said.strip().splitlines()[-1]

        hub = start("hub", job, "--bind", top, *door)
        public = hub.until("public key is").split()[-1]

        def gateway(bind: str, own: tuple[str, ...]):
            up = "--above", top, "--members", "1", "--bind", bind, "--above-key", public
            command = start("gateway", job, *up, *own)
            return command, command.until("public key is").split()[-1]

        _, pinned = gateway(here, gate)
        member = "member", job, "--index", "0", "--hub", here, "--hub-key", pinned
        assert "does not let this machine's key in" in told(*member, *stranger)
        assert "refused: job: the hub runs job" in told(*member, *pis[0], "steps=61")
        main(["keys", "revoke", "pi-1", "--keys", str(tmp_path / "gate")])
        assert "does not let this machine's key in" in told(*member, *pis[1])

        wrong, pinned = gateway(alone, impostor)
        member = "member", job, "--index", "1", "--hub", alone, "--hub-key", pinned
        start(*member, *pis[2])
        assert wrong.finish() == 2
        assert "edgetrain: the hub does not let this machine's key in" in wrong.said
    far = "gateway", job, "--above", top, "--members", "1", "--bind", here, "--insecure"
    done = edgetrain(*far, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (75, 1)
    assert f"nothing listens at {top}" in done.stderr
