"""Leads a group that steps in: `python -m edgetrain.training.servers.stepping_in`.

It is started by a job's hub on its own machine, reads a line of JSON (`fallback.Told`), and leads
the group until the job is over or SIGTERM comes: then it finishes its step and leaves. Asked for
the group's rate, it prints that instead. Its input ends with the hub, and this process with its
input.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

from edgetrain.errors import EdgetrainError, Stopped
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials, keys_folder
from edgetrain.fleet.devices import SERVERS
from edgetrain.jobs.placement.beside import placed, standing_in
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import metrics_path
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.training.fallback import Told
from edgetrain.training.member.train import Place
from edgetrain.training.servers.leading import train_joined
from edgetrain.training.stopping import Stop


def lead(told: Told, stop: Stop) -> None:
    """Lead the group to the end of the job. Raises what `train_joined` raises."""

    def open_log(name: str, at: float) -> MetricsLog:
        return MetricsLog(metrics_path(told.folder), name, time.monotonic, told.began)

    credentials = None
    if told.is_encrypted:
        pair = Keyring(keys_folder(told.keys)).pair()
        credentials = Credentials(pair, pair.public)
    place = Place(
        told.job.fleet.members, SERVERS, told.beside, told.keys, missing=told.missing
    )  # fmt: skip
    train_joined(
        resolve(told.job), place, told.hub, open_log, told.own / "snapshots",
        credentials=credentials, stop=stop, keeps_model=True,
    )  # fmt: skip


def print_rate(told: Told) -> None:
    """Print the steps a second that the group would take. ConfigError where it fits nowhere."""
    print(1.0 / placed(standing_in(told.job, told.missing), told.beside).seconds)


def _end_with_the_hub() -> None:
    while os.read(0, 1 << 12):
        pass
    os._exit(1)


def main() -> int:
    logging.basicConfig(format="%(message)s")
    told = Told.of_json(sys.stdin.readline())
    threading.Thread(target=_end_with_the_hub, daemon=True).start()
    try:
        with Stop().installed() as stop:
            print_rate(told) if told.asks else lead(told, stop)
    except Stopped:
        return 0
    except EdgetrainError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
