"""`edgetrain data show`: who holds what."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HELP = "show who holds what of a job's data"
ABOUT = "Show the samples of each member, and how many there are of each class."
EXAMPLES = """\
examples:
  edgetrain data show job.toml data.partition="dirichlet(0.3)"
  edgetrain data show job.toml members=100 --json
"""

_SHADES = " ░▒▓█"
MOST_ROWS, MOST_CLASSES = 40, 62
"""Members and classes that the picture has room for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    from edgetrain.cli.parser import add_verb

    show = add_verb(verbs, "show", run_show, HELP, EXAMPLES, ABOUT)
    common.add_job(show)
    common.add_json(show, "print the counts as JSON")


def run_show(arguments: argparse.Namespace) -> int:
    job, beside = common.job_of(arguments)
    from edgetrain.jobs.lookup import task_of
    from edgetrain.jobs.resolved import look_up, with_all_members
    from edgetrain.tasks.partition import Shards

    job = look_up(with_all_members(job)).job
    task: Any = task_of(job, beside)
    members = job.fleet.members
    sizes = [task.samples(member, members) for member in range(members)]
    shards = getattr(task, "shards", None)
    counts = shards.counts(members) if isinstance(shards, Shards) else None
    told = {"samples": sizes, "classes": None if counts is None else counts.tolist()}
    return common.answer(arguments, told, "\n".join(_lines(sizes, counts)))


def _lines(sizes: list[int], counts: NDArray[np.int64] | None) -> list[str]:
    lines = [f"{len(sizes)} members, {sum(sizes):,} samples, {min(sizes):,} to {max(sizes):,} each"]
    if counts is not None and counts.shape[1] <= MOST_CLASSES:
        lines.append(
            f"{'member':>7} {'samples':>9}  a column for each class, darker for more of it"
        )
    for member, size in enumerate(sizes[:MOST_ROWS]):
        if counts is None or counts.shape[1] > MOST_CLASSES:
            picture = "█" * round(40 * size / max(sizes))
        else:
            most = max(1, counts[member].max())
            picture = "".join(_shade(count / most) for count in counts[member])
        lines.append(f"{member:7} {size:9,}  {picture}")
    if len(sizes) > MOST_ROWS:
        lines.append(f"    and {len(sizes) - MOST_ROWS} more (--json has them)")
    return lines


def _shade(share: float) -> str:
    """Of a class, beside the member's most common one. What is there at all is seen."""
    return _SHADES[0] * 2 if not share else _SHADES[max(1, round(share * 4))] * 2
