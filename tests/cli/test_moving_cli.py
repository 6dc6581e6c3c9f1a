"""Hubs that are added and removed while a job trains, as processes, through the command line."""

from __future__ import annotations

import contextlib
import json
import stat
from pathlib import Path

import pytest
from command_line import edgetrain, running, write_tiny
from hub_runs import free_port, hub_folder, wait_for_rounds
from test_hubs_cli import keys

from edgetrain.__main__ import main
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import public_key
from edgetrain.runs.folder import ORDERS, read_metrics

pytestmark = pytest.mark.real

STEPS = 500


def write_job(cwd: Path, **strategy) -> str:
    cwd.mkdir(exist_ok=True)
    return write_tiny(
        cwd,
        data={"width": 200},
        fleet={"members": 2, "pace_s": 0.02},
        train={"steps": STEPS},
        strategy={
            "name": "dga", "local_steps": 2, "delay": 6, "final_sync": 0.0, "codec": "int8",
            "ranges": 3, **strategy,
        },
        hub={"heartbeat_s": 0.2, "fsync": "never"},
    )  # fmt: skip


def told(capsys, *words: str):
    capsys.readouterr()
    assert main(["control", *words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def trained(cwd: Path, capsys, *, moves: bool) -> bytes:
    """A job of two members, encrypted; the model it ends with. A hub is added, then removed."""
    job = write_job(cwd)
    at, spare_at = (f"tcp://localhost:{free_port()}" for _ in range(2))
    pis = [keys(cwd, f"pi-{i}") for i in range(2)]
    lead_door = keys(cwd, "lead", "pi-0", "pi-1")
    spare_door = keys(cwd, "spare", "pi-0", "pi-1", "lead")

    def pin(ring: str, address: str, said: str) -> None:  # as enrolment does
        Keyring(Path(ring)).pin_hubs({address: public_key(said.split()[-1])})

    with contextlib.ExitStack() as stack:
        start = lambda *words: stack.enter_context(running(*words, cwd=cwd))  # noqa: E731
        lead = start("hub", job, "--bind", at, *lead_door)
        lead.until("members join")
        public = lead.until("public key is")
        for _, ring in pis:
            pin(ring, at, public)
        folder = hub_folder(cwd)
        members = [
            start("member", job, "--hub", at, "--index", str(i), *pi) for i, pi in enumerate(pis)
        ]
        spare = None
        if moves:
            spare = start(
                "hub", job, "--spare", "--bind", spare_at, "--runs", "spare-runs", *spare_door
            )
            spare.until("members join")
            pin(lead_door[1], spare_at, spare.until("public key is"))
            wait_for_rounds(folder, 8)
            assert stat.S_IMODE((folder / ORDERS).stat().st_mode) == 0o600
            rows = told(capsys, str(folder), "add-hub", spare_at, "--json")["hubs"]
            spans = [(row["address"], row["first"], row["end"]) for row in rows]
            assert spans == [("", 0, 2), (spare_at, 2, 3)]
            assert main(["control", str(folder), "add-hub", spare_at]) == 2
            assert "is a hub of this job already" in capsys.readouterr().err
            assert main(["control", str(folder), "hubs"]) == 0
            assert f"2 to   3  {rows[1]['bytes']:>14,}  {spare_at}" in capsys.readouterr().out
            now = len(list(read_metrics(folder, "round")))
            wait_for_rounds(folder, now + 5)
            assert len(told(capsys, str(folder), "remove-hub", spare_at, "--json")["hubs"]) == 1
            assert spare.finish() == 0, spare.said
        assert [member.finish() for member in members] == [0, 0], [m.said for m in members]
        assert lead.finish() == 0, lead.said
        assert not (folder / ORDERS).exists()
    (model,) = cwd.glob("runs/*/model.safetensors")
    return model.read_bytes()


def test_a_hub_added_and_removed_by_order_changes_no_bit(tmp_path, capsys):
    assert trained(tmp_path / "moved", capsys, moves=True) == trained(
        tmp_path / "calm", capsys, moves=False
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere", "add-hub"), "`add-hub ADDRESS`"),
        ((".", "add-hub", "c:5555"), "c:5555"),
        ((".", "hubs"), ". is no run folder: it has no job.toml"),
        (("missing", "hubs"), "missing is no run folder"),
        (("missing", "hubs", "tcp://c:5555"), "stand alone"),
        ((".", "remove-hub", "tcp://c:5555"), ". is no run folder: it has no job.toml"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, said, tmp_path):
    done = edgetrain("control", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr
