"""Processes that are killed: the hub comes back on its port, and the members find it again."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from command_line import edgetrain, running, write_tiny
from hub_runs import free_port, hub_folder, journal_of, wait_for_rounds

from edgetrain.runs.folder import read_metrics

pytestmark = pytest.mark.real


def trained(cwd: Path, strategy: str, ends: dict[int, signal.Signals]) -> tuple[int, int]:
    """A job of two members whose hub gets signals after so many rounds; what its journal ends
    with."""
    cwd.mkdir()
    job = write_tiny(
        cwd,
        fleet={"members": 2, "pace_s": 0.01},
        train={"steps": 60},
        strategy={"name": strategy, **({} if strategy == "sync-sgd" else {"local_steps": 2})},
        hub={"heartbeat_s": 0.2, "fsync": "never"},
    )
    if strategy == "dga":
        (cwd / job).write_text(
            (cwd / job)
            .read_text()
            .replace("local_steps = 2", "local_steps = 2\ndelay = 6\nfinal_sync = 0")
        )
    address = f"tcp://localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(running("hub", job, "--bind", address, cwd=cwd))
        hub.until("members join")
        folder = hub_folder(cwd)
        members = [
            stack.enter_context(
                running("member", job, "--hub", address, "--index", str(i), cwd=cwd)
            )
            for i in range(2)
        ]
        for end, number in ends.items():
            wait_for_rounds(folder, end)
            hub.process.send_signal(number)
            if number == signal.SIGKILL:
                assert hub.finish() == -number
            else:
                assert hub.finish() == 128 + number, hub.said
                rounds = int(hub.said.split("stopped after ")[1].split()[0])
                assert [p.stem for p in (folder / "journal").glob(f"*{rounds}.base")]
            hub = stack.enter_context(
                running("hub", "--resume", str(folder), "--bind", address, cwd=cwd)
            )
            hub.until("resumed after")
        assert [member.finish() for member in members] == [0, 0], [m.said for m in members]
        assert hub.finish() == 0, hub.said
    rounds, checksum, counted = journal_of(folder / "journal")
    assert len(counted) == len(set(counted))
    backs = [e for e in read_metrics(folder, "event") if e["event"] == "back"]
    assert len(backs) >= 2 * len(ends)
    return rounds, checksum


@pytest.mark.parametrize(
    ("strategy", "rounds", "signals"),
    [
        ("dga", 30, [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGTERM]),
        ("sync-sgd", 60, [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL]),
    ],
)
def test_hubs_that_are_killed_or_told_to_stop_change_nothing(strategy, rounds, signals, tmp_path):
    unhurt = trained(tmp_path / "unhurt", strategy, {})
    assert unhurt[0] == rounds
    hurt = trained(tmp_path / "hurt", strategy, dict(zip((5, 11, 17, 23), signals, strict=True)))
    assert hurt == unhurt


def test_what_cannot_be_resumed_is_said_in_one_line(tmp_path):
    for words, says in (
        (("--resume", "nowhere"), "nowhere is no run folder"),
        (("--resume", "x", "--no-journal"), "says there is none"),
    ):
        done = edgetrain("hub", *words, cwd=tmp_path)
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
