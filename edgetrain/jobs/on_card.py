"""Whether a card has what its job's task needs: the task is made once, as the device will make it.

In a process of its own, because what is loaded here says nothing about a device: that process finds
Python's standard library and the modules of the worker archive, no other package; the job file, the
bundle and the data lie as on the device; caches and keys are empty. Modules are this machine's own
copies: those that a worker has and this machine has not are reported, not refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError

_BEGIN = """\
import sys
sys.path[:0] = [sys.argv[1]]
from edgetrain.jobs.on_card import main
main()
"""
SECONDS = 600.0
"""Time that a task may take to be made."""


@dataclass(frozen=True)
class Card:
    job: bytes
    modules: Collection[str]
    """Names of the modules in its worker archive."""
    data: Path | None = None
    """The folder that becomes the device's data folder."""
    bundle: tuple[str, bytes, str] | None = field(default=None, repr=False)
    """The name, content and digest of the job's own code."""


def check(card: Card, owner: tuple[int, int] | None = None) -> str:
    """Make the job's task with nothing but what the card has. Returns "", or why that cannot be
    tried on this machine.

    owner: the user and group who run the job's code; None: this process's own. Raises ConfigError
    if the device could not make its task.
    """
    with tempfile.TemporaryDirectory(prefix="edgetrain-card-") as name:
        scratch = Path(name)
        lacking = _lay_out(card, scratch)
        if owner is not None:
            for path in (scratch, *scratch.rglob("*")):
                os.chown(path, *owner, follow_symlinks=False)
        user, group = owner or (None, None)
        words = [sys.executable, "-I", "-S", "-c", _BEGIN, str(scratch / "site"), str(scratch)]
        env = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(scratch / "home"),
            "XDG_CACHE_HOME": str(scratch / "cache"),
            "XDG_CONFIG_HOME": str(scratch / "config"),
        }
        try:
            done = subprocess.run(
                words, cwd=scratch / "etc", env=env, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=SECONDS, check=False, user=user, group=group,
                extra_groups=None if owner is None else [],
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"its task was not made within {SECONDS:g} s here"
        found = _answer(done.stdout, done.stderr)
        if found.get("ok"):
            return ""
        message = str(found["error"]).replace(str(scratch / "etc"), "/etc/edgetrain/current")
        if found.get("module") in lacking:
            return f"the worker has {found['module']}, and this machine has not"
        raise ConfigError(f"no card has what the job's task needs: {message}", _way_out(found))


def _lay_out(card: Card, scratch: Path) -> set[str]:
    """Put files and modules in their places; returns the modules that this machine has not."""
    for folder in ("etc", "site", "config"):
        (scratch / folder).mkdir()
    (scratch / "etc/job.toml").write_bytes(card.job)
    if card.data is not None:
        (scratch / "etc/data").symlink_to(card.data.resolve())
    if card.bundle is not None:
        name, content, _ = card.bundle
        (scratch / "etc" / name).write_bytes(content)
    lacking = set()
    for name in card.modules:
        place = _place_of(name)
        if place is None:
            lacking.add(name)
        else:
            (scratch / "site" / place.name).symlink_to(place)
    digest = card.bundle[2] if card.bundle else ""
    table = {"data": card.data is not None, "bundle": digest}
    (scratch / "card.json").write_text(json.dumps(table))
    return lacking


def _place_of(name: str) -> Path | None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    if found.submodule_search_locations:
        return Path(next(iter(found.submodule_search_locations)))
    return Path(found.origin) if found.origin else None


def _answer(said: str, errors: str) -> dict[str, Any]:
    for line in reversed(said.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    last = errors.strip().splitlines()[-1:] or ["it ended without a word"]
    return {"error": last[0]}


def _way_out(found: dict[str, Any]) -> str:
    if module := found.get("module"):
        return (
            f"pack your own code with `edgetrain bundle make {module}.py -o my.bundle`, then job: "
            f'task = "my.bundle#{module}:…", cluster: job.bundle = "my.bundle"'
        )
    return (
        'job.data = "FOLDER" in the cluster file is copied to every card, as the folder data '
        "beside the job"
    )


# -- in the other process -------------------------------------------------------------------------


def main() -> None:
    """Make the task, its model and a batch; prints how that ended as one line of JSON."""
    from edgetrain.jobs.bundles import Allowed
    from edgetrain.jobs.lookup import task_of
    from edgetrain.jobs.plan import check
    from edgetrain.jobs.reading import load
    from edgetrain.tasks import batches_from

    scratch = Path(sys.argv[2])
    place, keys = scratch / "etc", scratch / "config"
    table = json.loads((scratch / "card.json").read_text())
    overrides = [f"data.folder={place / 'data'}"] if table["data"] else []
    try:
        if table["bundle"]:
            Allowed(keys).allow(table["bundle"])
        job = load(place / "job.toml", overrides)
        check(job)
        if not job.data.get("download") or table["data"]:
            task = task_of(job, place, keys)
            task.model()
            next(batches_from(task, 0, job.fleet.members, job.train.batch, job.seed))
        found: dict[str, Any] = {"ok": True}
    except EdgetrainError as error:
        found = {"error": error.message, "module": _missing_module(error)}
    except Exception as error:  # whatever a task's own code raises
        said = f"{type(error).__name__}: {error}"
        found = {"error": said, "module": _missing_module(error)}
    print(json.dumps(found), flush=True)


def _missing_module(error: BaseException | None) -> str:
    """The module without which it ended, without its submodules; "" for another reason."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return ""
