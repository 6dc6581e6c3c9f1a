"""The journal's bytes: whatever happens to them, what is read is a prefix of what was written."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import tempfile
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.hub import journal as journal_module
from edgetrain.exchange.hub import records
from edgetrain.exchange.hub.journal import Fsync, Journal, JournalSettings
from edgetrain.exchange.hub.record_file import scan
from edgetrain.exchange.hub.records import (
    CountedOnce,
    Departed,
    Entered,
    Restarted,
    Round,
    Seat,
    State,
)

SEAT = Seat("m0", b"address", 7, 0, 1.0, 0, 3)


def state(round=0, elements=6):
    base = np.arange(elements, dtype=np.float32) + round
    unsent = {"residual": np.full(elements, 0.5, np.float32)}
    return State(
        "a job",
        "model",
        b"layout",
        elements,
        0,
        round,
        4,
        (SEAT,),
        (),
        ((round, 99),),
        base,
        unsent,
    )


def merged(round, payload=b"x" * 24):
    counted = (CountedOnce("m0", round, 1.0), CountedOnce("m1", round - 1, 2.5))
    return Round(round, counted, 5, 1, 2, (payload, b"", payload[:3]), ((payload, b"1"),) * 2)


def some(rounds, start=0):
    found = [Restarted(1), Entered(SEAT)]
    for round in range(start, start + rounds):
        found.append(merged(round, bytes([round % 256]) * (10 + round)))
    return [*found, Departed("m0", True)]


def plain(record):
    """A record with its buffers as bytes, to compare."""
    if isinstance(record, Round):
        inputs = tuple(tuple(bytes(p) for p in each) for each in record.inputs)
        reply = tuple(bytes(p) for p in record.reply)
        return record.round, record.counted, record.delay, record.before, reply, inputs
    return record


def read(folder):
    journal = Journal(folder)
    found = [plain(record) for record in journal.records()]
    journal.close()
    return journal, found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A journal of one snapshot and its records, and the records."""
    folder = tmp_path_factory.mktemp("journal")
    records = some(6)
    journal = Journal(folder)
    journal.save(state())
    for record in records:
        journal.append(record)
    journal.close()
    return folder, [plain(record) for record in records]


def damaged(folder, damage):
    """What is read of a copy with a damaged segment."""
    copy = Path(tempfile.mkdtemp()) / "journal"
    shutil.copytree(folder, copy)
    (segment,) = copy.glob("*.log")
    segment.write_bytes(damage(bytearray(segment.read_bytes())))
    try:
        journal, found = read(copy)
        again, same = read(copy)
        assert same == found
        assert again.mended == []
        return journal, found
    finally:
        shutil.rmtree(copy.parent)


def test_what_was_written_is_read(written):
    folder, records = written
    journal, found = read(folder)
    assert found == records
    assert journal.mended == []
    assert plain(journal.state.seats) == (SEAT,)
    np.testing.assert_array_equal(journal.state.base, state().base)
    np.testing.assert_array_equal(journal.state.memory["residual"], state().memory["residual"])


@given(st.data())
def test_cut_anywhere_a_prefix_is_left(written, data):
    folder, records = written
    size = next(folder.glob("*.log")).stat().st_size
    cut = data.draw(st.integers(0, size))
    journal, found = damaged(folder, lambda content: content[:cut])
    assert found == records[: len(found)]
    assert bool(journal.mended) == (cut not in _ends(folder))


@given(st.data())
def test_a_flipped_byte_ends_it_there(written, data):
    folder, records = written
    ends = _ends(folder)
    at = data.draw(st.integers(0, ends[-1] - 1))
    flip = data.draw(st.integers(1, 255))

    def damage(content):
        content[at] ^= flip
        return content

    journal, found = damaged(folder, damage)
    assert len(found) == sum(end <= at for end in ends) - 1, "all before it, nothing after"
    assert found == records[: len(found)]
    assert len(journal.mended) == 1


@given(st.binary(max_size=200))
def test_anything_behind_the_records_is_cut_off(written, junk):
    folder, records = written
    _, found = damaged(folder, lambda content: content + junk)
    assert found == records


def _ends(folder):
    return [0, *(end for _, end in scan(next(folder.glob("*.log"))))]


def test_writing_goes_on_behind_a_torn_tail(tmp_path):
    journal = Journal(tmp_path)
    journal.save(state())
    for record in some(3):
        journal.append(record)
    journal.close()
    (segment,) = tmp_path.glob("*.log")
    os.truncate(segment, segment.stat().st_size - 60)
    journal = Journal(tmp_path)
    assert "no record" in journal.mended[0]
    journal.append(merged(2))
    journal.close()
    _, found = read(tmp_path)
    assert found[-1] == plain(merged(2))


def test_a_snapshot_that_cannot_be_read_gives_way_to_the_one_before(tmp_path):
    journal = Journal(tmp_path)
    journal.save(state())
    for round in range(3):
        journal.append(merged(round))
    journal.save(state(3))
    journal.append(merged(3))
    journal.close()
    newest = max(tmp_path.glob("*.base"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    journal, found = read(tmp_path)
    assert journal.state.round == 0
    assert found == [plain(merged(round)) for round in range(4)]
    assert "cannot be read" in journal.mended[0]


def test_a_snapshot_is_whole_or_not_there(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.save(state())
    journal.append(merged(0))
    for step in ("writev", "fsync", "fdatasync", "replace"):
        with monkeypatch.context() as patch:
            target = Path if step == "replace" else os
            patch.setattr(target, step, _failing(errno.EIO))
            with pytest.raises(EdgetrainError, match="cannot be written"):
                journal.save(state(1))
        copy = tmp_path.parent / f"copy-{step}"
        shutil.copytree(tmp_path, copy)
        found, records = read(copy)
        assert (found.state.round, records) == (0, [plain(merged(0))])
    journal.close()


def _failing(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def _full_after(count):
    """writev on a disk with room for so many bytes."""
    real, left = os.writev, [count]

    def writev(file, buffers):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        content = b"".join(bytes(b) for b in buffers)[: left[0]]
        left[0] -= len(content)
        return real(file, [content])

    return writev


@pytest.mark.parametrize("room", [0, 1, 30, 100])
def test_a_full_disk_stops_the_hub_and_spoils_nothing(tmp_path, monkeypatch, room):
    journal = Journal(tmp_path)
    journal.save(state())
    journal.append(merged(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", _full_after(room))
        with pytest.raises(EdgetrainError, match=r"No space left.*--resume"):
            journal.append(merged(1))
    journal.close()
    again, found = read(tmp_path)
    assert found == [plain(merged(0))]
    assert again.mended == [], "nothing half written is left"


def test_a_full_disk_need_not_stop_the_hub(tmp_path, monkeypatch):
    said = []
    journal = Journal(tmp_path, JournalSettings(stop_on_disk_full=False), said.append)
    journal.save(state())
    journal.append(merged(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", _full_after(5))
        journal.append(merged(1))
        journal.append(merged(2))
        assert journal.tail is None
        full = shutil.disk_usage(tmp_path)._replace(free=0)
        patch.setattr(shutil, "disk_usage", lambda path: full)
        assert not journal.due
    assert len(said) == 1
    assert "goes on without it" in said[0]
    assert journal.due, "there is room again"
    journal.save(state(3))
    assert journal.tail == 3
    journal.append(merged(3))
    journal.close()
    again, found = read(tmp_path)
    assert again.state.round == again.tail or again.state.round == 3
    assert found == [plain(merged(3))]
    assert again.first_round == 3, "rounds 1 and 2 are nowhere"


def test_snapshots_bound_what_is_kept(tmp_path):
    journal = Journal(tmp_path, JournalSettings(Fsync(0), snapshot_every=5))
    journal.save(state())
    most = 0
    for round in range(200):
        journal.append(merged(round))
        if journal.due:
            journal.save(state(round + 1), needed=round)
        most = max(most, len(list(tmp_path.iterdir())))
    assert most <= 2 * (journal_module.GENERATIONS + 1) + 1
    assert [r.round for r in journal.replies(journal.tail)] == list(range(journal.tail, 200))
    journal.close()
    again, found = read(tmp_path)
    assert again.first_round == 195
    assert again.state.round == 200
    assert found == []


def test_segments_wait_for_members_that_are_behind_but_not_for_ever(tmp_path):
    journal = Journal(tmp_path, JournalSettings(Fsync(0), snapshot_every=2))
    journal.save(state())
    for round in range(40):
        journal.append(merged(round))
        if journal.due:
            journal.save(state(round + 1), needed=3)
        if round == 9:
            assert journal.tail == 2
            assert [r.round for r in journal.replies(3)] == list(range(3, 10))
    assert len(list(tmp_path.glob("*.base"))) == journal_module.MOST_GENERATIONS
    assert journal.tail == 40 - 2 * (journal_module.MOST_GENERATIONS - 1)
    journal.close()


def test_replies_end_where_the_disk_spoilt_one(tmp_path):
    journal = Journal(tmp_path)
    journal.save(state())
    for round in range(4):
        journal.append(merged(round))
    (segment,) = tmp_path.glob("*.log")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    assert len(list(journal.replies(0))) < 4
    journal.close()


def test_two_hubs_cannot_write_one_journal(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match="another hub writes"):
        Journal(tmp_path)
    journal.close()
    journal.close()
    Journal(tmp_path).close()


@pytest.mark.parametrize(("text", "syncs"), [("always", 10), ("round-every 4", 2), ("never", 0)])
def test_when_the_disk_is_told_to_write(tmp_path, monkeypatch, text, syncs):
    journal = Journal(tmp_path, JournalSettings(Fsync.parse(text)))
    journal.save(state())
    calls = []
    monkeypatch.setattr(os, "fdatasync", calls.append)
    for round in range(10):
        journal.append(merged(round))
    assert len(calls) == syncs
    journal.close()


@pytest.mark.parametrize("text", ["", "sometimes", "round-every", "round-every 0", "round-every x"])
def test_what_is_no_policy(text):
    with pytest.raises(ConfigError, match=r"hub\.fsync = "):
        Fsync.parse(text)


def test_random_histories_are_read_back(tmp_path):
    rng = random.Random(5)
    journal = Journal(tmp_path, JournalSettings(Fsync(0)))
    journal.save(state())
    expected = []
    for round in range(60):
        if rng.random() < 0.1:
            journal.close()
            journal = Journal(tmp_path, JournalSettings(Fsync(0)))
            assert [plain(r) for r in journal.records()] == expected
        if rng.random() < 0.1:
            journal.save(state(round))
            expected = []
        record = merged(round, rng.randbytes(rng.randint(0, 2000)))
        journal.append(record)
        expected.append(plain(record))
    journal.close()
    assert read(tmp_path)[1] == expected


def journal_of_two_segments(folder):
    journal = Journal(folder, JournalSettings(snapshot_every=5))
    journal.save(state())
    for round in range(5):
        journal.append(merged(round))
    journal.save(state(5))
    for round in range(5, 9):
        journal.append(merged(round))
    journal.close()
    return [merged(round) for round in range(5, 9)]


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_lies_behind_a_flipped_bit_is_kept_and_said(tmp_path):
    expected = journal_of_two_segments(tmp_path)
    newest = max(tmp_path.glob("*.log"))
    ends = [end for _, end in scan(newest)]
    whole = newest.read_bytes()
    flip(newest, ends[0] + 30)
    journal, found = read(tmp_path)
    assert found == [plain(expected[0])]
    (aside,) = tmp_path.glob("*.damaged")
    assert aside.read_bytes()[ends[1] - ends[0] :] == whole[ends[1] :]
    assert aside.stat().st_mode & 0o777 == 0o600
    (line,) = journal.mended
    assert f"the 2 records behind them are kept in {aside.name}" in line
    again, same = read(tmp_path)
    assert (again.mended, same) == ([], found)


def test_segments_behind_damage_and_damaged_snapshots_are_kept(tmp_path):
    journal_of_two_segments(tmp_path)
    older, newer = sorted(tmp_path.glob("*.log"))
    flip(max(tmp_path.glob("*.base")), -1)
    flip(older, 30)
    kept = newer.read_bytes()
    journal, found = read(tmp_path)
    assert found == []
    assert journal.state.round == 0
    assert newer.with_name(f"{newer.name}.damaged").read_bytes() == kept
    assert len(list(tmp_path.glob("*.base.damaged"))) == 1
    assert [line for line in journal.mended if "its 4 records are kept in" in line]


def test_two_damages_of_one_segment_are_both_kept(tmp_path):
    fresh = tmp_path / "fresh"
    journal_of_two_segments(fresh)
    for _ in range(2):
        shutil.copytree(fresh, tmp_path / "hurt", dirs_exist_ok=True)
        flip(max((tmp_path / "hurt").glob("*.log")), 30)
        read(tmp_path / "hurt")
    assert len(list((tmp_path / "hurt").glob("*.damaged*"))) == 2


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def of_newer_layout(record):
    """Its bytes as an edgetrain with other records, or another magic, would write them."""
    header, payloads = records.encode(record)
    header = msgpack.packb([records.LAYOUT + 1, *msgpack.unpackb(header)[1:], "new"])
    return as_record(header, b"".join(payloads))


def as_record(header, payload, magic=b"etj1"):
    check = zlib.crc32(payload, zlib.crc32(header))
    prefix = struct.pack("<4sIQI", magic, len(header), len(payload), check)
    return prefix + struct.pack("<I", zlib.crc32(prefix)) + header + payload


def make_newer(folder, where):
    """Let a newer edgetrain have written a part of this journal."""
    older, newest = sorted(folder.glob("*.log"))
    snapshot = max(folder.glob("*.base"))
    if where == "snapshot":
        snapshot.write_bytes(of_newer_layout(state(5)))
    elif where == "magic":
        snapshot.write_bytes(as_record(b"another header", b"", b"etj2"))
    elif where == "kind":
        newest.write_bytes(newest.read_bytes() + as_record(msgpack.packb([1, "X", 5]), b""))
    elif where == "newest record":
        newest.write_bytes(newest.read_bytes() + of_newer_layout(merged(9)))
    elif where == "older segment":
        older.write_bytes(older.read_bytes() + of_newer_layout(merged(5)))
    else:  # behind damage, that would be cut
        content = newest.read_bytes() + of_newer_layout(merged(9))
        newest.write_bytes(content)
        flip(newest, 30)


@pytest.mark.parametrize(
    "where", ["snapshot", "magic", "kind", "newest record", "older segment", "behind damage"]
)
def test_a_journal_of_a_newer_edgetrain_is_refused_and_not_touched(tmp_path, where):
    journal_of_two_segments(tmp_path)
    make_newer(tmp_path, where)
    (tmp_path / f"{9:020d}.tmp").write_bytes(b"a draft")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="was written by another edgetrain: ") as raised:
        Journal(tmp_path)
    assert "nothing was changed" in str(raised.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("left", ["no snapshot", "damaged snapshots", "only remains"])
def test_training_does_not_begin_anew_where_no_snapshot_can_be_read(tmp_path, left):
    journal_of_two_segments(tmp_path)
    for path in tmp_path.glob("*.base"):
        if left == "damaged snapshots":
            flip(path, -1)
        else:
            path.unlink()
    if left == "only remains":  # as an edgetrain before this one left them
        for path in tmp_path.glob("*.log"):
            path.rename(path.with_name(f"{path.name}.damaged"))
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="no snapshot in it can be read") as raised:
        Journal(tmp_path)
    assert "begin anew in another folder" in str(raised.value)
    assert contents(tmp_path) == before


def test_a_hub_that_was_killed_before_its_first_snapshot_begins(tmp_path):
    (tmp_path / f"{0:020d}.log").write_bytes(b"")
    assert read(tmp_path)[0].state is None


@pytest.mark.parametrize("damage", [b"junk", b"\0" * 4096, b"etj1" + b"x" * 60])
def test_bytes_that_are_no_record_are_kept_beside_what_is_cut(tmp_path, damage):
    expected = journal_of_two_segments(tmp_path)
    newest = max(tmp_path.glob("*.log"))
    newest.write_bytes(newest.read_bytes() + damage)
    journal, found = read(tmp_path)
    assert found == [plain(record) for record in expected]
    (aside,) = tmp_path.glob("*.damaged")
    assert aside.read_bytes() == damage
    assert journal.mended[0].endswith(f"they are kept in {aside.name}")


def test_a_segment_without_a_whole_record_is_set_aside(tmp_path):
    journal_of_two_segments(tmp_path)
    older, newest = sorted(tmp_path.glob("*.log"))
    flip(max(tmp_path.glob("*.base")), -1)
    flip(older, 30)
    newest.write_bytes(b"nothing of ours")
    read(tmp_path)
    assert newest.with_name(f"{newest.name}.damaged").read_bytes() == b"nothing of ours"


def test_a_record_that_a_crash_cut_short_leaves_no_file(tmp_path):
    journal_of_two_segments(tmp_path)
    newest = max(tmp_path.glob("*.log"))
    whole = newest.read_bytes()
    for left in (1, 3, 10, 30):
        newest.write_bytes(whole + whole[:left])
        assert read(tmp_path)[0].mended == [
            f"{newest.name} ends in {left} bytes that are no record"
        ]
        assert newest.read_bytes() == whole
    assert not list(tmp_path.glob("*.damaged*"))


@pytest.mark.parametrize("suffix", ["base", "log", "tmp"])
def test_a_fifo_in_a_journal_is_refused_and_not_waited_for(tmp_path, suffix):
    journal_of_two_segments(tmp_path)
    fifo = tmp_path / f"{6:020d}.{suffix}"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="is not a file"):
        Journal(tmp_path)


def test_a_segment_that_was_lost_is_noticed(tmp_path):
    journal_of_two_segments(tmp_path)
    newest = max(tmp_path.glob("*.log"))
    newest.unlink()
    journal, found = read(tmp_path)
    assert found == []
    (line,) = journal.mended
    assert f"{newest.name} is missing: what followed the snapshot after 5 rounds is lost" in line
    assert read(tmp_path)[0].mended == []


def test_other_files_in_the_folder_are_let_alone(tmp_path):
    for name in ("notes.log", "notes.base", "draft.tmp", "5.log", "x" * 20 + ".log"):
        (tmp_path / name).write_text("mine")
    expected = journal_of_two_segments(tmp_path)
    journal, found = read(tmp_path)
    assert (journal.mended, found) == ([], [plain(record) for record in expected])
    assert len([p for p in tmp_path.iterdir() if p.read_bytes() == b"mine"]) == 5


def test_a_journal_is_for_its_owners_eyes(tmp_path):
    folder = tmp_path / "run" / "journal"
    journal_of_two_segments(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep a journal in"):
        Journal(tmp_path / "file" / "journal")
