"""Commands of README, docs and --help, typed as they are printed. `make test-commands` runs the
long ones (marked nightly), a process each, and prints their seconds."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_classes import BESIDE, ELSEWHERE, NEEDS, NIGHTLY, QUICK, STATUS
from command_line import EDGETRAIN, environment, running
from documented_commands import COMMANDS, OTHERS, ROOT
from made_up_runs import DGA, write_run

from edgetrain.__main__ import main
from edgetrain.runs.folder import folders_in, read_summary, runs_in

REFUSED = {command.line: command.answer for command in COMMANDS if "edgetrain: " in command.answer}
BENCHMARKS = [
    line for line in OTHERS if line.startswith(("python benchmarks/", "python examples/leaf.py"))
]
MEASURES = [line for line in OTHERS if line.startswith("python -m benchmarks")]
INSTALLS = ("git clone ", "pip install ", "make ")
LONGEST_S = 3600
KEY = "vP6lGNBeDCqi8qL9bnRSpVjVy-Trxs-2J6SIRwKcY28"
"""A public key of a device that is nowhere."""

SERVER = """
[[server]]
name = "gpu-0"
host = "192.0.2.7"
profile = "gpu-server"
accelerators = 2
"""


def lay(folder, line, typed):
    """Put into a folder what a command takes for granted; `typed` runs one that comes before."""
    for beside in ("examples", "benchmarks"):
        (folder / beside).symlink_to(ROOT / beside)
    words = shlex.split(line)
    if "job.toml" in words and words[1] != "init":
        members = ["members=2"] if words[1] in ("hub", "report") else []
        typed("init", "job.toml", *members)
    if "cluster.toml" in line and words[1:3] != ["devices", "init"]:
        typed("devices", "init", "cluster.toml")
    if "servers.cluster=cluster.toml" in words:
        (folder / "cluster.toml").write_text(SERVER)
    if words[1] == "keys" and words[2] != "init":
        typed("keys", "init")
    if words[1:3] == ["keys", "revoke"]:
        typed("keys", "enroll", words[3], "--key", KEY)
    if words[1] == "bundle":
        (folder / "mytask").mkdir()
        (folder / "mytask" / "__init__.py").write_text("class Sine:\n    pass\n")
        if words[2] != "make":
            typed("bundle", "make", "mytask/", "-o", "mytask.bundle")
    if words[1] in ("report", "runs", "watch"):
        named = [word for word in words if word.startswith("runs/")]
        for name in named or ["runs/20260131-142501-digits"]:
            write_run(folder / name, DGA)


pytestmark = pytest.mark.usefixtures("own_imports")


def clean(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))


def test_every_command_is_in_one_of_three_tables():
    """So that a new one is either run, or named with a reason."""
    tables = [*QUICK, *NIGHTLY, *ELSEWHERE]
    assert len(tables) == len(set(tables))
    assert sorted({command.line for command in COMMANDS}) == sorted(tables)
    assert all(ELSEWHERE.values())
    for path in re.findall(r"tests/[\w/.]+", " ".join(ELSEWHERE.values())):
        assert (ROOT / path).exists(), path


def test_whatever_else_is_typed_is_there():
    """What installs or is CI; and benchmarks, with names and flags that they know."""
    assert [line for line in OTHERS if not line.startswith((*INSTALLS, "python "))] == []
    typed = sorted(line for line in OTHERS if line.startswith("python "))
    assert typed == sorted([*BENCHMARKS, *MEASURES])
    for line in MEASURES:
        names = [word for word in shlex.split(line)[3:] if not word.startswith("--")]
        assert all([*(ROOT / "benchmarks").glob(f"{name}.*")] for name in names), line
    for line in BENCHMARKS:
        script, *words = shlex.split(line)[1:]
        source = (ROOT / script).read_text("utf-8")
        unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
        assert unknown == [], line


def test_documented_sweeps_over_round_trips_give_dga_a_delay_that_hides_them():
    """A shorter delay shows what a strategy does that was given too little."""
    found = 0
    for line in {command.line for command in COMMANDS}:
        words = shlex.split(line)
        keys = dict(word.split("=", 1) for word in words if "=" in word)
        if words[1] == "sweep" and "--rtt" in words and "delay" in keys:
            longest_ms = max(map(float, words[words.index("--rtt") + 1].split(",")))
            assert int(keys["delay"]) * float(keys.get("pace_s", 0)) * 1000 >= longest_ms, line
            found += 1
    assert found


@pytest.mark.real
@pytest.mark.parametrize("line", QUICK)
def test_a_quick_command_does_what_its_page_says(line, tmp_path, monkeypatch, capsys):
    clean(tmp_path, monkeypatch)

    def typed(*words):
        assert main(list(words)) == 0, capsys.readouterr().err
        capsys.readouterr()

    lay(tmp_path, line, typed)
    words = [word.replace("/data/", f"{tmp_path}/") for word in shlex.split(line)[1:]]
    try:
        status = main(words)
    except SystemExit as ended:  # --help
        status = ended.code
    found = capsys.readouterr()
    if line in REFUSED:
        assert (status, found.err.strip()) == (2, REFUSED[line])
        return
    assert status in STATUS.get(line, (0,)), found.err
    assert re.search(QUICK[line], found.out, re.MULTILINE | re.IGNORECASE), found.out


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("line", NIGHTLY)
def test_a_long_command_does_what_its_page_says(line, tmp_path, monkeypatch, capsys):
    if "ping" in line and shutil.which("ping") is None:
        pytest.skip("ping is not installed")
    for word, package in NEEDS.items():
        if word in line and find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {package}")
    clean(tmp_path, monkeypatch)

    def typed(*words):
        subprocess.run([*EDGETRAIN, *words], env=environment(), check=True, capture_output=True)

    lay(tmp_path, line, typed)
    began = time.monotonic()
    with ExitStack() as stack:
        command = stack.enter_context(running(*shlex.split(line)[1:], cwd=tmp_path))
        beside = []
        if line in BESIDE:
            address = command.until("members join").split()[-1]
            for each in BESIDE[line]:
                words = shlex.split(each.replace("tcp://localhost:5555", address))
                program = EDGETRAIN if words[0] == "edgetrain" else (sys.executable, words[1])
                rest = words[1:] if words[0] == "edgetrain" else [*words[2:], address]
                beside.append(stack.enter_context(running(*rest, cwd=tmp_path, program=program)))
        assert [each.finish(LONGEST_S) for each in beside] == [0] * len(beside)
        status = command.finish(LONGEST_S)
        assert command.left_behind() == []
    with capsys.disabled():
        print(f"{time.monotonic() - began:8.1f} s  {line}", flush=True)
    assert status == 0, command.said
    assert re.search(NIGHTLY[line], command.said, re.MULTILINE | re.IGNORECASE), command.said
    if Path("runs").exists():
        for folder in folders_in("runs"):
            found = [read_summary(run) for run in runs_in(folder)]
            assert {each["status"] for each in found if each} == {"finished"}
    shutil.rmtree("runs", ignore_errors=True)
