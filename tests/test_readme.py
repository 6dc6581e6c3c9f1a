"""What the documents tell people to type: every command parses, the quick ones run, links lead
somewhere."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from command_line import edgetrain
from documented_commands import COMMANDS, PAGES, ROOT
from made_up_runs import DGA, FEDAVG, SYNC, write_comparison
from packaging.requirements import Requirement

from edgetrain import __version__, strategies
from edgetrain.__main__ import main, parse_arguments
from edgetrain.jobs.reading import parse
from edgetrain.runs.folder import read_summary
from edgetrain.runs.reports.comparison import compare
from edgetrain.runs.reports.comparison_table import columns_of

README = (ROOT / "README.md").read_text("utf-8")


def test_torch_is_bounded_where_a_newer_one_was_tried_and_dies():
    """What workers for boards pin is taken there, and what dies on some of them is not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [Requirement(each) for each in project["dependencies"] if each.startswith("torch")]
    pinned = (ROOT / "devices/workers/requirements.in").read_text("utf-8").splitlines()[0]

    def takes(version: str, machine: str) -> bool:
        told = [
            each.specifier.contains(version)
            for each in wanted
            if each.marker is None or each.marker.evaluate({"platform_machine": machine})
        ]
        return told == [True]

    assert takes("2.6.0", "x86_64")
    assert takes("2.14.1", "x86_64")
    assert not takes("2.5.1", "x86_64")
    assert takes("2.6.0", "aarch64")
    assert takes(pinned.removeprefix("torch=="), "aarch64")
    assert not takes("2.10.0", "aarch64")


def test_the_line_for_a_hub_takes_all_that_is_needed_but_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (line,) = re.findall(r"pip install --no-deps \. && pip install ([a-z -]+?) +#", README)
    wanted = {Requirement(each).name for each in project["dependencies"]}
    assert {*line.split()} == wanted - {"torch"}


def test_commands_are_found():
    pages = {"README.md", "docs/reference/jobs.md", "examples/your_own_loop.py"}
    assert pages <= {command.page for command in COMMANDS}


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


@pytest.mark.real
@pytest.mark.parametrize("command", ANSWERED, ids=lambda command: command.line)
def test_the_quick_ones_answer(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command.words) == 0
    assert capsys.readouterr().out


@pytest.mark.real
def test_the_quick_start_trains(tmp_path):
    """The README's job file, with fewer steps and no network."""
    readme = [command for command in COMMANDS if command.page == "README.md"]
    train = next(command for command in readme if command.words[:2] == ["run", "job.toml"])
    before = readme[: readme.index(train)]
    init = next(command for command in reversed(before) if command.words[0] == "init")
    assert edgetrain(*init.words, cwd=tmp_path).returncode == 0
    done = edgetrain(*train.words, "steps=6", "members=2", "network=none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run folder: " in done.stdout


def test_make_has_what_the_readme_says():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"\bmake ([a-z-]+)", README)
    assert {"demo", "test", "check"} <= set(named) <= set(targets)


def test_the_added_lines_of_the_readme_are_the_examples():
    added = re.findall(r"^\+\s*(.*\S)$", README, re.MULTILINE)
    example = (ROOT / "examples" / "your_own_loop.py").read_text()
    assert len(added) == 2
    for line in added:
        assert line.split("(")[0] + "(" in example


def rows_below(page: str, heading: str) -> list[list[str]]:
    """Cells of the table in a section of a page of docs, without its head."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def test_every_strategy_and_every_codec_has_a_row(capsys):
    rows = rows_below("reference/strategies.md", "All strategies")
    named = [spelled for row in rows for spelled in re.findall("`(.*?)`", row[0])]
    table = strategies.TABLE.values()
    corrected = {f"{row.name}({word})" for row in table for word in row.corrections[1:]}
    assert set(named) - corrected == {row.spelling for row in table}
    assert main(["codecs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["codecs"]
    ratios = {row["example"]: f"{row['ratio']:.1f}" for row in listed}
    shown = {}
    for names, figures, _ in rows_below("reference/codecs.md", "Ratios"):
        spelled, each = re.findall(r"`(.*?)`", names), re.findall(r"[\d.]+", figures)
        shown |= dict(zip(spelled, each if each[1:] else each * len(spelled), strict=True))
    assert shown | {"topk(0.01) | q2": "307.0"} == ratios
    codecs = (ROOT / "docs/reference/codecs.md").read_text("utf-8")
    assert "`topk(0.01) | q2` has a ratio of 307.0" in codecs


def test_every_column_of_the_closing_table_is_explained(tmp_path):
    runs = [read_summary(folder) for folder in write_comparison(tmp_path, SYNC, FEDAVG, DGA)]
    table = columns_of(compare([{**run, "codec": "int8"} for run in runs]))
    assert len(table) == 12
    cells = [row[0] for row in rows_below("how-to/looking.md", "The closing table")]
    explained = {name for cell in cells for name in (cell, *cell.split(", "))}
    headings = {f"{each.heading} {each.heading_below}".strip() for each in table}
    assert headings <= explained


def test_the_hooks_are_the_linters_of_make_check():
    check = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    linters = re.findall(r"\$\(BIN\)/(?!pytest)(.*)", check)
    hooks = re.findall(r"entry: \.venv/bin/(.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == linters


def test_the_citation_is_of_this_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


KINDS = ("start", "how-to", "reference", "explanation")
GUIDES = [path for kind in KINDS for path in sorted((ROOT / "docs" / kind).glob("*.md"))]


def leaves(menu):
    """The pages of the site's menu."""
    if isinstance(menu, str):
        return [menu]
    entries = menu.values() if isinstance(menu, dict) else menu
    return [page for entry in entries for page in leaves(entry)]


def test_every_page_is_in_the_sites_menu_once():
    menu = leaves(tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"])
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in GUIDES]
    assert sorted(menu) == sorted(["index.md", *pages])
    assert not [*(ROOT / "docs").glob("*.md")], "a page belongs into one of the kinds"


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_page_says_for_whom_it_is_and_after_which_page(path):
    first = path.read_text("utf-8").split("\n\n")[1]
    assert first.startswith("For ")
    assert re.search(r"after \[|from any page|no other page first", " ".join(first.split()))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text("utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), target
