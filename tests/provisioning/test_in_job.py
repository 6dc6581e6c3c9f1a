"""Devices in a job, as their hub's run folder has them; and members' own run folders."""

from __future__ import annotations

import io
import json
import shutil
import tarfile

import pytest
from command_line import write_tiny
from folder_remote import FolderRemote

from edgetrain.fleet.ssh import SshAnswer, SshHost
from edgetrain.provisioning import fetching
from edgetrain.provisioning.cards.first_boot import SPARE
from edgetrain.provisioning.desk import DeviceDesk
from edgetrain.provisioning.in_job import FRESH_S, states_in_job
from edgetrain.runs.folder import METRICS, SUMMARY


def told(t, **keys):
    return {"kind": "status", "t": t, "member": "hub", "step": 7, "pace_s": 0.2, **keys}


LINES = [
    told(95.0, about="m0", name="pi-0", celsius=81, throttled=True, disk_free_bytes=1 << 20),
    told(96.0, about="m0", name="pi-0", celsius=82),
    told(60.0, about="m1", name="pi-1"),
    told(96.0, about="m2", name="pi-2", clock_s=-90.0, under_voltage=True, versions="0.0.9 3.11 2"),
    told(99.0, about="m3", name="pi-3"),
    {"kind": "event", "t": 99.5, "member": "hub", "event": "gone", "about": "m3"},
    told(99.0, about="m4"),
    {"kind": "event", "t": 100.0, "member": "hub", "event": "joined", "about": "m5"},
]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs/one"
    folder.mkdir(parents=True)
    write_tiny(folder)
    (folder / METRICS).write_text(
        "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in LINES)
    )
    return folder


def test_devices_that_reported_lately_are_known_without_being_asked(run):
    now = (run / METRICS).stat().st_mtime
    found = states_in_job(run.parent, "0.1.0", now)
    assert sorted(found) == ["pi-0", "pi-2"]
    assert found["pi-0"].state == "training"
    assert found["pi-0"].why == "one: step 7, 200 ms/step"
    assert found["pi-0"].marks == ("hot", "disk nearly full"), "throttled no more; disk as it was"
    assert found["pi-2"].marks == ("under-voltage", "other version", "clock wrong")
    assert [found[name].needs_a_person for name in sorted(found)] == [True, True]
    assert states_in_job(run.parent, "0.1.0", now + FRESH_S) == {}, "the hub writes nothing"


def test_a_run_that_is_over_and_no_run_know_nobody(run, tmp_path):
    now = (run / METRICS).stat().st_mtime
    (run / SUMMARY).write_text('{"format": 2, "status": "finished"}')
    assert states_in_job(run.parent, "0.1.0", now) == {}
    assert states_in_job(tmp_path / "nothing", "0.1.0", now) == {}


# -- members' own run folders ----------------------------------------------------------------------


class Sending:
    """A device that sends these bytes, whatever it is asked."""

    def __init__(self, sent):
        self.sent = sent

    def run(self, host, words, stdin=b"", *, seconds=60.0, root=False, heard=None):
        if heard is None:
            return SshAnswer(stdout=self.sent)
        heard(self.sent)
        return SshAnswer()


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Fetch what a device sends, into a hub's folder."""
    monkeypatch.setattr(fetching, "ENDING_S", 0)
    run = tmp_path / "hub"
    run.mkdir()
    write_tiny(run)
    remote, host = FolderRemote(tmp_path / "devices"), SshHost("pi-0", "pi-0")
    own = tmp_path / "devices/pi-0/run/edgetrain"

    def fetch():
        return fetching.fetch(remote, host, run, "")

    return run, own, fetch


def test_only_a_members_files_come_and_replace_those_that_are_there(fetched):
    run, own, fetch = fetched
    assert "has written no run folder" in fetch()
    older, newest = own / "20260101-000000-a", own / "20260102-000000-a"
    for folder in (older, newest):
        folder.mkdir(parents=True)
        write_tiny(folder)
    (newest / METRICS).write_text("{}\n")
    (newest / "summary.json").symlink_to("/etc/passwd")
    (newest / "evil.sh").write_text("")
    for _ in range(2):
        assert fetch() == ""
        there = sorted(path.name for path in (run / "members/pi-0").iterdir())
        assert there == ["job.toml", METRICS]
    assert [path.name for path in (run / "members").iterdir()] == ["pi-0"]


def test_another_jobs_folder_a_torn_one_and_one_that_climbs_out_are_said(fetched, monkeypatch):
    run, own, fetch = fetched
    other = own / "20260101-000000-a"
    other.mkdir(parents=True)
    write_tiny(other, train={"steps": 31})
    assert fetch() == "its newest run folder is of another job"
    monkeypatch.setattr(fetching, "MOST_BYTES", 100)
    assert "has more than" in fetch()
    monkeypatch.undo()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(entry := tarfile.TarInfo("../job.toml"), io.BytesIO())
        entry.size = 0
    for sent in (out.getvalue(), b"nothing like a tar file"):
        why = fetching.fetch(Sending(sent), SshHost("pi-0", "pi-0"), run)
        assert why.startswith("its run folder cannot be read")
    assert not (run / "members/pi-0").exists()
    assert not (run / "members/job.toml").exists()


def entry(kind, size, content=b"", name="model.safetensors"):
    """One entry of a tar file, of this kind and with this size, whatever follows it."""
    head = tarfile.TarInfo(name)
    head.type, head.size = kind, size
    return head.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def gnu_sparse(size):
    """An entry of `tar -S`: 512 bytes, of a file with a hole to `size`."""
    head = bytearray(entry(tarfile.GNUTYPE_SPARSE, 512))
    head[386:398], head[398:410] = b"%011o\0" % (size - 512), b"%011o\0" % 512
    head[483:495], head[148:156] = b"%011o\0" % size, b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + bytes(512)


def pax(text, *more):
    record = b"%d %s" % (len(text) + 3, text)
    assert len(record) < 100, "two digits"
    return entry(tarfile.XHDTYPE, len(record), record) + b"".join(more)


FILE = entry(tarfile.REGTYPE, 512, bytes(512))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (gnu_sparse(1 << 20), "sparse"),
        (pax(b"GNU.sparse.size=1048576\n", FILE), "sparse"),
        (entry(tarfile.REGTYPE, 1 << 20, bytes(512)), "cut short"),
        (entry(tarfile.REGTYPE, -512, bytes(512)), "has no size"),
        (entry(tarfile.GNUTYPE_LONGNAME, 1 << 40, bytes(512)), "empty header"),
        (pax(b"size=1048576\n", FILE), ""),
        (entry(tarfile.DIRTYPE, 0, name="./") + FILE, ""),
    ],
)
def test_nothing_is_made_of_an_archive_that_did_not_come_as_bytes(fetched, sent, why):
    run, _, _ = fetched
    job = (run / "job.toml").read_bytes()
    sent = entry(tarfile.REGTYPE, len(job), job, "job.toml") + sent + bytes(1024)
    said = fetching.fetch(Sending(sent), SshHost("pi-0", "pi-0"), run)
    assert (why in said) if why else (said == "")
    there = [path for path in (run / "members").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in there) == (0 if why else len(job) + 512)


def test_a_fleet_together_brings_no_more_than_half_of_the_disk_takes(fetched, monkeypatch):
    """Also a hub's lines, which come bit by bit while it is at work."""
    run, _, _ = fetched
    job = (run / "job.toml").read_bytes()
    sent = entry(tarfile.REGTYPE, len(job), job, "job.toml") + bytes(1024)
    usage = shutil.disk_usage(run)._replace(free=SPARE + 2 * (2 * len(sent) + 1))
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda folder: usage)
    hosts = [SshHost(f"pi-{i}", f"pi-{i}") for i in range(4)]
    results = DeviceDesk(Sending(sent), hosts).fetch(run, "member")
    assert sorted(result.ok for result in results) == [False, False, True, True]
    assert any("disk full: what the devices send does not fit" in r.said for r in results)
    monkeypatch.setattr(fetching, "MOST_BYTES", 100)
    for _ in range(3):
        assert fetching.follow(Sending(b"active\n" + b"{}\n" * 30), hosts[0], run)
    assert (run / METRICS).stat().st_size <= 100
