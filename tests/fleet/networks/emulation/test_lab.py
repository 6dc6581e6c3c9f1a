"""benchmarks/lab.py, and jobs on emulated hosts: they leave no process and no namespace behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Running, edgetrain, running, write_tiny
from network_spaces import all_gone, made_by, wait_for

from edgetrain.fleet.networks.emulation import probe

PACKETS, WHY_NOT = probe.packets_possible()
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PACKETS, reason=f"no emulated hosts: {WHY_NOT}"),
]

FOLDER = Path(__file__).parents[4] / "benchmarks"
LAB = (sys.executable, str(FOLDER / "lab.py"))

# Each command has a child; the member's child is in a session of its own.
SERVER = "sh -c 'sleep 600 & wait'"
CLIENT = ("sh", "-c", "setsid sleep 600 & echo standing; wait")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Running]:
    """A lab of two members and a hub, whose commands have started."""
    words = ("--hosts", "2", "--network", "rtt-10ms", "--hub", SERVER, "--")
    with running(*words, *CLIENT, cwd=tmp_path, program=LAB) as command:
        for _ in range(2):
            command.until("standing")
        assert wait_for(lambda: sleeping(command) == 3)
        made = made_by(*(each.pid for each in command.started()))
        assert len(made) == 4
        yield command
    assert all_gone(made)


def sleeping(command: Running) -> int:
    """Return how many children of the commands run."""
    return sum("sleep" in each.name() for each in command.started())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_commands_end_with_a_lab_that_was_killed(lab: Running, number: signal.Signals) -> None:
    lab.process.send_signal(number)
    lab.process.wait()
    assert not lab.left_behind()


def test_ctrl_c_ends_the_commands(lab: Running) -> None:
    lab.press_ctrl_c()
    assert lab.finish() == 130
    assert not lab.left_behind()


def test_when_a_command_is_done_its_children_and_the_server_end_too(tmp_path: Path) -> None:
    words = ("--hosts", "1", "--network", "rtt-10ms", "--hub", SERVER, "--")
    script = "setsid sleep 600 & exit 3"
    with running(*words, "sh", "-c", script, cwd=tmp_path, program=LAB) as command:
        assert command.finish() == 3
        assert not command.left_behind()


def test_lines_of_several_hosts_begin_with_theirs(tmp_path: Path) -> None:
    words = ("--hosts", "2", "--network", "rtt-10ms", "--hub", SERVER, "--")
    script = "echo I am $EDGETRAIN_HOST of $EDGETRAIN_HOSTS at $EDGETRAIN_ADDRESS"
    script += "; echo no $EDGETRAIN_HOST >&2; printf end"
    done = edgetrain(*words, "sh", "-c", script, cwd=tmp_path, program=LAB)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        f"host {host} | {said}"
        for host in (1, 2)
        for said in (f"I am {host} of 3 at 10.77.0.{host + 1}", "end")
    ]
    assert sorted(done.stderr.splitlines()) == ["host 1 | no 1", "host 2 | no 2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "0", "--", "true"], "--hosts 0 is out of range"),
        (["--shell", "3"], "--shell 3 is out of range"),
        (["--network", "wifi:3", "--", "true"], "names 3 members, the fleet has 2"),
        ([], "no command to run"),
    ],
)
@pytest.mark.usefixtures("own_imports")
def test_what_cannot_be_is_one_line(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import lab

    assert lab.main(words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


# -- a whole job on emulated hosts -----------------------------------------------------------------

JOB = ("network=rtt-20ms", "backend=packet", "steps=1000000", "pace_s=0.01", "members=2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_job_on_emulated_hosts_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with running("run", write_tiny(tmp_path), *JOB, cwd=tmp_path) as command:
        command.until("step ")
        made = made_by(*(each.pid for each in command.started()))
        assert len(made) == 4  # the hub's, two members', the emulator's
        if number == signal.SIGINT:
            command.press_ctrl_c()
        else:
            command.process.send_signal(number)
        command.process.wait()
        assert not command.left_behind()
    assert all_gone(made)
