"""Nobody waits for the first replies: the delay that joining has measured holds from the start."""

from __future__ import annotations

import pytest

from edgetrain.exchange.delay import SHARE, Delay
from edgetrain.exchange.hub.delay import AgreedDelay
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training.simulated import simulation

FLEET = ["members=2", "batch=8", "pace_s=0.05", "device=raspberry-pi-4b", "delay=auto",
         "final_sync=0"]  # fmt: skip


@pytest.mark.parametrize("codec", ["topk(0.01) | q2", "auto"])
def test_a_run_at_a_round_trip_of_a_second_waits_for_its_start_and_its_end_only(tmp_path, codec):
    """It waited for the first reply from step 10 on: 0.75 s of a run of 14 s."""
    folder = create(tmp_path, "run")
    job = reading.load(None, [*FLEET, "network=rtt-1000ms", "steps=280", f"codec={codec}"])
    summary = simulation.run(plan(job), folder, batched=True)
    begun, waits = set(), []
    for line in read_metrics(folder, "step"):
        waits += [line["wait_s"]] if line["member"] in begun else []
        begun.add(line["member"])
    assert max(waits) < 0.01
    assert 280 * 0.05 / summary["seconds"] > 0.88
    assert max(r["local_steps"] + r["delay"] for r in read_metrics(folder, "round")) <= 280 // SHARE


@pytest.mark.parametrize(
    ("local_steps", "delay", "steps", "first"),
    [(5, None, 280, 30), (5, None, 0, 5), (5, 12, 280, 12)],
)
def test_the_first_delay_is_at_most_what_the_run_can_bear(local_steps, delay, steps, first):
    agreed = AgreedDelay(local_steps, Delay(delay or 0, delay is None), steps)
    assert agreed.first == first
    assert agreed.slack >= first // local_steps, "a member that goes on is not too far ahead"
    agreed.agree(0, [], 0.0)
    assert agreed.first == agreed.delay
