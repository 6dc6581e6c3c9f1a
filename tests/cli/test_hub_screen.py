"""What a hub shows while it works: on a terminal and without one."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from contextlib import ExitStack

import pytest
from command_line import EDGETRAIN, running, write_tiny

from edgetrain.__main__ import main
from edgetrain.cli.screen import Screen
from edgetrain.runs.folder import FORMAT, read_metrics, read_summary
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.reports.page.story import report_of

ON_A_TERMINAL = (
    sys.executable, "-c",
    "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))",
)  # fmt: skip
STEPS, EVERY = 60, 5


def keys(capsys, *words):
    assert main(["keys", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def job(tmp_path, capsys):
    """A job of two members, a hub's keys and two devices' on its list; the hub's public key."""
    path = write_tiny(
        tmp_path, data={"width": 2000}, fleet={"members": 2, "pace_s": 0.02},
        train={"steps": STEPS}, strategy={"name": "dga", "local_steps": EVERY, "delay": EVERY},
        hub={"status_s": 0.2},
    )  # fmt: skip
    public = keys(capsys, "init", "--keys", str(tmp_path / "hub"))["public"]
    for name in ("pi-0", "pi-1"):
        key = keys(capsys, "init", "--keys", str(tmp_path / name))["public"]
        keys(capsys, "enroll", name, "--key", key, "--keys", str(tmp_path / "hub"))
    return path, public


def trained(job, cwd):
    """What the hub said, what the members said, and the folders of all three, the hub's first."""
    path, public = job
    words = ["hub", path, "--bind", "tcp://127.0.0.1:0", "--keys", "hub"]
    with ExitStack() as stack:
        hub = stack.enter_context(running(*EDGETRAIN, *words, cwd=cwd, program=ON_A_TERMINAL))
        address = re.search(r"tcp://127\S+", hub.until("members join"))[0]
        members = [
            stack.enter_context(
                running(
                    "member", path, "--hub", address, "--index", str(i), "--keys", f"pi-{i}",
                    "--hub-key", public, cwd=cwd,
                )
            )
            for i in range(2)
        ]  # fmt: skip
        assert [member.finish(200) for member in members] == [0, 0], [m.said for m in members]
        assert hub.finish() == 0, hub.said
    folders = sorted((cwd / "runs").iterdir(), key=lambda folder: not folder.name.endswith("-hub"))
    return hub.said, [member.said for member in members], folders


@pytest.mark.real
def test_a_hub_on_a_terminal_shows_its_members_by_name(job, tmp_path, monkeypatch):
    for name, value in {"COLUMNS": "120", "LINES": "30", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    said, told, folders = trained(job, tmp_path)
    rows = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in said.splitlines()]
    (*_, heading) = [row for row in rows if row.startswith("member")]
    assert all(column in heading for column in ("pace", "waiting", "round trip", "up", "memory"))
    for name in ("m0 pi-0", "m1 pi-1"):
        assert any(re.match(rf"{name} +\d+ +[\d.]+ m?s +\d+ % ", row) for row in rows), said
    assert "Traceback" not in said
    check_table(rows, folders)
    assert all(re.search(r"member-m\d: step 60/60, loss ", each) for each in told)
    # The folders together are one run, whose rounds lie within the exchanges of its members.
    (story,) = report_of(folders)
    assert sorted(story.members) == ["m0", "m1"]
    merged = {record["round"]: record["t"] for record in story.rounds}
    assert len(merged) == STEPS // EVERY
    for member in story.members.values():
        assert len(member.exchanges) == len(merged)
        for each in member.exchanges:
            assert each["submitted_t"] - 2 < merged[each["round"]] < each["arrived_t"] + 2
    assert story.summary["steps"] == STEPS


def check_table(rows, folders):
    """The hub's closing table, and summary, say what its members' say."""
    at = next(place for place, row in enumerate(rows) if row.startswith("strategy"))
    assert rows[at + 1].startswith("dga")
    hub, *members = map(read_summary, folders)
    for key in ("sent_bytes", "received_bytes"):
        assert hub[key] == pytest.approx(sum(member[key] for member in members), rel=0.1), key
    mean = sum(member["seconds_per_step"] for member in members) / 2
    assert hub["seconds_per_step"] == pytest.approx(mean, rel=0.05)
    assert (hub["steps"], hub["rounds"], hub["status"]) == (STEPS, STEPS // EVERY, "finished")
    assert hub["format"] == FORMAT
    assert hub["began"].endswith("Z")
    assert not list(read_metrics(folders[0], "step"))
    versions = [line["about"] for line in read_metrics(folders[0], "status") if "versions" in line]
    assert sorted(versions) == ["m0", "m1"], "once"


# -- the screen -----------------------------------------------------------------------------------


def test_without_a_terminal_there_are_plain_lines(tmp_path):
    out = io.StringIO()
    with Screen("", out) as screen:
        screen.follow(tmp_path)
        with MetricsLog(tmp_path / "metrics.jsonl", "hub", lambda: 4.0, 0.0) as log:
            keys = {
                "step": 60, "steps": 60, "round": 12, "at": 3.0, "pace_s": 0.05, "compute_s": 2.0,
                "wait_s": 1.0, "overhead_s": 0.0, "round_trip_s": 0.2, "sent_bytes": 5000,
                "received_bytes": 4000, "peak_bytes": 1 << 28, "celsius": 81, "throttled": True,
            }  # fmt: skip
            log.status(about="m0", name="pi-0", keys=keys)
    (run, member) = out.getvalue().splitlines()
    assert "step 60, 50.0 ms/step (compute 33.3 ms, wait 16.7 ms" in run
    assert "loss" not in run, "a hub knows none"
    assert member == (
        "  m0 pi-0: step 60, 50.0 ms/step, waiting 33 %, round trip 200 ms, "
        "sent 5.00 kB received 4.00 kB, memory 268 MB, 81 C throttled"
    )


class Stuck:
    """A terminal that reads nothing until `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.lines = []

    def isatty(self):
        return False

    def write(self, text):
        self.go.wait(10)
        self.lines.append(text)

    def flush(self):
        pass


def test_a_terminal_that_does_not_read_stops_nobody(tmp_path):
    out = Stuck()
    out.go.set()
    with Screen("", out) as screen:
        screen.say("before")
        out.go.clear()
        screen.follow(tmp_path)
        for number in range(5000):
            screen.say(f"line {number}")  # would wait for ever
        out.go.set()
    written = "".join(out.lines).splitlines()
    assert written[0] == "before"
    assert written[-1] == "line 4999"
    assert len(written) <= 1010
