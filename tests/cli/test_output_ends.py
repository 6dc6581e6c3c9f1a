"""A standard output that takes nothing: one line and status 74; a pipe that nobody reads: 141;
SIGTERM: one line and 143."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import EDGETRAIN, environment

from edgetrain.cli.parser import VERBS

pytestmark = pytest.mark.real

FULL = Path("/dev/full")
ANSWERS = (["--version"], ["--help"], ["strategies"], ["devices", "list"], ["runs", "--json"])


def status_and_words(words, cwd, **streams):
    done = subprocess.run(
        [*EDGETRAIN, *words], cwd=cwd, env=environment(), stderr=subprocess.PIPE, text=True,
        **streams,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [*ANSWERS, *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_a_full_output_is_a_line_and_status_74(words, tmp_path):
    with FULL.open("wb") as full:
        status, said = status_and_words(words, tmp_path, stdout=full)
    assert (status, said) == (74, "edgetrain: the standard output: No space left on device\n")


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_a_closed_output_is_a_line_and_status_74(words, tmp_path):
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *EDGETRAIN, *words]
    done = subprocess.run(closed, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (74, b"edgetrain: the standard output is closed\n")


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_a_pipe_that_nobody_reads_is_status_141_without_a_word(words, tmp_path):
    piped = subprocess.Popen(
        [*EDGETRAIN, *words], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    piped.stdout.close()
    said = piped.stderr.read()
    assert (piped.wait(), said) == (141, b"")
    piped.stderr.close()


def test_an_error_is_told_although_the_output_is_full(tmp_path):
    with FULL.open("wb") as full:
        status, said = status_and_words(["run", "nowhere.toml"], tmp_path, stdout=full)
    assert (status, said.count("\n")) == (2, 1)


@pytest.mark.parametrize("verb", ["run", "simulate"])
def test_a_job_that_is_terminated_says_so_and_leaves_nothing_behind(verb, tmp_path):
    """No process that holds its streams, and no semaphore, of which Python would warn."""
    job = [verb, "-v", "members=2", "steps=100000"]
    begun = subprocess.Popen(
        [*EDGETRAIN, *job], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "joined" not in begun.stdout.readline():
        assert begun.poll() is None
    begun.terminate()
    _, said = begun.communicate()
    assert (begun.returncode, said) == (143, "edgetrain: stopped, as asked (SIGTERM)\n")
