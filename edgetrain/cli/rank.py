"""`edgetrain rank`: one rank of a group, as torchrun starts it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from edgetrain.cli import common

HELP = "one rank of a group on GPU servers, started by torchrun"
ABOUT = "Train as one rank of a group: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which."
EXAMPLES = """\
example:
  torchrun --nnodes=1 --node-rank=0 --nproc-per-node=2 --master-addr=127.0.0.1 \\
    --master-port=29400 --max-restarts=0 -m edgetrain rank job.toml --placement data=2 \\
    --run-folder runs/mine

`edgetrain run --print-commands` prints these commands for the servers of a job. The run folder is
one that all ranks see, or the same path on each server: the leader, rank 0, writes the model and
the snapshots there. Started again with the same folder it goes on from the last snapshot.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    parser.add_argument("--placement", metavar="WORDS", required=True, help="as `edgetrain plan`")
    parser.add_argument("--run-folder", type=Path, metavar="FOLDER", required=True,
                        help="the run's folder")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    job, beside = common.job_of(arguments)
    from edgetrain.errors import ConfigError
    from edgetrain.jobs.placement.words import parse
    from edgetrain.training.servers.process import train_as_rank

    missing = [
        k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ
    ]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not in the environment", "torchrun sets them")
    ranks, count = parse(arguments.placement).ranks, int(os.environ["WORLD_SIZE"])
    if ranks != count:
        raise ConfigError(
            f"placement: {arguments.placement} is {ranks} ranks, torchrun runs {count}"
        )
    arguments.run_folder.mkdir(parents=True, exist_ok=True)
    train_as_rank(job, beside, arguments.run_folder, arguments.placement)
    return 0
