"""A member's checkpoint: what was saved is restored, and no crash in the middle of a save spoils
it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import struct
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edgetrain import codecs
from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.member import checkpoint
from edgetrain.exchange.member.checkpoint import Folder, Keeper, Saved, Sparing, has_checkpoint
from edgetrain.training.member.state import TrainingState, pack, unpack


def saved(number=0, size=40):
    generator = np.random.default_rng(number)
    buffers = tuple(generator.integers(0, 255, n, dtype=np.uint8) for n in (size, 0, 7))
    return Saved(
        "model", "job", "m0", 1 << 63, "dga", "SGD", number, number, number, (1 << 64) - 1,
        ["dict", [["a", 1.5]]], buffers,
    )  # fmt: skip


def same(a, b):
    return replace(a, buffers=()) == replace(b, buffers=()) and [
        x.tobytes() for x in a.buffers
    ] == [x.tobytes() for x in b.buffers]


def only_file(folder, member="m0"):
    return sorted(folder.glob(f"{member}.*.checkpoint"))[-1]


# -- the file -------------------------------------------------------------------------------------


def test_what_was_saved_is_found_and_nobody_else_may_look(tmp_path):
    folder = Folder(tmp_path / "new" / "place", "m0")
    assert folder.load() is None
    for number in range(4):
        written = folder.save(saved(number))
        path = only_file(folder.path)
        assert path.stat().st_size == written
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert same(folder.load(), saved(number))
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert len(list(folder.path.glob("*.checkpoint"))) == 2
    folder.clear()
    assert folder.load() is None
    folder.close()
    folder.close()


def test_members_share_a_folder_and_no_two_processes_one_checkpoint(tmp_path):
    first, second = Folder(tmp_path, "m1"), Folder(tmp_path, "m1.x")
    first.save(saved(1))
    assert second.load() is None
    second.save(saved(2))
    assert first.load().steps == 1
    with pytest.raises(ConfigError, match="another process keeps the checkpoint of 'm1'"):
        Folder(tmp_path, "m1")
    first.close()
    again = Folder(tmp_path, "m1")
    assert again.load().steps == 1
    again.close()
    second.close()


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot keep checkpoints in .*file"):
        Folder(tmp_path / "file", "m0")


def test_a_folder_may_be_a_link_to_another(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    folder = Folder(tmp_path / "link", "m0")
    folder.save(saved(1))
    assert same(folder.load(), saved(1))
    folder.close()


def test_a_damaged_number_of_the_layout_is_damage(tmp_path):
    folder = Folder(tmp_path, "m0")
    folder.save(saved(1))
    folder.save(saved(2))
    path = only_file(folder.path)
    content = bytearray(path.read_bytes())
    content[25] ^= 2
    path.write_bytes(content)
    assert same(folder.load(), saved(1))
    folder.close()


@given(st.data())
def test_a_damaged_file_gives_way_to_the_one_before(data):
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(Path(place), "m0")
        folder.save(saved(1))
        folder.save(saved(2))
        path = only_file(folder.path)
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        else:
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        assert same(folder.load(), saved(1))
        assert len(folder.notes) == 1
        assert "cannot be read" in folder.notes[0]
        folder.close()


def rewritten(path, change):
    """The file with another header, and the checksums that belong to it."""
    content = path.read_bytes()
    _, header_bytes, buffer_bytes, _ = struct.unpack_from("<4sIQI", content)
    fields = msgpack.unpackb(content[24 : 24 + header_bytes])
    header, buffers = msgpack.packb(change(fields)), content[24 + header_bytes :]
    prefix = struct.pack("<4sIQI", b"etc1", len(header), buffer_bytes, zlib.crc32(header + buffers))
    path.write_bytes(prefix + struct.pack("<I", zlib.crc32(prefix)) + header + buffers)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: [f[0] - 1, *f[1:]], "layout 0, this version of edgetrain reads 1"),
        (lambda f: [f[0], {**f[1], "more": 1}, *f[2:]], "its fields are not"),
        (lambda f: [f[0], {**f[1], "steps": -1}, *f[2:]], "steps = -1: allowed is 0"),
        (lambda f: [f[0], {**f[1], "steps": "x"}, *f[2:]], "steps = 'x'"),
        (lambda f: [f[0], {**f[1], "model": 3}, *f[2:]], "model = 3 is no text"),
        (lambda f: [*f[:3], [1 << 40]], "are told"),
        (lambda f: [*f[:3], [48, -1]], "sizes of buffers"),
        (lambda f: f[:2], "makes no sense"),
        (lambda f: {"a": 1}, "makes no sense"),
    ],
)
def test_what_is_no_checkpoint_of_ours_says_why(tmp_path, change, says):
    folder = Folder(tmp_path, "m0")
    folder.save(saved(1))
    rewritten(only_file(tmp_path), change)
    with pytest.raises(ConfigError, match=f"{says}.*delete it") as caught:
        folder.load()
    assert str(tmp_path) in str(caught.value)
    folder.close()


def test_a_checkpoint_of_a_newer_edgetrain_is_refused_and_not_touched(tmp_path):
    folder = Folder(tmp_path, "m0")
    folder.save(saved(1))
    rewritten(only_file(tmp_path), lambda f: [f[0] + 1, *f[1:]])
    (newer,) = (path for path in tmp_path.iterdir() if path.suffix != ".lock")
    older = newer.rename(newer.with_name(newer.name.replace("00000001", "00000002")))
    folder.save(saved(2))
    (tmp_path / older.name.replace("00000002", "00000003")).rename(newer)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"layout 2, this .* reads 1.*the edgetrain that wrote"):
        folder.load()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    folder.close()


def test_a_damaged_checkpoint_is_kept_under_another_name(tmp_path):
    folder = Folder(tmp_path, "m0")
    folder.save(saved(1))
    first = only_file(tmp_path)
    folder.save(saved(2))
    second = first.with_name(first.name.replace("00000001", "00000002"))
    second.write_bytes(second.read_bytes()[:-1])
    assert same(folder.load(), saved(1))
    for number in (3, 4, 5):
        folder.save(saved(number))
    assert second.with_suffix(".damaged").exists()
    assert same(folder.load(), saved(5))
    folder.close()


def test_a_size_that_lies_takes_no_memory(tmp_path):
    path = tmp_path / "file"
    prefix = struct.pack("<4sIQI", b"etc1", 10, 1 << 60, 0)
    path.write_bytes(prefix + struct.pack("<I", zlib.crc32(prefix)) + bytes(100))
    with pytest.raises(BadMessage, match="it has 124 bytes"):
        checkpoint.read(path)


# -- crashes --------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """Counts what a save does to the disk, and ends the process before, in the middle of or after
    one of these. A machine that loses power then loses what was not brought to the disk."""

    def __init__(self, patch, ends_at, rng):
        self._left, self._rng = ends_at, rng
        self.unsynced: set[Path] = set()
        self.done = 0
        self._paths: dict[int, Path] = {}
        self._open, self._writev = os.open, os.writev
        self._fsync, self._replace, self._unlink = os.fsync, Path.replace, Path.unlink
        patch.setattr(os, "open", self.open)
        patch.setattr(os, "writev", self.writev)
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(Path, "replace", lambda a, b: self.replace(a, b))
        patch.setattr(Path, "unlink", lambda a, missing_ok=False: self.unlink(a, missing_ok))

    def _operation(self):
        self.done += 1
        self._left -= 1
        if self._left <= 0:  # and does nothing more, cleaning up neither
            raise Killed

    def open(self, path, flags, *rest):
        self._operation()
        file = self._open(path, flags, *rest)
        self._paths[file] = Path(path)
        if flags & os.O_CREAT:
            self.unsynced.add(Path(path))
        self._operation()
        return file

    def writev(self, file, buffers):
        self._operation()
        content = b"".join(bytes(buffer) for buffer in buffers)
        some = self._writev(file, [content[: self._rng.randint(1, len(content))]])
        self._operation()
        return some

    def fsync(self, file):
        self._operation()
        self._fsync(file)
        self.unsynced.discard(self._paths[file])
        self._operation()

    def replace(self, path, to):
        self._operation()
        found = self._replace(path, to)
        if path in self.unsynced:
            self.unsynced.remove(path)
            self.unsynced.add(to)
        self._operation()
        return found

    def unlink(self, path, missing_ok):
        self._operation()
        self._unlink(path, missing_ok)
        self._operation()


@pytest.mark.parametrize("power", [True, False])
def test_a_kill_at_every_file_operation_leaves_a_checkpoint(tmp_path, monkeypatch, power):
    for cut in range(1, 200):
        place, rng = tmp_path / str(cut), random.Random(cut)
        folder = Folder(place, "m0")
        for number in (1, 2):
            folder.save(saved(number, 3000))
        with monkeypatch.context() as patch:
            disk = Disk(patch, cut, rng)
            try:
                folder.save(saved(3, 3000))
                ended = True
            except Killed:
                ended = False
        folder.close()
        for path in disk.unsynced if power else ():
            if path.exists():
                os.truncate(path, rng.randint(0, path.stat().st_size))
        again = Folder(place, "m0")
        found = again.load()
        assert found.steps in ((3,) if ended else (2, 3))
        assert same(found, saved(found.steps, 3000))
        assert again.notes == [], "nothing half written stands in a checkpoint's place"
        again.save(saved(4, 3000))
        assert again.load().steps == 4
        assert len(list(place.glob("*"))) == 3, "two of them and the lock"
        again.close()
        shutil.rmtree(place)
        if ended:
            break
    assert disk.done == cut - 1 > 14


@pytest.mark.parametrize("what", ["open", "writev", "fsync", "replace"])
def test_a_disk_that_says_no_costs_a_remark(tmp_path, monkeypatch, caplog, what):
    now = [0.0]
    folder = Folder(tmp_path, "m0")
    keeper = Keeper(folder, Sparing(10.0), lambda: now[0])
    keeper.save(lambda: saved(1))

    def fail(*arguments, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path if what == "replace" else os, what, fail)
        for number in (2, 3):
            now[0] += 10
            assert keeper.due
            keeper.save(lambda number=number: saved(number))
            assert not keeper.due
    assert caplog.text.count("cannot be written: No space left on device") == 1
    assert same(folder.load(), saved(1))
    assert len(list(tmp_path.glob("*.tmp"))) == 0
    now[0] += 10
    keeper.save(lambda: saved(4))
    assert "room again" in caplog.text
    assert folder.load().steps == 4
    assert keeper.saves == 2
    folder.close()


# -- how seldom -----------------------------------------------------------------------------------


@given(
    st.floats(0, 1e4), st.floats(1e-4, 1), st.floats(1e3, 1e9),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**8)), min_size=2, max_size=20),
)  # fmt: skip
def test_saves_keep_to_their_time_and_their_bytes(every_s, share, bytes_an_hour, saves):
    sparing = Sparing(every_s, share, bytes_an_hour)
    now = spent = written = 0.0
    for spent_s, size in saves:
        spent, written = spent + spent_s, written + size
        pause = sparing.pause_s(spent_s, size)
        now += spent_s + pause
        assert pause >= every_s
        assert spent <= share * now * (1 + 1e-9)
        assert written <= bytes_an_hour * now / 3600 * (1 + 1e-9)


def test_pauses_that_cannot_be():
    for arguments in ((-1.0,), (1.0, 0.0), (1.0, 1.5), (1.0, 0.1, 0.0), (float("nan"),)):
        with pytest.raises(ConfigError, match="allowed are"):
            Sparing(*arguments)


def test_a_keeper_saves_at_once_then_after_its_pause_and_not_at_once_after_a_restart(tmp_path):
    now = [0.0]
    folder = Folder(tmp_path, "m0")
    keeper = Keeper(folder, Sparing(60.0, 0.02, 3600e3), lambda: now[0])
    assert keeper.due
    keeper.save(lambda: saved(1, 200_000))
    assert keeper.bytes_written > 200_000
    now[0] = 199.0
    assert not keeper.due, "200 kB at 1 kB/s"
    now[0] = 201.0
    assert keeper.due
    keeper.wait()
    assert not keeper.due
    folder.close()


# -- what is in it --------------------------------------------------------------------------------


def trained(name, seed, steps):
    """A small model with buffers, and an optimizer that has taken so many steps."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        "adamw": lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.99)),
        "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
    }
    optimizer = kinds[name](model.parameters())
    for _ in range(steps):
        one_step(model, optimizer, torch.randn(5, 3, generator=generator))
    return model, optimizer


def one_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@given(
    st.sampled_from(["sgd", "adam", "adamw", "rmsprop"]), st.integers(0, 3), st.integers(0, 1000)
)
def test_an_optimizer_goes_on_with_the_same_bits(name, steps, seed):
    model, optimizer = trained(name, seed, steps)
    values, buffers = pack(TrainingState(model, optimizer).collect())
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(Path(place), "m0")
        folder.save(replace(saved(), values=values, buffers=tuple(buffers)))
        found = folder.load()
        folder.close()
    drawn = torch.rand(3), random.random(), np.random.rand(3).tolist()
    other, fresh = trained(name, seed + 1, 2)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    TrainingState(other, fresh).put_back(unpack(found.values, found.buffers))
    again = torch.rand(3), random.random(), np.random.rand(3).tolist()
    assert torch.equal(again[0], drawn[0])
    assert again[1:] == drawn[1:]
    for _ in range(2):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        one_step(model, optimizer, x)
        one_step(other, fresh, x)
    for mine, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()


CODECS = ["topk(0.25)", "topk(0.25) | q2", "int8", "sign", "dgc(0.25, 0.9, 3) | q2", "randk(0.5)"]


@given(st.sampled_from(CODECS), st.integers(0, 5), st.integers(0, 2**32))
def test_what_was_not_sent_is_sent_by_the_next_life(spec, before, seed):
    rng = np.random.default_rng(seed)
    codec = codecs.parse(spec)
    vectors = rng.standard_normal((before + 3, 64), np.float32)
    first = codecs.memory(codec, 64)
    for vector in vectors[:before]:
        first.encode(vector)
    values, buffers = pack(first.state())
    state = unpack(values, [buffer.copy() for buffer in buffers])
    second = codecs.memory(codec, 64)
    second.restore({name: tensor.numpy() for name, tensor in state.items()})
    for vector in vectors[before:]:
        assert [bytes(p) for p in first.encode(vector)] == [bytes(p) for p in second.encode(vector)]


def test_powersgd_goes_on_where_it_was():
    layout = (("weight", 0, (12, 10)), ("bias", 120, (12,)))
    codec = codecs.bound(codecs.parse("powersgd(2)"), layout)
    rng = np.random.default_rng(0)

    def step(factors, gradient, out):
        right = factors.right(factors.left(gradient))
        factors.finish(right, out)
        return out.tobytes()

    first, second = codec.factors(), codec.factors()
    gradients = rng.standard_normal((6, 132), np.float32)
    out = np.empty(132, np.float32)
    for gradient in gradients[:3]:
        step(first, gradient, out)
    second.restore({name: array.copy() for name, array in first.state().items()})
    for gradient in gradients[3:]:
        assert step(first, gradient, out) == step(second, gradient, out)
    with pytest.raises(ConfigError, match="lacks 'residual'"):
        second.restore({})


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(PLAIN)
def test_values_are_what_they_were(tree):
    values, buffers = pack(tree)
    again = unpack(msgpack.unpackb(msgpack.packb(values), strict_map_key=False), buffers)
    assert again == tree
    assert type(again) is type(tree)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_tensors_of_every_kind(dtype):
    for shape in ((), (0,), (2, 3)):
        tensor = torch.ones(shape).to(dtype)
        values, buffers = pack(tensor.T if tensor.dim() == 2 else tensor)
        again = unpack(values, buffers)
        assert again.dtype is dtype
        assert torch.equal(again, tensor.T if tensor.dim() == 2 else tensor)


@pytest.mark.parametrize("value", [object(), 1 << 64, {1, 2}, torch.zeros(2).to_sparse()])
def test_what_no_checkpoint_can_hold_is_said_when_it_is_saved(value):
    with pytest.raises(ConfigError, match="checkpoint"):
        pack({"a": value})


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["tensor", 1, "float32", [2]],
        ["tensor", 0, "float32", [3]],
        ["tensor", 0, "float32", [-2]],
        ["tensor", 0, "quint8", [2]],
        ["tensor", "0", "float32", [2]],
        ["dict", [["a"]]],
        ["dict", [[["list", []], 1]]],
        ["set", []],
    ],
)
def test_values_that_make_no_sense_are_refused(values):
    with pytest.raises(BadMessage):
        unpack(values, [np.zeros(8, np.uint8)])
    deep = values = ["list", []]
    for _ in range(50):
        deep = ["list", [deep]]
    with pytest.raises(BadMessage, match="nested"):
        unpack(deep, [])


def test_another_optimizer_or_model_is_refused():
    model, adam = trained("adam", 0, 1)
    tree = TrainingState(model, adam).collect()
    plain = nn.Linear(3, 4)
    with pytest.raises(ConfigError, match="does not fit"):
        TrainingState(plain, torch.optim.Adam(plain.parameters())).put_back(tree)
    two = torch.optim.Adam([{"params": [p]} for p in model.parameters()])
    with pytest.raises(ConfigError, match="does not fit"):
        TrainingState(model, two).put_back(tree)
    with pytest.raises(ConfigError, match="does not fit"):
        TrainingState(model, adam).put_back({})


def test_whether_there_is_a_checkpoint_can_be_seen_without_taking_it(tmp_path):
    where = tmp_path / "none"
    assert not has_checkpoint(where, "m0", "job")
    assert not where.exists()
    folder = Folder(tmp_path, "m0")  # held all the while
    assert not has_checkpoint(tmp_path, "m0", "job")
    for number in range(3):
        folder.save(saved(number))
    assert has_checkpoint(tmp_path, "m0", "job")
    assert not has_checkpoint(tmp_path, "m0", "another")
    assert not has_checkpoint(tmp_path, "m", "job")
    newest = max(tmp_path.glob("m0.*.*"))
    newest.write_bytes(b"torn")
    assert has_checkpoint(tmp_path, "m0", "job"), "the one before it"
    (tmp_path / newest.name.replace("0", "x")).write_bytes(b"")
    assert has_checkpoint(tmp_path, "m0", "job")
    folder.close()
