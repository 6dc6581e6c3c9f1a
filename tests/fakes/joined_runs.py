"""Emulated fleets with a group in them, one of whose ranks is killed."""

from __future__ import annotations

import re

from command_line import TINY

from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics
from edgetrain.training import emulated

# A task that kills a rank of the group, once. The others wait before their last steps until the
# group is back: however long it takes to start, there are steps left for it.
DEADLY = (
    TINY
    + """

import os, signal, time
from pathlib import Path

import torch.distributed as dist


class Deadly(Tiny):
    def __init__(self, mark, killed=1, pause=0.01, width=4, seed=0):
        super().__init__(width, seed)
        self.mark, self.killed, self.pause = mark, killed, pause

    def batches_from(self, member, members, batch, seed, start):
        is_back = Path(f"{self.mark}{self.killed}").exists()
        for step, each in enumerate(self.batches(member, members, batch, seed)):
            if step < start:
                continue
            time.sleep(self.pause)
            rank = dist.get_rank() if dist.is_initialized() else -1
            mark, back = Path(f"{self.mark}{rank}"), Path(f"{self.mark}-back")
            if rank < 0 and step == 60:
                while not back.exists():
                    time.sleep(self.pause)
            elif rank >= 0 and is_back:
                back.touch()
            if rank == self.killed and step >= 20 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield each
"""
)


def run(folder, *words):
    """Run a fleet of two members and a group; its run folder. The rank `data.killed` dies in the
    middle, and leaves a file `mark` with its number in `folder`."""
    (folder / "deadly.py").write_text(DEADLY)
    out = folder / "run"
    out.mkdir()
    job = load(None, ["task=deadly:Deadly", f"data.mark={folder / 'mark'}",
                      "fleet.device=host:2, servers", "network=none", "servers.placement=data=2",
                      "servers.check=off", "servers.snapshot_every=10", "hub.lost_after_s=0.5",
                      "hub.heartbeat_s=0.1", "strategy=dga", "local_steps=2", "delay=2",
                      "optimizer=adamw", *words])  # fmt: skip
    summary = emulated.run(plan(job, folder), out)
    assert summary["status"] == "finished", [*read_metrics(out, "event")][-8:]
    return out


def bases(events) -> set[str]:
    """The bases that the three members finished with."""
    ended = [each for each in events if each["event"] == "finished" and each["member"] != "hub"]
    assert len(ended) == 3
    found = [re.search(r"base (\w+)", each["reason"]) for each in ended]
    return {each[1] if each else "" for each in found}
