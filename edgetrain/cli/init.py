"""`edgetrain init`: write a job file to start from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import keys, load


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "init",
        "write a job file with every key explained",
        "Write a job file: every key with its default and what it means. Works offline.",
        "example:\n  edgetrain init job.toml members=8 network=wan-200ms && edgetrain run job.toml",
    )
    parser.add_argument("path", type=Path, metavar="FILE", help="the file to write")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values to write")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file."""
    job = load(None, arguments.overrides)
    if arguments.path.exists() and not arguments.force:
        raise ConfigError(f"{arguments.path} exists already", "--force overwrites it")
    try:
        arguments.path.write_text(commented(job), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {arguments.path}: {error.strerror}") from None
    common.say(f"wrote {arguments.path}; next: edgetrain run {arguments.path}")
    return 0


def commented(job: Job) -> str:
    """A job as TOML, with an explanation after each key."""
    from edgetrain.runs.toml import to_toml

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
    "# What goes wrong with the links, and when: a table for each. docs/networks.md",
    "# [[faults]]",
    '# kind = "down"      # down, partition, or rate with share = 0.1',
    "# at_s = 10          # seconds since training began",
    "# for_s = 5",
    "# members = [0]      # left out: all",
)
