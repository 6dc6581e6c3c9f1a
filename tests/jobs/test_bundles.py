"""Bundles: what is in one, whose code runs, and archives that somebody means harm with."""

from __future__ import annotations

import io
import json
import os
import stat
import tempfile
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError, EdgetrainError, TaskError
from edgetrain.jobs import bundles
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of

TASK = """
import torch
class Tiny:
    name, metric, better, target = "tiny", "loss", "lower", None
    def __init__(self, seed=0): ...
    def model(self): return torch.nn.Linear(1, 1)
    def samples(self, member, members): return 4
    def batches(self, member, members, batch, seed):
        while True: yield torch.zeros(batch, 1), torch.zeros(batch, 1)
    def loss(self, model, batch): return (model(batch[0]) - batch[1]).square().mean()
    def evaluate(self, model): return {"loss": 0.0}
"""
COUNT = iter(range(10**6))


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch, own_imports):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()


def module():
    """A name that no test has imported yet."""
    return f"bundled_{next(COUNT)}"


def a_bundle(tmp_path, text=TASK, name=None):
    name = name or module()
    path = tmp_path / f"{name}.bundle"
    path.write_bytes(bundles.pack({f"{name}.py": text.encode()}))
    return path, name


def load(spec, beside=None):
    return task_of(Job(task=spec), beside)


def unpacked(tmp_path):
    return list((tmp_path / "temporary").iterdir())


def zipped(entries, compression=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for entry, content in entries:
            archive.writestr(entry, content)
    return out.getvalue()


# -- what a bundle is ------------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-z]{1,3}(/[a-z]{4,6}){0,2}\.py", fullmatch=True)


@given(st.dictionaries(NAMES, st.binary(max_size=50), min_size=1, max_size=6))
def test_the_same_files_are_the_same_bytes_whatever_their_order(files):
    archive = bundles.pack(files)
    assert archive == bundles.pack(dict(reversed(files.items())))
    assert bundles.unpack(archive) == files


def test_a_folder_is_bundled_without_what_does_not_belong(tmp_path):
    for name in ("a.py", "sub/b.py", ".git/config", "__pycache__/a.pyc", ".env", "old.bundle"):
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    first = bundles.make(tmp_path / "task")
    (tmp_path / "task" / "a.py").touch()
    assert sorted(bundles.unpack(first)) == ["a.py", "sub/b.py"]
    assert bundles.make(tmp_path / "task") == first
    assert list(bundles.unpack(bundles.make(tmp_path / "task" / "a.py"))) == ["a.py"]


def test_links_are_not_followed(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "a.py").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="is a link"):
        bundles.make(tmp_path / "task")
    with pytest.raises(ConfigError, match="is no file"):
        bundles.make(tmp_path / "task" / "a.py")


# -- hostile archives ------------------------------------------------------------------------------


def link():
    entry = zipfile.ZipInfo("task.py")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


GOOD = bundles.pack({"task.py": b"x = 1\n"})
HOSTILE = {
    "nothing": b"",
    "no archive": b"hello" * 100,
    "up": zipped([("../evil.py", b"")]),
    "inner up": zipped([("a/../../evil.py", b"")]),
    "absolute": zipped([("/etc/cron.d/evil", b"")]),
    "drive": zipped([("C:/evil.py", b"")]),
    "backslash": zipped([("a\\..\\evil.py", b"")]),
    "hidden": zipped([(".bashrc", b"")]),
    "dot": zipped([("./a.py", b"")]),
    "empty part": zipped([("a//b.py", b"")]),
    "line break": zipped([("a\n.py", b"")]),
    "letters that look alike": zipped([("tаsk.py", b"")]),
    "link": zipped([(link(), b"/etc/passwd")]),
    "folder": zipped([("a/", b"")]),
    "case": zipped([("a.py", b"1"), ("A.py", b"2")]),
    "file as folder": zipped([("a.py", b"1"), ("a.py/b.py", b"2")]),
    "many": zipped([(f"f{i}.py", b"") for i in range(bundles.MOST_FILES + 1)]),
    "bomb": zipped([("a.py", b"\0" * (bundles.MOST_BYTES + 1))], zipfile.ZIP_DEFLATED),
    "small bomb": zipped([("a.py", b"\0" * 10**6)], zipfile.ZIP_DEFLATED),
    "long name": zipped([("a" * 300, b"")]),
    "dated": zipped([("task.py", b"x = 1\n")]),
    "bytes behind": GOOD + b"#",
    "bytes before": b"#!/bin/sh\n" + GOOD,
    "torn": GOOD[:-10],
    "too large": b"\0" * (bundles.MOST_BYTES + 1),
}


def lying():
    """The directory at the end says that the file is one byte; its content is more."""
    archive = bytearray(GOOD)
    at = archive.rindex(b"PK\x01\x02")
    archive[at + 20 : at + 28] = (1).to_bytes(4, "little") * 2
    return bytes(archive)


HOSTILE["lying sizes"] = lying()


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_archives_are_refused_before_anything_is_written(what, tmp_path):
    path = tmp_path / "evil.bundle"
    path.write_bytes(HOSTILE[what])
    allowed = bundles.Allowed(tmp_path / "keys")
    allowed.allow(bundles.digest_of(HOSTILE[what]))  # even so
    with pytest.raises(ConfigError) as refused:
        bundles.opened(path, allowed)
    assert len(str(refused.value).splitlines()) <= 2
    assert unpacked(tmp_path) == []


def test_two_files_of_one_name_are_refused():
    with pytest.warns(UserWarning, match="Duplicate"):
        archive = zipped([("a.py", b"1"), ("a.py", b"2")])
    with pytest.raises(ConfigError):
        bundles.unpack(archive)


@given(st.data())
def test_a_changed_byte_is_another_bundle_or_none(data):
    archive = bytearray(GOOD)
    at = data.draw(st.integers(0, len(archive) - 1))
    archive[at] ^= data.draw(st.integers(1, 255))
    changed = bytes(archive)
    assert bundles.digest_of(changed) != bundles.digest_of(GOOD)
    try:
        files = bundles.unpack(changed)
    except ConfigError:
        return
    assert bundles.pack(files) == changed


@given(st.binary(max_size=300))
def test_whatever_bytes_come_there_is_one_kind_of_error(noise):
    for archive in (noise, GOOD[:40] + noise, noise + GOOD):
        try:
            bundles.unpack(archive)
        except ConfigError:
            continue
        assert archive == GOOD


# -- whose code runs -------------------------------------------------------------------------------


def test_only_what_is_allowed_is_imported(tmp_path):
    marker = tmp_path / "ran"
    path, name = a_bundle(
        tmp_path, f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n" + TASK
    )
    spec = f"{path.name}#{name}:Tiny"
    with pytest.raises(ConfigError, match=r"not allowed on this device.*bundle allow [0-9a-f]{64}"):
        load(spec, beside=tmp_path)
    assert not marker.exists()
    assert unpacked(tmp_path) == []
    assert main(["bundle", "allow", str(path)]) == 0
    assert load(spec, beside=tmp_path).name == "tiny"
    assert marker.exists()
    (folder,) = unpacked(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    load(spec, beside=tmp_path)
    assert unpacked(tmp_path) == [folder]


def test_what_was_changed_after_it_was_allowed_does_not_run(tmp_path):
    path, name = a_bundle(tmp_path)
    assert main(["bundle", "allow", str(path)]) == 0
    path.write_bytes(bundles.pack({f"{name}.py": (TASK + "#").encode()}))
    with pytest.raises(ConfigError, match="not allowed"):
        load(f"{path}#{name}:Tiny")
    assert unpacked(tmp_path) == []


def test_a_bundle_is_read_once(tmp_path, monkeypatch):
    """Between looking up the digest and unpacking nobody can put another file there."""
    path, name = a_bundle(tmp_path)
    bundles.Allowed(tmp_path / "keys").allow(bundles.digest_of(path.read_bytes()))
    reads = []
    read = bundles.read

    def swapped(at):
        reads.append(at)
        archive = read(at)
        path.write_bytes(bundles.pack({f"{name}.py": b"evil = 1"}))
        return archive

    monkeypatch.setattr(bundles, "read", swapped)
    folder = bundles.opened(path, bundles.Allowed(tmp_path / "keys"))
    assert (folder / f"{name}.py").read_text() == TASK
    assert len(reads) == 1


def test_a_job_can_say_which_content_it_means(tmp_path):
    path, name = a_bundle(tmp_path)
    digest = bundles.digest_of(path.read_bytes())
    assert main(["bundle", "allow", digest]) == 0
    assert load(f"{path}@{digest[:16]}#{name}:Tiny").name == "tiny"
    with pytest.raises(ConfigError, match="the job wants"):
        load(f"{path}@{'0' * 16}#{name}:Tiny")
    with pytest.raises(ConfigError, match="16 to 64 digits"):
        load(f"{path}@{digest[:8]}#{name}:Tiny")


def test_a_module_that_is_hidden_by_an_installed_one_is_not_taken_for_it(tmp_path):
    path, _ = a_bundle(tmp_path, name="json")
    assert main(["bundle", "allow", str(path)]) == 0
    with pytest.raises(TaskError, match=r"'json' of .* is hidden by"):
        load(f"{path}#json:Tiny")


def test_modules_of_a_bundle_find_each_other(tmp_path):
    helper, name = module(), module()
    path = tmp_path / "two.bundle"
    code = f"from {helper} import Tiny\n"
    path.write_bytes(bundles.pack({f"{helper}.py": TASK.encode(), f"{name}.py": code.encode()}))
    assert main(["bundle", "allow", str(path)]) == 0
    assert load(f"{path}#{name}:Tiny").name == "tiny"


@pytest.mark.parametrize("spec", ["gone.bundle#a:b", "#a:b", "x@zz#a:b", "x.bundle#nocolon"])
def test_names_that_lead_nowhere_are_one_clear_error(spec, tmp_path):
    with pytest.raises(EdgetrainError):
        load(spec, beside=tmp_path)


# -- the list --------------------------------------------------------------------------------------


def test_the_list_is_private_and_a_damaged_one_allows_nothing(tmp_path):
    allowed = bundles.Allowed(tmp_path / "keys")
    assert allowed.all() == {}
    digest = "ab" * 32
    allowed.allow("sha256:" + digest.upper(), "my task.bundle\nevil")
    assert allowed.all() == {digest: "my-task.bundle-evil"}
    assert stat.S_IMODE(allowed.path.stat().st_mode) == 0o600
    allowed.path.chmod(0o620)
    with pytest.raises(ConfigError, match="can be written by others"):
        allowed.all()
    allowed.path.chmod(0o600)
    allowed.path.write_text("# mine\n" + digest[:-1] + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        allowed.all()


def test_the_command(tmp_path, capsys):
    (tmp_path / "task.py").write_text(TASK)
    target = tmp_path / "task.bundle"
    assert main(["bundle", "make", str(tmp_path / "task.py"), "-o", str(target), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["digest"] == bundles.digest_of(target.read_bytes())
    assert main(["bundle", "show", str(target)]) == 0
    assert "task.py" in capsys.readouterr().out
    assert main(["bundle", "list"]) == 0
    assert "no bundle" in capsys.readouterr().out
    assert main(["bundle", "allow", str(target)]) == 0
    capsys.readouterr()
    assert main(["bundle", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {made["digest"]: "task.bundle"}
    assert main(["bundle", "revoke", made["digest"][:8]]) == 0
    assert main(["bundle", "revoke", made["digest"][:8]]) == 2
    assert "0 bundles" in capsys.readouterr().err
    assert main(["bundle", "allow", "nonsense"]) == 2
    assert "no digest and no file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("show", "pipe"), ("make", "folder", "-o", "made.bundle")])
def test_a_pipe_is_not_waited_for(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "folder").mkdir()
    os.mkfifo("folder/task.py")
    assert main(["bundle", *words]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    assert not (tmp_path / "made.bundle").exists()
