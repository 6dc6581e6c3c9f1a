"""An interrupt in a notebook's kernel, at ten drawn moments: a simulation ends within two seconds,
and its folder loads (`make test-notebook`, in an environment of its own)."""

from __future__ import annotations

import ast
import os
import queue
import random
import time

import pytest
from command_line import environment
from patience import patience

pytestmark = [pytest.mark.notebook, pytest.mark.filterwarnings("ignore")]  # theirs, not ours

MOMENTS, ENDS_S = 10, 2.0
BEGIN = """
import edgetrain
from pathlib import Path
def run(steps):
    edgetrain.simulate(
        task="edgetrain.tasks:digits", members=8, steps=steps, strategy="dga", network="wan-200ms",
        pace_s=0.05, runs="runs",
    )
run(4)
"""
LOOK = """
newest = max(Path("runs").iterdir())
print(repr((newest.name, edgetrain.load(newest).summary["status"])))
"""


@pytest.fixture
def kernel(tmp_path):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(
        startup_timeout=patience(60), cwd=str(tmp_path), env=environment()
    )
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def finished(client, asked):
    """The kernel's answer to a cell."""
    while True:
        answer = client.get_shell_msg(timeout=patience(60))
        if answer["parent_header"].get("msg_id") == asked:
            return answer["content"]


def printed(client, code):
    """What a cell prints."""
    said = []
    answer = client.execute_interactive(
        code, timeout=patience(60), output_hook=lambda m: said.append(m["content"].get("text", ""))
    )
    assert answer["content"]["status"] == "ok", answer["content"]
    return "".join(said)


def test_an_interrupt_ends_a_cell_within_two_seconds_and_its_folder_loads(kernel, capsys):
    manager, client = kernel
    printed(client, BEGIN)
    draw, seen = random.Random(int(os.environ.get("SEED", "50"))), set[str]()
    for _ in range(MOMENTS):
        moment = draw.uniform(0.5, 6)
        asked = client.execute("run(100_000)")
        time.sleep(moment)
        with pytest.raises(queue.Empty):
            client.get_shell_msg(timeout=0)  # it still runs
        began = time.monotonic()
        manager.interrupt_kernel()
        answer = finished(client, asked)
        took = time.monotonic() - began
        name, status = ast.literal_eval(printed(client, LOOK).splitlines()[-1])
        with capsys.disabled():
            print(
                f"\n{moment:.2f} s: ended after {took:.2f} s, load {os.getloadavg()[0]:.1f}", end=""
            )
        assert answer["status"] == "error", answer
        assert (answer["ename"], status) == ("KeyboardInterrupt", "interrupted")
        assert took < patience(ENDS_S)
        assert name not in seen, "each has a folder of its own"
        seen.add(name)
