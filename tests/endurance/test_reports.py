"""What members' reports to the hub cost, and whether what it then says of the fleet is true."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials, spell
from edgetrain.exchange.member.telemetry import Sums, Telemeter
from edgetrain.exchange.messages import Figure, Telemetry, pack
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.training.member.readings import readings_of

EDGETRAIN = (sys.executable, "-m", "edgetrain")
MESSAGES = 400
PERIOD_S, STEP_S = 5.0, 0.05
BURNERS = int(os.environ.get("BURNERS", "10"))
"""Processes that compute beside a run."""
FLEET = ("members=2", "steps=200", "pace_s=0.05", "local_steps=5", "delay=5")


def costs() -> dict[str, Any]:
    """Bytes on an encrypted connection, and seconds, of one message."""
    with tempfile.TemporaryDirectory() as folder:
        ring = Keyring(Path(folder) / "hub")
        pair = ring.init(new_pair)
        own = new_pair()
        ring.allow(own.public, "pi-0")
        hub = HubSocket("tcp://127.0.0.1:0", gate=Gate(ring))
        member = MemberSocket(hub.address, credentials=Credentials(own, pair.public))
        sizes: list[int] = []

        def say(message: Telemetry | Figure) -> None:
            frames = pack(message)
            sizes.append(sum(map(len, frames)))
            member.send(frames)

        def sums() -> Sums:
            return Sums(72_000, 14_400, time.monotonic(), 700.0, 30.0, 12.0)

        meter = Telemeter(
            PERIOD_S, time.monotonic() - 3600, time.monotonic, sums, member.traffic, say
        )
        meter.read = readings_of()
        meter.say()
        _drain(hub, 1)
        before, spent = member.traffic().sent_bytes, 0.0
        for _ in range(MESSAGES):
            began = time.thread_time()
            meter.say()
            spent += time.thread_time() - began
            _drain(hub, 1)
        sent = (member.traffic().sent_bytes - before) / MESSAGES
        looks = 200_000
        began = time.thread_time()
        for _ in range(looks):
            meter.poll()
        look_s = (time.thread_time() - began) / looks
        member.close()
        hub.close()
    message_s = spent / MESSAGES
    share = (look_s + message_s * STEP_S / PERIOD_S) / STEP_S
    return {
        "message_bytes": sum(sizes) / len(sizes),
        "wire_bytes_a_second": sent / PERIOD_S,
        "message_us": 1e6 * message_s,
        "look_us": 1e6 * look_s,
        "share_of_a_step_of_50_ms": share,
    }


def _drain(hub: HubSocket, count: int) -> None:
    end = time.monotonic() + 20
    while count and time.monotonic() < end:
        count -= sum(1 for _ in hub.poll(0.5))


def fleet() -> dict[str, Any]:
    """A hub and two members with keys, and the emulated run of their job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ring = Keyring(folder / "hub")
        public = spell(ring.init(new_pair).public)
        for index in range(2):
            own = Keyring(folder / f"pi-{index}").init(new_pair)
            ring.allow(own.public, f"pi-{index}")
        words = [*EDGETRAIN, "hub", *FLEET, "--bind", "tcp://127.0.0.1:0", "--keys", "hub"]
        with _started(words, folder) as hub:
            assert hub.stdout is not None
            said = ""
            while (found := re.search(r"join (tcp://\S+)", said)) is None:
                said += hub.stdout.readline()
            members = [
                _started(
                    [
                        *EDGETRAIN, "member", *FLEET, "--hub", found[1], "--index", str(index),
                        "--keys", f"pi-{index}", "--hub-key", public,
                    ],
                    folder,
                )
                for index in range(2)
            ]  # fmt: skip
            for each in (*members, hub):
                each.communicate()
        runs = sorted((folder / "runs").iterdir(), key=lambda each: each.name.endswith("-hub"))
        told = [read_summary(each) or {} for each in runs]
        subprocess.run([*EDGETRAIN, "run", *FLEET, "--runs", "emulated"], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        (run,) = (folder / "emulated").iterdir()
        emulated = read_summary(run) or {}
        merged = {record["round"]: record["t"] for record in read_metrics(runs[-1], "round")}
        off = [
            max(
                line["submitted_t"] - merged[line["round"]],
                merged[line["round"]] - line["arrived_t"],
            )
            for each in runs[:-1]
            for line in read_metrics(each, "exchange")
        ]
    hub_said = told[-1]
    return {
        "sent_bytes": {"hub": hub_said["sent_bytes"], "emulated": emulated["sent_bytes"]},
        "received_bytes": {
            "hub": hub_said["received_bytes"], "emulated": emulated["received_bytes"],
        },
        "seconds_per_step": {
            "hub": hub_said["seconds_per_step"], "members": [
                each["seconds_per_step"] for each in told[:-1]
            ], "emulated": emulated["seconds_per_step"],
        },
        "exchanges": len(off),
        "most_ms_outside_their_round": 1000 * max(0.0, *off),
    }  # fmt: skip


def _started(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True)


def frames(burners: int, steps: int) -> dict[str, Any]:
    """Seconds to the first output of a run on a terminal, and between two changes of it."""
    burning = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(burners)]
    for each in burning:
        each.start()
    time.sleep(1.0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _watched(folder, steps) | {"load": os.getloadavg()[0]}
    finally:
        for each in burning:
            each.kill()


def _watched(folder: str, steps: int) -> dict[str, Any]:
    ours, theirs = pty.openpty()
    words = [*EDGETRAIN, "run", "members=2", f"steps={steps}", "pace_s=0.05", "--runs", folder]
    began = time.monotonic()
    run = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
                           env={**os.environ, "TERM": "xterm", "COLUMNS": "110"})  # fmt: skip
    os.close(theirs)
    times = []
    training: float | None = None
    table_ends = float("inf")
    while True:
        if not select.select([ours], [], [], 60)[0]:
            break
        try:
            said = os.read(ours, 65536)
        except OSError:
            break
        times.append(time.monotonic())
        if training is None and re.search(rb"[1-9]\d*/\d+", said):
            training = times[-1]
        if training is not None and b"\x1b[?25h" in said:  # the cursor is shown again
            table_ends = times[-1]
    run.wait()
    pauses = [
        b - a
        for a, b in itertools.pairwise(times)
        if training and training <= a and b <= table_ends
    ]
    return {
        "first_line_s": times[0] - began,
        "seconds": times[-1] - began,
        "frames": len(pauses),
        "longest_pause_s": max(pauses, default=float("nan")),
        "table_and_picture_s": times[-1] - table_ends,
    }


def _burn() -> None:
    while True:
        sum(range(10_000))


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """Print figures, and hand them on."""
    print(json.dumps(found, indent=2))
    return found


def test_a_report_is_small_and_takes_a_thousandth_of_a_step(printed):
    found = printed(lambda: shown(costs()))
    assert found["wire_bytes_a_second"] <= 25
    assert found["share_of_a_step_of_50_ms"] <= 0.001


def test_a_hub_says_of_its_fleet_what_the_emulated_run_says(printed):
    """What was sent counts what TCP sent again: it is printed, as are the emulated seconds, which
    are this machine's."""
    found = printed(lambda: shown(fleet()))
    received, step_s = found["received_bytes"], found["seconds_per_step"]
    assert received["hub"] == pytest.approx(received["emulated"], rel=0.03)
    assert step_s["members"] == pytest.approx([step_s["hub"]] * 2, rel=0.05)
    assert found["most_ms_outside_their_round"] < 50


def test_a_run_beside_busy_processes_is_watched_all_the_same(printed):
    found = printed(lambda: shown(frames(BURNERS, 200)))
    assert found["first_line_s"] <= 0.5
    assert found["longest_pause_s"] <= 2
