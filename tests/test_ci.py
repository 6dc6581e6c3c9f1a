"""What .ci/run refuses of commits, and what its last line counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
CI = Path(__file__).parents[1] / ".ci"


@pytest.fixture
def commit(tmp_path):
    """Commits so many new files in a repository of its own; what .ci/commits says of it all."""
    name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def commit(message, files=1):
        folder = tmp_path / f"of-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for each in range(files):
            (folder / str(each)).touch()
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        subprocess.run(["git", *name, "commit", "-qm", message], cwd=tmp_path, check=True)
        words = [sys.executable, str(CI / "commits"), "HEAD"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout

    return commit


def test_a_commit_over_many_files_says_why(commit):
    assert commit("Add a part", 40) == (0, "1 commits: each can be reviewed\n")
    assert commit("Move the parts", 60)[0] == 0
    assert commit("Fix them all\n\nWhy: one name changed everywhere", 41)[0] == 0
    code, said = commit("Fix a part\n\nIt was wrong.", 41)
    assert code == 1
    assert "'Fix a part' changes 41 files (at most 40)" in said


def test_two_commits_with_one_subject_are_refused(commit):
    assert commit("Add a part")[0] == 0
    assert "'Add a part': 2 commits have this subject" in commit("Add a part")[1]


def test_a_clone_without_the_commits_says_that_they_are_not_checked(commit, tmp_path):
    commit("Add a part")
    words = [sys.executable, str(CI / "commits"), "0123456..HEAD"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:11]) == (0, "not checked")


def test_the_last_line_counts_second_tries_once(tmp_path):
    (tmp_path / "test").write_text("noise 3 failed\n10 passed, 2 skipped in 9.00s\n")
    (tmp_path / "real").write_text("2 failed, 5 passed, 1 error in 70.10s (0:01:10)\n")

    def said():
        words = [sys.executable, str(CI / "sum"), str(tmp_path)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert said() == "15 passed, 3 failed, 2 skipped\n"
    (tmp_path / "again").write_text("1 failed, 2 passed, 40 deselected in 7.00s\n")
    assert said() == "17 passed, 1 failed, 2 skipped\n"
