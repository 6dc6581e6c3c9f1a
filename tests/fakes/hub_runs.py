"""Run folders and journals of hubs that tests start, looked at from outside."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from patience import patience

from edgetrain.__main__ import main
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.records import Round
from edgetrain.runs.folder import read_metrics


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def journal_of(folder: Path):
    """(rounds merged, checksum of the base, every (member, round) counted), from the disk."""
    journal = Journal(folder)
    state = journal.state
    rounds = [record for record in journal.records() if isinstance(record, Round)]
    journal.close()
    counted = [(c.member, c.meant_for) for record in rounds for c in record.counted]
    last = rounds[-1].checksum if rounds else dict(state.checksums)[state.round]
    return state.round + len(rounds), last, counted


def hub_folder(cwd: Path) -> Path:
    (found,) = [run for run in (cwd / "runs").iterdir() if run.name.endswith("hub")]
    return found


def wait_for_rounds(folder: Path, rounds: int) -> None:
    """Look at the journal's size: reading it would take its lock."""
    deadline = time.monotonic() + patience(60)
    while time.monotonic() < deadline:
        if len(list(read_metrics(folder, "round"))) >= rounds:
            return
        time.sleep(0.01)
    raise AssertionError(f"not {rounds} rounds within a minute")


def keys(cwd: Path, name: str, *friends: str) -> tuple[str, ...]:
    """The words with which a machine with keys of its own is started; it lets `friends` in."""
    folder = str(cwd / name)
    assert main(["keys", "init", "--keys", folder]) == 0
    for friend in friends:
        main(["keys", "enroll", friend, "--key", f"{cwd / friend}/key", "--keys", folder])
    return ("--keys", folder)
