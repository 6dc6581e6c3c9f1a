"""edgetrain: train one PyTorch model on many small machines over slow links.

    member = edgetrain.join("tcp://hub.local:5555", model, optimizer)
    ...                 # a training loop: optimizer.step() exchanges
    member.close()

    run = edgetrain.simulate(members=40, network="4g-good", steps=60)   # see `edgetrain.api`

Names are loaded on first use: importing this package loads neither torch nor zmq.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "EdgetrainError", "Keep", "Member", "Privacy", "Run", "Runs", "Sparing", "__version__",
    "compare", "export", "join", "load", "run", "simulate", "sweep", "task",
]  # fmt: skip

_HOMES = {
    "EdgetrainError": "edgetrain.errors",
    "Keep": "edgetrain.exchange.member.checkpoint",
    "Member": "edgetrain.training.member.member",
    "Privacy": "edgetrain.jobs.job",
    "Run": "edgetrain.runs.loaded",
    "Runs": "edgetrain.runs.loaded",
    "Sparing": "edgetrain.exchange.member.checkpoint",
    "compare": "edgetrain.api",
    "export": "edgetrain.training.export",
    "join": "edgetrain.training.member.joining",
    "load": "edgetrain.runs.loaded",
    "run": "edgetrain.api",
    "simulate": "edgetrain.api",
    "sweep": "edgetrain.api",
    "task": "edgetrain.tasks.datasets",
}

if TYPE_CHECKING:
    from edgetrain.api import compare, run, simulate, sweep
    from edgetrain.errors import EdgetrainError
    from edgetrain.exchange.member.checkpoint import Keep, Sparing
    from edgetrain.jobs.job import Privacy
    from edgetrain.runs.loaded import Run, Runs, load
    from edgetrain.tasks.datasets import task
    from edgetrain.training.export import export
    from edgetrain.training.member.joining import join
    from edgetrain.training.member.member import Member


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "integrations":
        return import_module("edgetrain.integrations")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'edgetrain' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "integrations"]
