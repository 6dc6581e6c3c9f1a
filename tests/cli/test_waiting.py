"""Members that are started before their hub."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
from command_line import edgetrain, running, write_tiny
from hub_runs import free_port, hub_folder, journal_of, wait_for_rounds

from edgetrain.errors import ConfigError, HubUnreachable, NetworkError
from edgetrain.exchange import addresses
from edgetrain.exchange.addresses import LONGEST_PAUSE_S, wait_for_route


class Place:
    """A job of two members with checkpoints, as processes that can be killed."""

    def __init__(self, stack, folder):
        self.stack, self.folder = stack, folder
        self.job = write_tiny(
            folder,
            fleet={"members": 2, "pace_s": 0.01},
            train={"steps": 100},
            strategy={"name": "fedavg", "local_steps": 2},
            hub={"heartbeat_s": 0.2},
            checkpoint={"every_s": 0.05, "share": 1.0, "mb_an_hour": 1e6},
        )
        self.address = f"tcp://localhost:{free_port()}"

    def member(self, index, *words):
        return self.stack.enter_context(
            running(
                "member", self.job, "--hub", self.address, "--index", str(index),
                "--checkpoint", f"kept-{index}", *words, cwd=self.folder,
            )
        )  # fmt: skip

    def kill(self, *processes):
        for each in processes:
            each.process.send_signal(signal.SIGKILL)
        assert {each.finish() for each in processes} == {-signal.SIGKILL}

    def hub(self, *words):
        return self.stack.enter_context(
            running("hub", *(words or [self.job]), "--bind", self.address, cwd=self.folder)
        )


@pytest.mark.real
def test_after_a_power_cut_of_everything_members_may_be_up_first(tmp_path):
    with contextlib.ExitStack() as stack:
        place = Place(stack, tmp_path)
        members = [place.member(index, "--wait") for index in range(2)]
        for member in members:
            assert "nothing listens at" in member.until("trying for 600 s")
        hub = place.hub()
        hub.until("members join")
        folder = hub_folder(tmp_path)
        wait_for_rounds(folder, 10)
        place.kill(hub, *members)
        members = [place.member(index) for index in range(2)]
        for member in members:
            member.until("trying for 600 s")
        hub = place.hub("--resume", str(folder))
        assert [member.finish() for member in members] == [0, 0], [m.said for m in members]
        assert hub.finish() == 0, hub.said
    rounds, _, counted = journal_of(folder / "journal")
    assert rounds >= 10
    assert len(counted) == len(set(counted))


@pytest.mark.real
def test_a_hub_that_comes_back_at_another_of_its_addresses_is_found(tmp_path):
    with contextlib.ExitStack() as stack:
        place = Place(stack, tmp_path)
        other = f"tcp://localhost:{free_port()}"
        hub = place.hub()
        hub.until("members join")
        members = [place.member(index, "--hub", other) for index in range(2)]
        folder = hub_folder(tmp_path)
        wait_for_rounds(folder, 10)
        place.kill(hub)
        place.address = other
        hub = place.hub("--resume", str(folder))
        assert [member.finish() for member in members] == [0, 0], [m.said for m in members]
        assert hub.finish() == 0, hub.said
    assert "no answer; trying the hub at localhost" in members[0].said
    _, _, counted = journal_of(folder / "journal")
    assert len(counted) == len(set(counted))


@pytest.mark.real
def test_without_a_checkpoint_of_this_job_nobody_waits(tmp_path):
    job = write_tiny(tmp_path, fleet={"members": 2})
    address = f"tcp://localhost:{free_port()}"
    words = ("member", job, "--hub", address, "--index", "0", "--checkpoint", "kept")
    done = edgetrain(*words, cwd=tmp_path)
    assert done.returncode == 75
    assert "nothing listens at" in done.stderr


def failing(monkeypatch, *errors):
    """`first_route` raises these, one after the other, and then answers."""
    left = list(errors)

    def first_route(hubs, timeout_s):
        if left:
            raise left.pop(0)
        return hubs[0], "lo 127.0.0.1"

    monkeypatch.setattr(addresses, "first_route", first_route)


def test_a_hub_that_is_not_up_is_tried_with_longer_pauses(monkeypatch):
    failing(monkeypatch, *[HubUnreachable("nothing listens")] * 8)
    pauses, said = [], []
    found = wait_for_route(["tcp://a:1"], 1.0, 600.0, pauses.append, lambda: 0.0, said.append)
    assert found == ("tcp://a:1", "lo 127.0.0.1")
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert said == ["nothing listens; trying for 600 s"]


def test_what_does_not_pass_is_raised_at_once_and_the_rest_in_time(monkeypatch):
    failing(monkeypatch, NetworkError("the name leads to this machine itself"))
    with pytest.raises(NetworkError, match="this machine itself"):
        wait_for_route(["tcp://a:1"], 1.0, 600.0, time.sleep)
    failing(monkeypatch, *[HubUnreachable("nothing listens")] * 1000)
    now = [0.0]

    def pause(seconds):
        now[0] += seconds

    with pytest.raises(HubUnreachable):
        wait_for_route(["tcp://a:1"], 1.0, 60.0, pause, lambda: now[0])
    assert 60 - LONGEST_PAUSE_S <= now[0] <= 60
    with pytest.raises(HubUnreachable):
        wait_for_route(["tcp://a:1"], 1.0, 0.0, pytest.fail)
    failing(monkeypatch, ConfigError("a port that is none"))
    with pytest.raises(ConfigError):
        wait_for_route(["tcp://a:1"], 1.0, 60.0, pytest.fail)
