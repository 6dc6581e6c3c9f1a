"""Masked jobs as people run them: real processes over loopback, one of them killed on the way."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import edgetrain, running, write_tiny

from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.masks.fixed_point import FixedPoint
from edgetrain.runs import folder as runs

pytestmark = pytest.mark.real

MEMBERS, STEPS, EVERY, BATCH = 4, 60, 2, 4


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def job_in(folder: Path, **strategy: object) -> str:
    return write_tiny(
        folder,
        fleet={"members": MEMBERS, "pace_s": 0.01},
        train={"steps": STEPS, "batch": BATCH, "optimizer": {"name": "sgd", "lr": 0.05}},
        strategy={"local_steps": EVERY, "secure": True, **strategy},
        hub={"heartbeat_s": 0.1, "lost_after_s": 0.4, "fsync": "never"},
    )


def flat(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def trained_by(rounds: list[Round], folder: Path, initial: np.ndarray) -> np.ndarray:
    """The base after a plain run to which just these contributed: torch, and a mean."""
    sys.path.insert(0, str(folder))
    import tiny

    task, base = tiny.Tiny(), initial.copy()
    model = task.model()
    batches = [task.batches(m, MEMBERS, BATCH, 0) for m in range(MEMBERS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for record in rounds:
        own = []
        for member in range(MEMBERS):
            torch.nn.utils.vector_to_parameters(torch.from_numpy(base.copy()), model.parameters())
            for batch in itertools.islice(batches[member], EVERY):
                optimizer.zero_grad()
                task.loss(model, batch).backward()
                optimizer.step()
            if any(c.member == f"m{member}" for c in record.counted):
                own.append(flat(model) - base)
        if own:
            base += np.mean(own, axis=0, dtype=np.float64).astype(np.float32)
    return base


def test_a_member_is_killed_and_the_model_is_the_plain_one_but_for_rounding(tmp_path, own_imports):
    job = job_in(tmp_path, name="local-sgd")
    address = f"tcp://localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(running("hub", job, "--bind", address, cwd=tmp_path))
        hub.until("members join")
        (folder,) = (tmp_path / "runs").iterdir()
        members = [
            stack.enter_context(
                running("member", job, "--hub", address, "--index", str(i), cwd=tmp_path)
            )
            for i in range(MEMBERS)
        ]
        deadline = time.monotonic() + 90
        while len(list(runs.read_metrics(folder, "round"))) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        members[2].process.kill()
        assert [m.finish(120) for m in members] == [0, 0, -signal.SIGKILL, 0]
        assert hub.finish() == 0
    with contextlib.closing(Journal(folder / "journal")) as journal:
        rounds = [record for record in journal.records() if isinstance(record, Round)]
        initial = journal.state.base.copy()
    base = initial.copy()
    for record in rounds:
        base += np.frombuffer(b"".join(map(bytes, record.reply)), np.float32)
    counts = [len(record.counted) for record in rounds]
    assert len(rounds) == STEPS // EVERY
    assert counts[0] == MEMBERS
    assert counts[-1] == MEMBERS - 1
    # The loss is a parabola, so no difference grows from a round to the next: each adds at most
    # what rounding to fixed point and to float32 is.
    bound = len(rounds) * (FixedPoint(8.0, MEMBERS).error(MEMBERS, 3.0) + 2e-7)
    difference = np.abs(base - trained_by(rounds, tmp_path, initial)).max()
    assert difference <= bound
    assert np.abs(base - initial).max() > 1000 * bound, "it has learnt something"


@contextlib.contextmanager
def one_too_few(folder, *overrides):
    """Within: a hub that needs three members for a sum, and the two of four that are left."""
    job = job_in(folder, name="dga", delay=4)
    address = f"tcp://localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        words = ("hub", job, "train.steps=100000", *overrides, "--bind", address)
        hub = stack.enter_context(running(*words, cwd=folder))
        hub.until("members join")
        words = ("member", job, "train.steps=100000", *overrides, "--hub", address, "--index")
        members = [stack.enter_context(running(*words, str(i), cwd=folder)) for i in range(MEMBERS)]
        (run,) = (folder / "runs").iterdir()
        deadline = time.monotonic() + 90
        while len(list(runs.read_metrics(run, "round"))) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for member in members[2:]:
            member.process.kill()
        for _ in members[2:]:
            hub.until("gone: unreachable")
        yield hub, members[:2], run


def test_a_hub_with_too_few_members_left_answers_sigterm(tmp_path):
    with one_too_few(tmp_path, "deadline_s=0.2") as (hub, _, run):
        hub.until("is given up")
        hub.process.send_signal(signal.SIGTERM)
        assert hub.finish() == 128 + signal.SIGTERM
        assert "go on with: edgetrain hub --resume" in hub.said
        given_up = [r for r in runs.read_metrics(run, "round") if not r["members"]]
        assert len(given_up) < 100


def test_a_job_with_too_few_members_left_ends_and_can_be_resumed(tmp_path):
    with one_too_few(tmp_path, "hub.rejoin_s=1") as (hub, members, _):
        assert hub.finish() == 2
        assert "2 of at least 3 members are left" in hub.said.splitlines()[-1]
        assert "go on with: edgetrain hub --resume" in hub.said
        for member in members:
            assert member.finish() == 75, "a service starts it again: the hub may be resumed"
            assert "2 of at least 3 members are left" in member.said


def test_edgetrain_run_with_a_delay(tmp_path):
    job = job_in(tmp_path, name="dga", delay=6, final_sync=0)
    done = edgetrain("run", job, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["status"] == "finished"
    (folder,) = (tmp_path / "runs").iterdir()
    rounds = list(runs.read_metrics(folder, "round"))
    assert len(rounds) == STEPS // EVERY
    assert all(len(record["members"]) == MEMBERS for record in rounds)
    ended = {e["reason"] for e in runs.read_metrics(folder, "event") if e["event"] == "finished"}
    assert len(ended) == 1


def test_a_member_of_a_secure_job_does_not_take_part_where_the_hub_would_see_more(tmp_path):
    job = job_in(tmp_path, name="dga")
    address = f"tcp://localhost:{free_port()}"
    with running(
        "hub", job, "--any-job", "--bind", address, "secure=false", cwd=tmp_path
    ) as hub:  # fmt: skip
        hub.until("members join")
        said = edgetrain("member", job, "--hub", address, "--index", "0", cwd=tmp_path)
    assert said.returncode == 2
    assert "contributions to this hub are not masked" in said.stderr
