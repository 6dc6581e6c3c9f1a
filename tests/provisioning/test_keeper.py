"""A device's job sets and slots: cut off at any file operation, the next run ends in the same
state; a version that does not become READY takes itself back."""

from __future__ import annotations

import ast
import dataclasses
import gzip
import hashlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import running_devices
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.provisioning import keeper as module
from edgetrain.provisioning import sets
from edgetrain.provisioning.cards import archive, first_boot
from edgetrain.provisioning.cards.first_boot import UNIT, Failed
from edgetrain.provisioning.desk import archive_protocol
from edgetrain.provisioning.keeper import (
    DeviceFiles,
    DeviceKeeper,
    Trial,
    UnitState,
    judge,
    with_pins,
)

GOOD = UnitState("active", "running", "success", 0, "training: 3 of 9 steps")
WAITS = UnitState("activating", "start", "success", 0, "looking for the hub at tcp://hub:5555")
REFUSED = UnitState("failed", "failed", "exit-code", 2, "the hub refused: protocol: version 11")
HANGS = UnitState("activating", "start", "success", 0, "joining tcp://hub:5555")
NOTHING = UnitState()


class CutOff(BaseException):
    """The power is gone."""


class Cut(DeviceFiles):
    """A disk that loses power in the middle of its n-th operation, before it or behind it."""

    def __init__(self, fuse: int = -1, behind: bool = False) -> None:
        self.fuse, self.behind, self.operations = fuse, behind, 0

    def _do(self, what, *words):
        self.operations += 1
        last = self.operations - 1 == self.fuse
        if last and not self.behind:
            self._half(what, *words)
            raise CutOff
        getattr(DeviceFiles, what)(self, *words)
        if last:
            raise CutOff

    def _half(self, what, *words):
        """What a step leaves that is cut off: some files of a folder, a draft."""
        path = words[0]
        if what == "remove" and path.is_dir() and not path.is_symlink():
            for file in sorted(p for p in path.rglob("*") if p.is_file())[::2]:
                file.unlink()
        elif what == "unpack":
            words[1].mkdir(parents=True)
            (words[1] / "half").write_text("a")
        elif what in ("write", "link"):
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / f".{path.name}.part").write_text("half")

    def write(self, path, content, mode=0o644):
        self._do("write", path, content, mode)

    def link(self, path, target):
        self._do("link", path, target)

    def rename(self, path, to):
        self._do("rename", path, to)

    def remove(self, path):
        self._do("remove", path)

    def unpack(self, file, into):
        self._do("unpack", file, into)


class Board:
    """A device in a folder, with a stand-in for systemd: the member in a slot is as its file `as`
    says, once it is started."""

    def __init__(self, root: Path) -> None:
        self.root, self.started, self.loads = root, "", True
        self.now = GOOD
        self.calls: list[str] = []

    def run(self, words, environment):
        if words[0] != "systemctl":
            return (0, "") if self.loads else (1, "Traceback\nImportError: no torch")
        self.calls.append(" ".join(words[1:]))
        if words[1] in ("start", "restart"):
            self.started = (self.root / "opt/edgetrain/current/as").read_text()
            self.now = {"good": GOOD, "refused": REFUSED, "hangs": HANGS, "waits": WAITS}[
                self.started
            ]
        elif words[1] == "stop":
            self.now = NOTHING
        elif words[1] == "show":
            unit = self.now
            return 0, (
                f"ActiveState={unit.active}\nSubState={unit.sub}\nResult={unit.result}\n"
                f"ExecMainStatus={unit.status}\nStatusText={unit.text}\nNRestarts=0\n"
            )
        return 0, ""

    def keeper(self, disk=None):
        return DeviceKeeper(self.root, self.run, disk)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Nothing here loses power: the real disk need not have it."""
    for name in ("sync_tree", "sync_folder"):
        monkeypatch.setattr(module.first_boot, name, lambda folder: None)


def packed(folder: Path, how: str) -> tuple[bytes, str]:
    """A worker archive whose member is like this; and its digest."""
    site = folder / how
    (site / "edgetrain/exchange").mkdir(parents=True)
    (site / "edgetrain/exchange/messages.py").write_text('"""A protocol."""\nPROTOCOL = 12\n')
    (site / "as").write_text(how)
    manifest = archive.Manifest("raspberry-pi-os-13", "3.13", "aarch64", {"edgetrain": how})
    archive.pack(site, manifest, folder / f"{how}.tar")
    content = (folder / f"{how}.tar").read_bytes()
    return content, hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives")
    return {how: packed(folder, how) for how in ("good", "refused", "hangs", "waits")}


def flashed(root: Path, how: str = "good") -> Board:
    return Board(running_devices.flashed(root, how))


def arrive(board: Board, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    path = board.root / "opt/edgetrain/incoming" / digest
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return digest


def state(root: Path) -> dict[str, str]:
    """All files and links of a device, drafts that a loss of power leaves apart."""
    return {
        str(path.relative_to(root)): f"-> {path.readlink()}"
        if path.is_symlink()
        else path.read_bytes().hex()
        for path in sorted(root.rglob("*"))
        if (path.is_symlink() or path.is_file()) and not path.name.endswith(".part")
    }


def cut_at_each_operation(tmp_path, make, act):
    """`act(board, keeper)` on devices from `make(folder)`, cut off at each of its operations: what
    the next act leaves is what one act leaves that is not cut off."""
    whole, counting = make(tmp_path / "whole"), Cut()
    act(whole, whole.keeper(counting))
    wanted = state(whole.root)
    for fuse in range(counting.operations):
        for behind in (False, True):
            board = make(tmp_path / f"cut-{fuse}-{behind}")
            with pytest.raises(CutOff):
                act(board, board.keeper(Cut(fuse, behind)))
            board.run(["systemctl", "start"], {})  # as each boot does
            act(board, board.keeper())
            assert state(board.root) == wanted, (fuse, behind)
            shutil.rmtree(board.root)
    assert counting.operations > 3
    return whole


SET = sets.JobSet(
    b"name = 'second'\n",
    {"job": "2", "name": "second", "bundle": "b" * 64, "bundle_name": "my.bundle"},
    None,
    ("my.bundle", b"code", "b" * 64),
)


def test_a_set_is_taken_and_the_member_restarted(tmp_path):
    board = flashed(tmp_path)
    digest, unit = arrive(board, SET.packed), arrive(board, b"threads @THREADS@\n")
    assert board.keeper().send(digest, unit)["changed"]
    current = tmp_path / "etc/edgetrain/current"
    assert current.readlink() == Path("jobs/2")
    assert (current / "my.bundle").read_bytes() == b"code"
    allowed = tmp_path / "var/lib/edgetrain-keys/bundles"
    assert allowed.read_text() == f"{'b' * 64} my.bundle\n"
    assert allowed.stat().st_mode & 0o777 == 0o600
    assert board.calls == ["daemon-reload", f"reset-failed {UNIT}", f"restart --no-block {UNIT}"]
    assert "@" not in (tmp_path / "etc/systemd/system" / UNIT).read_text()
    board.calls.clear()
    before = state(tmp_path)
    arrive(board, SET.packed)
    arrive(board, b"threads @THREADS@\n")
    assert not board.keeper().send(digest, unit)["changed"]
    assert state(tmp_path) == before
    assert board.calls == [f"start --no-block {UNIT}"], "it runs, or does again"


ADDRESS, KEY = st.sampled_from(["tcp://a:1", "tcp://b:1", "tcp://c:2"]), st.sampled_from("xyz")
PINS = st.dictionaries(ADDRESS, KEY)


@given(PINS, PINS)
def test_pins_of_other_hubs_stay(there, ours):
    def text(pins):
        return "".join(f"{address} {key}\n" for address, key in pins.items())

    found = with_pins(text(there), text(ours))
    assert dict(line.split() for line in found.splitlines()) == there | ours
    assert with_pins(found, text(ours)) == found


def test_a_set_that_is_cut_off_anywhere_is_finished_by_the_next_run(tmp_path):
    def act(board, keeper):
        digest, unit = arrive(board, SET.packed), arrive(board, b"x @THREADS@\n")
        keeper.send(digest, unit)

    board = cut_at_each_operation(tmp_path, flashed, act)
    assert f"restart --no-block {UNIT}" in board.calls


def test_only_the_newest_two_sets_are_kept(tmp_path):
    board = flashed(tmp_path)
    for number in range(4):
        packed = sets.JobSet(b"", {"job": str(number)}).packed
        board.keeper().send(arrive(board, packed))
    names = sorted(path.name for path in (tmp_path / "etc/edgetrain/jobs").iterdir())
    assert names == ["4", "5"]


def test_a_bundle_that_was_revoked_here_is_refused_and_nothing_changes(tmp_path):
    board = flashed(tmp_path)
    board.keeper().send(arrive(board, SET.packed))
    (tmp_path / "var/lib/edgetrain-keys/bundles").write_text("")
    other = dataclasses.replace(SET, job=b"name = 'third'\n").packed
    before = {**state(tmp_path)}
    with pytest.raises(Failed, match=r"the bundle bbbbbbbbbbbb was revoked on this device"):
        board.keeper().send(arrive(board, other))
    after = {k: v for k, v in state(tmp_path).items() if "incoming" not in k and ".part" not in k}
    assert after == before


def test_a_file_that_did_not_arrive_whole_is_refused(tmp_path):
    board = flashed(tmp_path)
    digest = arrive(board, SET.packed)
    (tmp_path / "opt/edgetrain/incoming" / digest).write_bytes(SET.packed[:-1])
    with pytest.raises(Failed, match="was not copied whole"):
        board.keeper().send(digest)
    with pytest.raises(Failed, match="has not been copied to this device"):
        board.keeper().update("f" * 64)
    assert board.calls == []


def ended(board: Board) -> str:
    return json.loads((board.root / "opt/edgetrain/outcome.json").read_text())["ended"]


def slot(board: Board) -> str:
    return str((board.root / "opt/edgetrain/current").readlink())


def updated(board: Board, content: bytes) -> list[float]:
    """Update a device and let its trial end; the seconds it slept."""
    slept: list[float] = []
    keeper = board.keeper()
    if keeper.update(arrive(board, content))["trial"]:
        keeper.watch(slept.append)
    return slept


def test_a_good_version_is_taken_and_the_other_slot_is_kept(tmp_path, archives):
    board = flashed(tmp_path)
    assert sum(updated(board, archives["good"][0])) <= 10
    assert (ended(board), slot(board), board.started) == ("taken", "b", "good")
    assert not (tmp_path / "opt/edgetrain/trial.json").exists()
    assert json.loads((tmp_path / "opt/edgetrain/b.json").read_text()) == {
        "digest": archives["good"][1], "edgetrain": "good", "torch": "", "ready": True,
    }  # fmt: skip
    assert (tmp_path / "opt/edgetrain/a/as").exists(), "the way back"
    board.calls.clear()
    assert updated(board, archives["good"][0]) == []
    assert not any("restart" in call or "stop" in call for call in board.calls)


@pytest.mark.parametrize(("how", "seconds"), [("refused", 5.0), ("hangs", 600.0)])
def test_a_version_that_is_refused_or_hangs_takes_itself_back(tmp_path, archives, how, seconds):
    board = flashed(tmp_path)
    assert sum(updated(board, archives[how][0])) == seconds
    assert (ended(board), slot(board), board.started) == ("back", "a", "good")
    assert board.now == GOOD
    why = json.loads((tmp_path / "opt/edgetrain/outcome.json").read_text())["why"]
    assert ("the hub refused" in why) == (how == "refused")
    assert ("not READY within 600 s: joining" in why) == (how == "hangs")
    assert "digest" not in json.loads((tmp_path / "opt/edgetrain/a.json").read_text())


def test_a_slot_that_was_never_ready_is_no_way_back(tmp_path, archives):
    board = flashed(tmp_path)
    board.now = HANGS  # the flashed version was never welcomed
    updated(board, archives["refused"][0])
    assert (ended(board), slot(board), board.started) == ("stuck", "b", "refused")


def test_a_version_that_was_taken_back_is_no_way_back_for_the_next(tmp_path, archives):
    board = flashed(tmp_path)
    updated(board, archives["good"][0])
    updated(board, archives["refused"][0])
    assert (ended(board), slot(board)) == ("back", "b")
    facts = json.loads((tmp_path / "opt/edgetrain/a.json").read_text())
    assert facts["ready"] is False


def test_a_version_that_cannot_be_loaded_is_never_switched_to(tmp_path, archives):
    board = flashed(tmp_path)
    board.loads = False
    with pytest.raises(Failed, match="does not load on this device: ImportError: no torch"):
        board.keeper().update(arrive(board, archives["good"][0]))
    assert slot(board) == "a"
    assert not (tmp_path / "opt/edgetrain/trial.json").exists()


def test_a_disk_without_room_is_said_before_anything_is_unpacked(tmp_path, archives, monkeypatch):
    board = flashed(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(Failed, match="the disk has 0 MB free, and the update takes 67 MB"):
        board.keeper().update(arrive(board, archives["good"][0]))
    assert not (tmp_path / "opt/edgetrain/b").exists()


def test_a_damaged_payload_is_refused(tmp_path, archives):
    board, content = flashed(tmp_path), bytearray(archives["good"][0])
    path = tmp_path / "damaged.tar"
    path.write_bytes(content)
    with tarfile.open(path) as tar:
        content[tar.getmember("payload.tar.gz").offset_data + 50] ^= 1
    with pytest.raises(Failed, match="the worker archive"):
        board.keeper().update(arrive(board, bytes(content)))
    assert slot(board) == "a"


def lying(kind, size, content=b"", unpacked=0):
    """A worker archive whose payload has one entry with this header, and these bytes after it."""
    entry = tarfile.TarInfo("a")
    entry.type, entry.size = kind, size
    payload = gzip.compress(entry.tobuf(tarfile.GNU_FORMAT) + content + bytes(1024))
    manifest = {"sha256": hashlib.sha256(payload).hexdigest(), "unpacked": unpacked}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, held in ("manifest.json", json.dumps(manifest).encode()), (
            "payload.tar.gz", payload,
        ):  # fmt: skip
            entry = tarfile.TarInfo(name)
            entry.size = len(held)
            tar.addfile(entry, io.BytesIO(held))
    return out.getvalue()


MORE = bytes(3 << 10)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lying(tarfile.REGTYPE, len(MORE), MORE), "more bytes than it says"),
        (lying(tarfile.XHDTYPE, len(MORE), MORE), "more bytes than it says"),
        (lying(tarfile.GNUTYPE_LONGNAME, len(MORE), MORE), "more bytes than it says"),
        (lying(tarfile.DIRTYPE, 0, MORE, unpacked=-4096), "more bytes than it says"),
        (lying(tarfile.GNUTYPE_SPARSE, 0, unpacked=4096), "is sparse"),
        (lying(tarfile.SYMTYPE, 0, unpacked=4096), "no file and no folder"),
    ],
)
def test_no_more_is_unpacked_than_an_archive_says(tmp_path, monkeypatch, content, why):
    """Not on a device, and not where it is sent from."""
    monkeypatch.setattr(first_boot, "SPARE", 2 << 10)
    (path := tmp_path / "worker.tar").write_bytes(content)
    board = flashed(tmp_path / "device")
    with pytest.raises(Failed, match=why):
        board.keeper().update(arrive(board, content))
    assert slot(board) == "a"
    assert not list((tmp_path / "device").glob("opt/edgetrain/b.part/*"))
    if "more bytes" in why:
        with pytest.raises(ConfigError, match=why):
            archive_protocol(path)


def test_a_set_with_a_hole_is_refused(tmp_path):
    content = lying(tarfile.GNUTYPE_SPARSE, 0)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        held = gzip.decompress(tar.extractfile("payload.tar.gz").read())
    board = flashed(tmp_path)
    with pytest.raises(Failed, match="the job's files cannot be unpacked: a is sparse"):
        board.keeper().send(arrive(board, held))


def test_another_update_waits_for_the_one_that_is_on_trial(tmp_path, archives):
    board = flashed(tmp_path)
    board.keeper().update(arrive(board, archives["hangs"][0]))
    with pytest.raises(Failed, match="slot b is in use: another update is on trial"):
        board.keeper().update(arrive(board, archives["good"][0]))


@pytest.mark.parametrize("how", ["good", "refused", "hangs"])
def test_an_update_that_is_cut_off_anywhere_is_finished_by_the_next_run(tmp_path, archives, how):
    """Also by the device alone, if that was on trial: its unit is started at each boot."""

    def act(board, keeper):
        if (board.root / "opt/edgetrain/trial.json").exists():
            keeper.watch(lambda seconds: None)
        outcome = board.root / "opt/edgetrain/outcome.json"
        if outcome.exists():
            return
        keeper.update(arrive(board, archives[how][0]))
        keeper.watch(lambda seconds: None)

    def make(folder):
        board = flashed(folder)
        (folder / "opt/edgetrain/a.json").write_text('{"ready": true}\n')
        return board

    board = cut_at_each_operation(tmp_path, make, act)
    assert ended(board) == ("taken" if how == "good" else "back")


@given(
    left_s=st.floats(1, 600),
    passed_s=st.floats(0, 600),
    strict=st.booleans(),
    unit=st.sampled_from([GOOD, WAITS, REFUSED, HANGS, NOTHING]),
)
def test_a_trial_ends_for_a_reason(left_s, passed_s, strict, unit):
    verdict, after = judge(unit, Trial("a", "b", "trying", left_s, strict), passed_s)
    counts = unit is HANGS or (unit is WAITS and strict)
    if unit in (GOOD, NOTHING):
        assert verdict == "taken"
    elif unit is REFUSED:
        assert (verdict, after.why) == ("back", REFUSED.text)
    elif counts and passed_s >= left_s:
        assert verdict == "back"
        assert "not READY within 600 s" in after.why
    else:
        assert verdict == ""
        assert after.left_s == (left_s - passed_s if counts else left_s)


def test_a_set_is_the_same_bytes_for_the_same_files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "more").mkdir(parents=True)
        (tmp_path / name / "more/b.csv").write_text("2")
        (tmp_path / name / "a.csv").write_text("1")
    packed = [sets.pack_data(tmp_path / name) for name in ("one", "two")]
    assert packed[0] == packed[1]


def test_it_needs_only_the_standard_library_and_the_first_boot():
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    ours = {name for name in names if name.startswith("edgetrain")}
    assert ours == {"edgetrain.provisioning.cards", "edgetrain.provisioning.cards.first_boot"}
    assert {name.split(".")[0] for name in names - ours} <= sys.stdlib_module_names
