"""Members that are asked to stop: they finish their step, keep what they have, and come back."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import children
import numpy as np
import pytest
from command_line import running, write_tiny
from hub_runs import free_port, hub_folder, wait_for_rounds
from loopback import Loopback
from test_checkpoint_fleet import STRATEGIES, Life

from edgetrain.errors import EdgetrainError, Stopped
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.training import processes
from edgetrain.training.stopping import GRACE_S, SIGNALS, Stop


def test_before_it_is_deferred_a_signal_ends_what_goes_on():
    stop = Stop()
    with pytest.raises(Stopped) as stopped:
        stop(signal.SIGTERM)
    assert stopped.value.code == 143
    assert isinstance(stopped.value, SystemExit)
    with pytest.raises(Stopped):
        stop.defer()  # whatever became of the first exception


def test_afterwards_it_is_a_request_that_a_wait_grants_some_time():
    now = 10.0
    stop = Stop(lambda: now)
    stop.defer()
    stop.check()
    stop(signal.SIGINT)
    stop.check(GRACE_S)
    with pytest.raises(Stopped, match="130"):
        stop.check()
    now += GRACE_S
    with pytest.raises(Stopped):
        stop.check(GRACE_S)


def test_the_second_signal_is_the_systems():
    before = [signal.getsignal(each) for each in SIGNALS]
    with Stop().installed() as stop:
        stop.defer()
        assert [signal.getsignal(each) for each in SIGNALS] == [stop, stop]
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked == signal.SIGTERM
        assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_DFL] * 2
        for each, handler in zip(SIGNALS, before, strict=True):
            signal.signal(each, handler)
    with Stop().installed():
        pass
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_request_that_is_no_signal_leaves_handlers_alone():
    with Stop().installed() as stop:
        stop.defer()
        stop()
        assert signal.getsignal(signal.SIGTERM) is stop


# -- members in threads ---------------------------------------------------------------------------


def stopped_after(life, steps):
    """Train until so many of the job's steps are done; then it is asked."""
    for _ in range(life.member.begins_at, steps - 1):
        life.step()
    life.member.stop()
    with pytest.raises(Stopped), life.member:
        life.step()
    return life


def fleet(folder, stops, strategy, *, keep=True, steps=40, **hub):
    """The lives of a member that is asked to stop after so many steps, another member, the hub."""
    wires, folder = Loopback(), folder
    folder.mkdir()
    journal = Journal(folder / "journal")
    rounds = {} if strategy == "sync-sgd" else {"local_steps": 3}
    served = children.HubThread(
        wires, strategy, 2, policy={"lost_after_s": 60.0}, journal=journal, **(rounds | hub)
    )

    def first():
        found = []
        for steps_before in stops:
            life = Life(wires, 0, folder / "m0" if keep else None, every=1000)
            found.append(stopped_after(life, steps_before))
        return [*found, Life(wires, 0, folder / "m0", every=1000).run(steps)]

    with served.serving():
        lives, other = children.in_threads(first, lambda: Life(wires, 1).run(steps))
    journal.close()
    return lives, other, served


@pytest.mark.parametrize(("strategy", "settings"), [("sync-sgd", {}), *STRATEGIES])
def test_a_member_that_is_asked_to_stop_goes_on_at_the_next_batch(tmp_path, strategy, settings):
    """In the middle of a round, too; nothing is trained on twice, and all of it counts once."""
    lives, other, hub = fleet(tmp_path / "a", [13, 20, 30], strategy, **settings)
    assert [life.member.begins_at for life in lives] == [0, 13, 20, 30]
    batches = [number for life in lives for number in life.batches]
    assert batches == list(range(40))
    assert lives[-1].bits == other.bits
    rounds = 40 if strategy == "sync-sgd" else 14
    with_it = [closed for closed in hub.closed if "m0" in closed.members]
    assert rounds <= len(with_it) <= rounds + 1  # what a lossy codec still had to send


@pytest.mark.parametrize("strategy", ["sync-sgd", "fedavg"])
def test_the_result_is_that_of_a_run_without_a_stop(tmp_path, strategy):
    unhurt, _, _ = fleet(tmp_path / "a", [], strategy)
    lives, _, _ = fleet(tmp_path / "b", [13, 20, 30], strategy)
    wanted, found = (children.flat(each[-1].model) for each in (unhurt, lives))
    if strategy == "sync-sgd":
        assert found.tobytes() == wanted.tobytes()
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # a difference of parameters is rounded


def test_without_a_checkpoint_it_hands_over_what_it_has_and_leaves(tmp_path):
    wires = Loopback()
    with children.HubThread(
        wires, members=1, local_steps=5, policy={"lost_after_s": 60.0}
    ).serving() as hub:
        life = stopped_after(Life(wires, 0), 8)
        life.member.close()  # in somebody's `finally`
        with pytest.raises(EdgetrainError, match="no step may follow"):
            life.step()
    assert [closed.members for closed in hub.closed] == [("m0",)] * 2
    (left,) = [note for note in hub.notes if note.event == "left"]
    assert left.reason == "it was asked to stop"
    np.testing.assert_allclose(hub.hub.base, children.flat(life.model), atol=1e-6)


WAITS = [
    ("sync-sgd", {}, 1, 0),
    ("fedavg", {"local_steps": 3}, 3, 3),
    ("dga", {"local_steps": 3}, 5, 5),
]


@pytest.mark.parametrize(("strategy", "settings", "waits_in", "begins"), WAITS)
def test_a_reply_that_does_not_come_is_not_waited_for(
    tmp_path, strategy, settings, waits_in, begins
):
    """What is not answered yet counts once all the same; with sync-sgd the step is taken again."""
    wires, journal, stopped = Loopback(), Journal(tmp_path / "journal"), threading.Event()
    served = children.HubThread(
        wires, strategy, 2, delay=2 * (strategy == "dga"), policy={"lost_after_s": 60.0},
        journal=journal, **settings,
    )  # fmt: skip
    readings = itertools.count()

    def first():
        stop = Stop(lambda: float(next(readings)))
        stopped_after(Life(wires, 0, tmp_path / "m0", every=1000, stop=stop), waits_in)
        stopped.set()
        return Life(wires, 0, tmp_path / "m0", every=1000).run(20)

    def second():
        life = Life(wires, 1)
        stopped.wait(60)
        return life.run(20)

    with served.serving():
        life, other = children.in_threads(first, second)
    journal.close()
    assert life.batches == list(range(begins, 20))
    assert life.bits == other.bits
    assert {closed.members for closed in served.closed} == {("m0", "m1")}
    assert len(served.closed) == (20 if strategy == "sync-sgd" else 7)


@pytest.mark.real
def test_at_the_end_nothing_more_is_written(tmp_path):
    wires = Loopback()
    with children.HubThread(wires, local_steps=3, policy={"lost_after_s": 60.0}).serving() as hub:

        def first():
            readings = itertools.count()
            life = Life(wires, 0, tmp_path, every=1, stop=Stop(lambda: float(next(readings))))
            for _ in range(4):
                life.step()
            life.member.stop()
            with pytest.raises(Stopped):
                life.member.close()
            return Life(wires, 0, tmp_path)

        def second():
            life = Life(wires, 1)
            for _ in range(4):
                life.step()
            while sum(note.event == "back" for note in hub.notes) < 1:
                time.sleep(0.001)
            life.member.close()

        again, _ = children.in_threads(first, second)
        assert again.member.begins_at >= 4
        again.member.close()
    assert [closed.members for closed in hub.closed] == [("m0", "m1")] * 2


# -- processes ------------------------------------------------------------------------------------


def deferred(pid: int) -> bool:
    """Whether a process has seen its first SIGTERM: the next is not handled any more."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return not caught >> (signal.SIGTERM - 1) & 1


def job_of(folder: Path) -> str:
    return write_tiny(
        folder,
        fleet={"members": 2, "pace_s": 0.01},
        train={"steps": 2000},
        strategy={"name": "fedavg", "local_steps": 3},
        hub={"heartbeat_s": 0.2, "fsync": "never"},
    )


@contextlib.contextmanager
def under_way(cwd, *more):
    """A hub and two members of a long job that have begun, each a command."""
    job, address = job_of(cwd), f"tcp://localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(running("hub", job, "--bind", address, cwd=cwd))
        hub.until("members join")
        command = ["member", job, "--hub", address, *more, "--index"]
        members = [stack.enter_context(running(*command, str(i), cwd=cwd)) for i in range(2)]
        wait_for_rounds(hub_folder(cwd), 3)
        yield hub, members


@pytest.mark.real
@pytest.mark.parametrize(
    ("away", "number"), [("stands still", signal.SIGTERM), ("is gone", signal.SIGINT)]
)
def test_it_ends_within_seconds_while_the_hub_is_away(tmp_path, number, away):
    with under_way(tmp_path, "--checkpoint", "kept") as (hub, members):
        hub.process.send_signal(signal.SIGSTOP if away == "stands still" else signal.SIGKILL)
        began = time.monotonic()
        for member in members:
            member.process.send_signal(number)
        for member in members:
            assert member.finish() == 128 + number, member.said
            assert "Traceback" not in member.said
            assert f"stopped, as asked ({number.name})" in member.said
        # Two seconds' grace, five for what is queued where there is a connection; the rest is for
        # a machine that has other things to do. Docker kills after ten.
        assert time.monotonic() - began < 20
    assert len(list((tmp_path / "kept").glob("m?.*.checkpoint"))) == 4  # the first, and the last


@pytest.mark.real
def test_the_second_signal_ends_it_at_once(tmp_path):
    with under_way(tmp_path) as (hub, (member, _)):
        hub.process.send_signal(signal.SIGSTOP)
        member.process.send_signal(signal.SIGTERM)
        while not deferred(member.process.pid):
            time.sleep(0.001)
        member.process.send_signal(signal.SIGTERM)
        assert member.finish() == -signal.SIGTERM


@pytest.mark.real
def test_a_member_that_is_told_while_it_waits_for_others_leaves(tmp_path):
    job = job_of(tmp_path)
    address = f"tcp://localhost:{free_port()}"
    with running("hub", job, "--bind", address, cwd=tmp_path) as hub:
        hub.until("members join")
        with running("member", job, "--hub", address, "--index", "0", cwd=tmp_path) as member:
            hub.until("m0 joined")
            member.process.send_signal(signal.SIGTERM)
            assert member.finish() == 143
        assert "ended before it had begun" in hub.until("m0 left")
        hub.process.send_signal(signal.SIGTERM)
        assert hub.finish() == 143
        assert "stopped, as asked (SIGTERM)" in hub.said


@pytest.mark.real
def test_a_loop_of_ones_own_takes_sigterm_as_documented(tmp_path):
    context, started = processes.fork_server(["torch", "edgetrain.training.member.member"]), []

    def start(index):
        folder = tmp_path / "kept" if index == 0 else None
        arguments = (hub.transport.address, tmp_path / f"m{index}", folder, index, 240)
        started.append(processes.start(context, "own", children.stops_when_asked, *arguments))
        return started[-1]

    policy = {"lost_after_s": 60.0}
    hub = children.HubThread(HubSocket("tcp://127.0.0.1:0"), "fedavg", local_steps=3, policy=policy)
    try:
        with hub.serving():
            other, lives = start(1), []
            for rounds in (9, 25):
                lives.append(start(0))
                while len(hub.closed) < rounds:
                    time.sleep(0.002)
                os.kill(lives[-1].process.pid, signal.SIGTERM)
                lives[-1].process.join(60)
                assert lives[-1].exit_code == 143, lives[-1].error
            lives.append(start(0))
            for child in (lives[-1], other):
                child.process.join(60)
                assert child.exit_code == 0, child.error
    finally:
        processes.stop_all(started)
    written = Path(f"{tmp_path}/m0.batches").read_text().split()
    assert written == [str(number) for number in range(240)]
    models = [np.load(f"{tmp_path}/m{i}.npy").tobytes() for i in range(2)]
    assert models == [hub.hub.base.tobytes()] * 2
    assert {closed.members for closed in hub.closed} == {("m0", "m1")}
    assert not list((tmp_path / "kept").glob("*.checkpoint"))
