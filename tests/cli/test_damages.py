"""Drawn damages of run folders, journals and folders of keys.

Whatever is in a folder, nobody sees a traceback, waits without end, or gets control bytes on the
terminal, and nothing is deleted. 60 are drawn in every run of the tests, 1,000 by
`make test-damages`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from damages import ESCAPES, damage, everything
from fleet import Disk, Fleet
from made_up_runs import DGA, SYNC, replace, write_comparison, write_run

from edgetrain.__main__ import main
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.journal import Fsync, Journal, JournalSettings
from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Pair
from edgetrain.runs.folder import write_environment

DRAWN = int(os.environ.get("DAMAGES", "60"))
LONGEST_S = 60
"""No verb takes seconds; a machine may be busy."""
SHORT = replace(DGA, members=2, steps=20)


@contextlib.contextmanager
def soon():
    """Fail where something is waited for without end."""

    def hang(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def assert_printable(text):
    wrong = {char for char in text if char != "\n" and not char.isprintable()}
    assert not wrong, f"{wrong} is printed"


def run_verb(capsys, *words):
    """What a verb prints; its status is that of a success or of one clear line."""
    with soon():
        status = main([str(word) for word in words])
    said = capsys.readouterr()
    assert_printable(said.out + said.err)
    assert status in (0, 2)
    if status:
        assert said.err.splitlines()[-1].startswith("edgetrain: ")
    assert "Traceback" not in said.err
    return said.out


# -- run folders ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders: over, under way, a comparison, one with a name that is not for terminals."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("over", "20260131-142501-\x1b[31mred\rname"):
        write_environment(write_run(root / name, SHORT))
    write_run(root / "under way", SHORT, upto=7)
    write_comparison(root / "several", replace(SYNC, members=2, steps=20), SHORT)
    return root


@pytest.mark.parametrize("seed", range(0, DRAWN, 2))
def test_a_damaged_run_folder_is_one_row_or_one_line(seed, runs, tmp_path, capsys, monkeypatch):
    rng = random.Random(seed)
    root = tmp_path / "runs"
    shutil.copytree(runs, root, copy_function=shutil.copyfile)
    healthy = root / "healthy"
    shutil.copytree(runs / "over", healthy)
    folder = rng.choice(sorted(path for path in root.iterdir() if path != healthy))
    print(said := damage(rng, folder))
    capsys.readouterr()
    before = everything(root)
    looks = itertools.count()

    def sleep(seconds):
        if next(looks) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("edgetrain.cli.watch.time.sleep", sleep)
    for words in (("--runs", root), ("--runs", root, "--json")):
        assert "healthy" in run_verb(capsys, "runs", *words), said
    run_verb(capsys, "report", folder, "-o", tmp_path / "page.html")
    run_verb(capsys, "report", healthy, folder, "-o", tmp_path / "two.html")
    traced = "--trace", tmp_path / "trace.json", "--csv", tmp_path / "rows.csv"
    run_verb(capsys, "report", folder, "-o", tmp_path / "again.html", *traced)
    run_verb(capsys, "watch", folder)
    looks = itertools.count()
    run_verb(capsys, "watch", "--runs", root)
    assert everything(root) == before


# -- journals -------------------------------------------------------------------------------------


class RealDisk(Disk):
    """Keeps what a hub writes in a journal as well."""

    def __init__(self, journal):
        super().__init__(snapshot_every=3)
        self.journal = journal

    def append(self, record):
        super().append(record)
        self.journal.append(record)

    def save(self, state):
        super().save(state)
        self.journal.save(state, needed=0)


def fleet(disk=None):
    return Fleet("dga", 3, 2, 5, 22, rng=random.Random(0), disk=disk)


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """The journal of a fleet that has trained."""
    folder = tmp_path_factory.mktemp("journal")
    kept = Journal(folder, JournalSettings(Fsync(0)))
    fleet(RealDisk(kept)).run()
    kept.close()
    assert len(list(folder.glob("*.base"))) > 2
    return folder


def opened(folder):
    """Go on from a journal as a hub does; what was mended, or None: it was refused."""
    try:
        journal = Journal(folder, JournalSettings(Fsync(0)))
    except EdgetrainError as error:
        assert_printable(str(error))
        return None
    try:
        if journal.state is not None:
            fleet().fresh_hub().restore(journal.state, journal.records(), 0.0)
    except EdgetrainError as error:
        assert_printable(str(error))
    finally:
        journal.close()
    return journal.mended


def is_kept(name, content, after):
    """Whether the bytes of a file are all there: in their place, aside, or partly each. The
    beginning of a record that a crash cut short may go."""
    asides = [c for n, (_, c) in after.items() if n.startswith(f"{name}.damaged")]
    _, now = after.get(name, (0, None))
    if content in (now, *asides):
        return True
    if now is None or not content.startswith(now):
        return False
    rest = content[len(now) :]
    return rest in asides or rest.startswith(b"etj1"[: len(rest)])


@pytest.mark.parametrize("seed", range(1, DRAWN, 4))
def test_of_a_damaged_journal_nothing_is_lost(seed, journal, tmp_path):
    rng = random.Random(seed)
    folder = tmp_path / "journal"
    shutil.copytree(journal, folder)
    print(damage(rng, folder, most=3))
    before = everything(folder)
    with soon():
        mended = opened(folder)
    after = everything(folder)
    if mended is None:
        assert after.keys() - before.keys() <= {"lock"}
        assert {name: after[name] for name in before} == before
        return
    lost = [n for n, (_, c) in before.items() if c is not None and not is_kept(n, c, after)]
    assert not lost
    assert before.keys() <= after.keys() | {n for n in before if f"{n}.damaged" in after}
    with soon():
        assert opened(folder) == []


# -- keys -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A hub's folder of keys, every file in use."""
    numbers = itertools.count(1)

    def made_up():
        number = next(numbers)
        return Pair(number.to_bytes(32, "big"), (1 << 200 | number).to_bytes(32, "big"))

    ring = Keyring(tmp_path_factory.mktemp("keys") / "keys")
    ring.init(made_up)
    ring.allow(made_up().public, "pi-1")
    ring.issue_token("pi-2", made_up, 1e12)
    ring.pin_hubs({"tcp://hub:5555": made_up().public})
    (ring.path / "hosts").write_text("")
    (ring.path / ".lock").unlink()
    return ring.path


def said_of_keys(rng, folder):
    """Damage a folder of keys, also as only keys are: permissions, names that are not for
    terminals."""
    said = damage(rng, folder) if rng.random() < 0.7 else ""
    path = rng.choice([folder, *sorted(folder.iterdir())])
    if rng.random() < 0.4 and not path.is_symlink():
        mode = rng.choice([0o777, 0o666, 0o640, 0o755, 0o000])
        path.chmod(mode)
        said += f", {path.name} {mode:o}"
    members = folder / "members"
    if rng.random() < 0.3 and members.is_file() and members.stat().st_size < 1000:
        members.write_text(members.read_text("latin-1").replace("pi-1", rng.choice(ESCAPES)))
        said += ", a name"
    return said


@pytest.mark.parametrize("seed", range(3, DRAWN, 4))
def test_damaged_keys_are_refused_and_not_repeated(seed, keys, tmp_path, capsys):
    rng = random.Random(seed)
    folder = tmp_path / "keys"
    shutil.copytree(keys, folder)
    secret = (keys / "key").read_text().split()[-1]
    print(said_of_keys(rng, folder))
    capsys.readouterr()
    before = everything(folder)
    said = ""
    for words in (("list",), ("list", "--json"), ("known-hosts",)):
        said += run_verb(capsys, "keys", *words, "--keys", folder)
    assert secret not in said
    with soon(), contextlib.suppress(EdgetrainError):
        Gate(Keyring(folder)).admit(b"k" * 32)
    assert everything(folder) == before


def test_the_drawn_files_are_somewhere_else(tmp_path):
    """What a test has damaged is in its own folder: links lead out of it."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    content = Path("/etc/passwd").read_bytes()
    damage(random.Random(0), tmp_path)
    assert Path("/etc/passwd").read_bytes() == content
