"""A process that has no descriptor left goes on: what is its own has a reserve, or waits."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil

import numpy as np
import pytest

from edgetrain.errors import EdgetrainError
from edgetrain.exchange import descriptors
from edgetrain.exchange.hub import journal as journal_module
from edgetrain.exchange.hub.journal import Journal, JournalSettings
from edgetrain.exchange.hub.records import CountedOnce, Round, State
from edgetrain.exchange.zeromq import tcp_counters
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket


@contextlib.contextmanager
def none_left():
    """Within: every descriptor that the soft limit allows is in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def state(round):
    return State("a job", "m", b"", 3, 0, round, 0, (), (), ((round, 9),), np.zeros(3, np.float32))


def merged(round):
    return Round(round, (CountedOnce("m0", round, 1.0),), 0, 1, 2, (b"x" * 12,))


def rounds_in(folder):
    with contextlib.closing(Journal(folder)) as journal:
        assert journal.state is not None
        return journal.state.round, [r.round for r in journal.records()]


def test_the_limit_is_raised_and_leaves_a_reserve():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        most = descriptors.raise_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert most == soft == min(hard, descriptors.MOST) - descriptors.RESERVED
        with descriptors.reserve():
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft + descriptors.RESERVED
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_journal_opens_its_files_from_the_reserve(tmp_path):
    journal = Journal(tmp_path, JournalSettings(snapshot_every=1))
    with none_left():
        for round in range(4):
            journal.save(state(round))
            journal.append(merged(round))
        assert [r.round for r in journal.replies(2)] == [2, 3]
    journal.close()
    assert rounds_in(tmp_path) == (3, [3])


@pytest.mark.parametrize("stop", [True, False])
def test_a_snapshot_without_a_descriptor_waits_and_no_round_is_lost(tmp_path, monkeypatch, stop):
    said = []
    journal = Journal(
        tmp_path / "journal", JournalSettings(stop_on_disk_full=stop, snapshot_every=1), said.append
    )
    journal.save(state(0))
    with monkeypatch.context() as patch, none_left():
        patch.setattr(journal_module, "reserve", contextlib.nullcontext)
        for round in range(3):
            journal.append(merged(round))
            assert journal.due
            journal.save(state(round + 1))
            assert not journal.due, "it is not tried again before the next round"
    assert rounds_in(shutil.copytree(tmp_path / "journal", tmp_path / "copy")) == (0, [0, 1, 2])
    assert len(said) == 1
    assert "Too many open files" in said[0]
    journal.append(merged(3))
    journal.save(state(4))
    journal.close()
    assert rounds_in(tmp_path / "journal") == (4, [])


def test_a_journal_that_cannot_begin_for_lack_of_descriptors_does_not_speak_of_a_disk(
    tmp_path, monkeypatch
):
    journal = Journal(tmp_path, JournalSettings(stop_on_disk_full=False))
    monkeypatch.setattr(journal_module, "reserve", contextlib.nullcontext)
    with none_left(), pytest.raises(EdgetrainError, match=r"Too many open files.*ulimit -n"):
        journal.save(state(0))
    journal.close()


def test_counting_bytes_without_a_descriptor_changes_nothing(monkeypatch):
    hub = HubSocket("tcp://127.0.0.1:0")
    member = MemberSocket(hub.address)
    member.send([b"x" * 1000])
    while not list(hub.poll(0.1)):
        pass
    before = hub.traffic()
    assert before.received_bytes > 1000
    with none_left():
        assert hub.traffic().received_bytes >= before.received_bytes, "from the reserve"
        monkeypatch.setattr(tcp_counters, "reserve", contextlib.nullcontext)
        assert hub.traffic().received_bytes >= before.received_bytes
        assert member.traffic().sent_bytes == 0, "not known yet"
    assert member.traffic().sent_bytes > 1000
    member.close()
    hub.close()


@pytest.mark.parametrize(("code", "is_out"), [(errno.EMFILE, True), (errno.ENOSPC, False)])
def test_which_errors_are_for_lack_of_descriptors(code, is_out):
    assert descriptors.is_out_of_descriptors(OSError(code, "x")) == is_out
