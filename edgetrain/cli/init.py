"""`edgetrain init`: write a job file to start from."""

from __future__ import annotations

import argparse
import json
import keyword
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from edgetrain.cli import common
from edgetrain.errors import ConfigError, explain_os_errors
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import keys, load
from edgetrain.jobs.schema import schema

HELP = "write a job file with every key explained"
ABOUT = "Write a job file: every key with its default and what it means. Works offline."
EXAMPLES = """\
examples:
  edgetrain init job.toml members=8 network=wan-200ms && edgetrain run job.toml
  edgetrain init job.toml --task mine.py && edgetrain run job.toml
  edgetrain init job.schema.json --schema      for editors: jobs begin with #:schema job.schema.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="FILE", help="the file to write")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values to write")
    parser.add_argument(
        "--task", type=Path, metavar="FILE.py",
        help="write a task of your own to start from, too: data, model, loss, evaluation",
    )  # fmt: skip
    parser.add_argument(
        "--schema", action="store_true", help="write the JSON schema of jobs, for editors, instead"
    )
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def run(arguments: argparse.Namespace) -> int:
    task: Path | None = arguments.task
    overrides = list(arguments.overrides)
    if arguments.schema and (task or overrides):
        raise ConfigError("--schema goes with neither --task nor KEY=VALUE", "leave these out")
    if task is not None:
        # Raise ConfigError unless a job in this file can name a task in that one
        job = arguments.path
        if task.suffix != ".py" or not task.stem.isidentifier() or keyword.iskeyword(task.stem):
            raise ConfigError(f"--task {task}: no name of a Python module", "for example mine.py")
        if task.parent.resolve() != job.parent.resolve():
            raise ConfigError(
                f"--task {task} is not in the folder of {job}", "a job finds modules beside it"
            )
        if find_spec(task.stem) is not None:
            raise ConfigError(
                f"--task {task}: a module '{task.stem}' is installed, and would be found first",
                "choose another name",
            )
        overrides = [f"task={task.stem}:Task", *_SINE, *overrides]
    if arguments.schema:
        text = json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
    else:
        text = commented(load(None, overrides))
    files = {arguments.path: text}
    if task is not None:
        files[task] = resources.files("edgetrain.tasks").joinpath("starter.py").read_text("utf-8")
    for path in files:
        if path.exists() and not arguments.force:
            raise ConfigError(f"{path} exists already", "--force overwrites it")
    for path, text in files.items():
        with explain_os_errors(f"cannot write {path}"):
            path.write_text(text, encoding="utf-8")
    wrote = " and ".join(map(str, files))
    then = f"begin a job with #:schema {arguments.path}" if arguments.schema else ""
    common.say(f"wrote {wrote}; next: {then or f'edgetrain run {arguments.path}'}")
    return 0


_SINE = ("optimizer={ name = 'sgd', lr = 0.1 }", "name=mine", "data.partition=iid")
"""Keys with which the task that is written trains. It has a `partition`, which the delay depends
on."""


def commented(job: Job) -> str:
    """A job as TOML, with an explanation after each key."""
    from edgetrain.files.toml import to_toml

    lines: list[str] = []
    tables: dict[str, list[str]] = {}
    values = job.to_dict()
    for key, spec in keys().items():
        table, _, leaf = key.rpartition(".")
        value = values[table][leaf] if table else values[leaf]
        if key == "faults":
            continue
        if isinstance(value, dict):
            inner = ", ".join(to_toml({k: v}).strip() for k, v in value.items())
            text = f"{leaf} = {{ {inner} }}" if inner else f"{leaf} = {{}}"
        else:
            text = to_toml({leaf: value}).strip()
        doc = spec.metadata.get("doc", "")
        (tables.setdefault(table, []) if table else lines).append(f"{text:42} # {doc}")
    for table, inside in tables.items():
        lines += ["", f"[{table}]", *inside]
    lines += ["", *_FAULTS]
    if job.faults:
        lines += ["", to_toml({"faults": job.faults}).strip()]
    return "\n".join(lines) + "\n"


_FAULTS = (
    "# Faults of links, a table for each: docs/reference/networks.md",
    "# [[faults]]",
    '# kind = "down"      # down, partition, or rate with share = 0.1',
    "# at_s = 10          # seconds since training began",
    "# for_s = 5",
    "# members = [0]      # left out: all",
)
