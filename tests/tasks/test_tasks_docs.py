"""The code blocks of docs/how-to/tasks.md and docs/reference/devices.md run, and the task in them
is one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from edgetrain.fleet import devices
from edgetrain.tasks.load import load_task

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


PAGES = ("how-to/tasks.md", "reference/devices.md")
CODE = [(page, code) for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize(("page", "code"), CODE, ids=[f"{p}:{i}" for i, (p, _) in enumerate(CODE)])
def test_python_runs(page, code):
    exec(compile(code, page, "exec"), {})


def test_toml_is_valid_and_the_profile_in_it_is_a_device():
    tables = [tomllib.loads(text) for page in PAGES for text in blocks(page, "toml")]
    mine = next(table for table in tables if "dispatch_s" in table)
    assert devices.parse("mine", mine, DOCS / "devices").dispatch_s == 140e-6


def test_ones_own_task_trains(tmp_path, own_imports, monkeypatch):
    """The 30 lines are a task: loaded from beside a job, it reaches its target."""
    monkeypatch.syspath_prepend(tmp_path)
    own = next(code for _, code in CODE if "class Sine" in code)
    (tmp_path / "sine.py").write_text(own)
    task = load_task("sine:Sine", {"samples": 500}, defaults={"seed": 3})
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step, batch in enumerate(task.batches(0, 2, 32, seed=0)):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        if step == 300:
            break
    assert task.evaluate(model)["loss"] < task.target
    assert task.samples(0, 2) == 250
