"""What the documents tell people to type: every command parses, the quick ones run, links lead
somewhere."""

from __future__ import annotations

import re

import pytest
from command_line import edgetrain
from documented_commands import COMMANDS, PAGES, ROOT

from edgetrain.__main__ import main, parse_arguments
from edgetrain.jobs.reading import parse


def test_commands_are_found():
    assert {"README.md", "docs/jobs.md", "docs/networks.md", "examples/your_own_loop.py"} <= {
        command.page for command in COMMANDS
    }


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line}")
def test_every_command_can_be_typed(command):
    if command.words[-1] == "--help":
        return
    arguments = parse_arguments(command.words)
    overrides = [word for word in getattr(arguments, "job", []) if "=" in word]
    if not command.answer.startswith("edgetrain: "):
        parse({}, overrides)


REFUSED = [command for command in COMMANDS if command.answer.startswith("edgetrain: ")]
ANSWERED = [
    command
    for command in COMMANDS
    if command.words[0] in ("strategies", "codecs", "doctor", "init")
    or command.words[:2] in (["devices", "list"], ["networks", "list"], ["networks", "show"])
]


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command.line)
def test_a_refusal_is_shown_as_it_is(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "job.toml"]) == 0
    assert main(command.words) == 2
    assert capsys.readouterr().err.strip() == command.answer


@pytest.mark.parametrize("command", ANSWERED, ids=lambda command: command.line)
def test_the_quick_ones_answer(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command.words) == 0
    assert capsys.readouterr().out


def test_the_quick_start_trains(tmp_path):
    """The README's job file, with fewer steps and no network."""
    readme = [command for command in COMMANDS if command.page == "README.md"]
    init = next(command for command in readme if command.words[0] == "init")
    train = next(command for command in readme if command.words[0] == "run")
    assert edgetrain(*init.words, cwd=tmp_path).returncode == 0
    done = edgetrain(*train.words, "steps=6", "members=2", "network=none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run folder: " in done.stdout


def test_make_has_what_the_readme_says():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text())
    assert {"demo", "test", "check"} <= set(told) <= set(targets)


def test_the_added_lines_of_the_readme_are_the_examples():
    added = re.findall(r"^\+\s*(.*\S)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    example = (ROOT / "examples" / "your_own_loop.py").read_text()
    assert len(added) == 2
    for line in added:
        assert line.split("(")[0] + "(" in example


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text("utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), target
