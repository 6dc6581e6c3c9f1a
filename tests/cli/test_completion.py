"""Completion scripts in the shells themselves: what TAB makes of a line that is half typed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from patience import patience

from edgetrain.__main__ import main
from edgetrain.cli.completion import KINDS, SHELLS, names

pytestmark = [
    pytest.mark.real,
    pytest.mark.usefixtures("own_imports"),
    pytest.mark.skipif(not find_spec("argcomplete"), reason="argcomplete is not installed"),
]

PATIENCE_S = patience(30)


@pytest.fixture
def script(tmp_path, capsys, monkeypatch):
    """The script of a shell; the command itself is on PATH."""
    program = tmp_path / "bin/edgetrain"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edgetrain "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def write(shell):
        assert main(["completion", shell]) == 0
        path = tmp_path / f"edgetrain.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


LINES = {
    "edgetrain ru": "run runs",
    "edgetrain compare --simu": "--simulate",
    "edgetrain simulate --vmap ": "auto off on",
    "edgetrain compare --vmap=o": "off on",
    "edgetrain run network=wan-2": "wan-200ms",
    "edgetrain run job.toml netw": "network=",
    "edgetrain compare job.toml steps=3 device=raspberry-pi-z": "raspberry-pi-zero-2w",
    "edgetrain run strategy.merge=multi": "multi-krum",
    "edgetrain run optimizer=adamw": "adamw",
    "edgetrain sweep --network wan-200ms,wan-50": "wan-200ms,wan-500ms wan-200ms,wan-50ms",
    "edgetrain keys ini": "init",
    "edgetrain networks check wan-2": "wan-200ms",
    "edgetrain completion f": "fish",
    "edgetrain nonsense --": "--debug --help --version",
}


ASK = """
import os, sys
from edgetrain.cli.completion import answer_tab
for line in sys.argv[1:]:
    answer, end = os.pipe()
    if not os.fork():
        os.dup2(end, 8)
        os.environ |= {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
        os.environ["_ARGCOMPLETE_COMP_WORDBREAKS"] = "\\"'><=;|&(:"  # as bash says
        answer_tab()
    os.close(end)
    with os.fdopen(answer) as said:
        print(*sorted(word.strip() for word in said.read().split("\\013")))
    os.wait()
"""


def test_verbs_flags_keys_and_names_are_completed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ASK, *LINES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert dict(zip(LINES, done.stdout.splitlines(), strict=True)) == LINES


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_names(kind):
    assert names(kind)


START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ". {script}\n"),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -D -u; . {script}\n"),
    "fish": (["fish", "--no-config", "-i"], "source {script}\n"),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_in_a_shell_completes_a_name_of_the_catalog(shell, script, tmp_path):
    """As people do it: a terminal, a line that is half typed, TAB."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    argv, load = START[shell]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.environ |= {"PS1": "$ ", "TERM": "dumb", "HOME": str(tmp_path)}
        os.execvp(argv[0], argv)
    try:
        os.write(terminal, load.format(script=script(shell)).encode())
        os.write(terminal, b"echo re''ady\n")
        read_until(terminal, b"ready")
        os.write(terminal, b"edgetrain run network=wan-2\t")
        read_until(terminal, b"wan-200ms")
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def read_until(terminal, text):
    seen, deadline = b"", time.monotonic() + PATIENCE_S
    while text not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536)


@pytest.mark.parametrize(("shell", "code"), [("bash", ["-n"]), ("fish", ["-n"])])
def test_the_script_parses(shell, code, script):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, *code, script(shell)], check=True)


def test_an_unknown_shell_is_one_line(capsys):
    assert main(["completion", "fsh"]) == 2
    assert capsys.readouterr().err == (
        "edgetrain: no completion for the shell 'fsh' (did you mean 'fish'?)\n"
    )
