"""The run folder of a loop of one's own: a line a step, a line an exchange, a summary at the end.

A loop's loss and figures are its own business: lines have none.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.exchange.member.telemetry import Sums
from edgetrain.exchange.transport import Traffic
from edgetrain.runs import folder as run_folders
from edgetrain.runs.environment import Meter, utc
from edgetrain.runs.metrics.log import MetricsLog


class Recording:
    """Writes one member's run folder. Times count from `began`, a reading of `time.monotonic`.

    A disk that is full by the end does not undo the training: that is a warning.
    """

    def __init__(
        self, runs: Path | str, job: str, name: str, began: float, traffic: Traffic
    ) -> None:
        """Makes the folder in `runs`; bytes count from `traffic`. ConfigError if that cannot be."""
        self.folder = run_folders.create(runs, f"{job or 'loop'}-{name}")
        run_folders.write_environment(self.folder)
        self.known: dict[str, object] = {"began": utc(time.monotonic() - began)}
        """Further keys of the summary."""
        path = run_folders.metrics_path(self.folder)
        self._log = MetricsLog(path, name, time.monotonic, began)
        self.add_exchange = self._log.add_exchange
        self._meter = Meter()
        self._before: Sums | None = None
        self._traffic = traffic
        self._began = began
        self._closed = False

    def add_step(self, sums: Sums, traffic: Traffic) -> None:
        before = self._before or Sums(sums.step - 1, 0, self._began, 0.0, 0.0)
        first, self._before = self._traffic, sums
        wait_s, overhead_s = sums.wait_s - before.wait_s, sums.overhead_s - before.overhead_s
        eval_s = sums.eval_s - before.eval_s
        self._log.step(
            step=sums.step,
            round=sums.round,
            loss=float("nan"),
            wait_s=wait_s,
            compute_s=max(0.0, sums.at - before.at - wait_s - overhead_s - eval_s),
            overhead_s=overhead_s,
            sent_bytes=traffic.sent_bytes - first.sent_bytes,
            received_bytes=traffic.received_bytes - first.received_bytes,
            cpu_s=self._meter.cpu_s,
            peak_bytes=self._meter.peak_bytes,
            steps=max(1, sums.step - before.step),
            eval_s=eval_s,
        )

    def close(self, reason: str, *, done: bool) -> None:
        """Write the end and the summary. Works twice."""
        if self._closed:
            return
        self._closed = True
        self._log.event("finished" if done else "left", reason)
        self._log.close()
        from edgetrain.runs.summary import summarise  # training is over

        try:
            run_folders.write_summary(self.folder, summarise(self.folder, self.known))
        except ConfigError as error:
            logging.getLogger("edgetrain").warning("the run has no summary: %s", error)
