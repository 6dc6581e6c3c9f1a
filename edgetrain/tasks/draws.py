"""Random numbers that tasks draw from the generators of the process: torch's, NumPy's, Python's.

Models begin alike on all members: they are drawn from the job's seed. Afterwards members draw
numbers of their own. Those of a step follow from the job's seed, the member and the step's number:
nothing is kept between steps, and a member that comes back draws what it would have drawn.
A generator that a task makes for itself is left alone.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from edgetrain.errors import TaskError
from edgetrain.tasks.protocol import Task, modes_kept

if TYPE_CHECKING:
    from edgetrain.vectors.noise import Source

DRAWING = threading.RLock()
"""Held while the generators are in use, where several threads use them."""


def seeded(*words: int | str) -> Source:
    """A stream of bytes derived from `words` (SHAKE-256), for tests and simulations."""
    key = hashlib.sha256(repr(words).encode()).digest()
    turn = 0

    def more(count: int) -> bytes:
        nonlocal turn
        turn += 1
        return hashlib.shake_256(key + turn.to_bytes(8, "little")).digest(count)

    return more


def seed_generators(seed: int) -> None:
    """Seed the generators of the process, torch's on all devices in use. (`torch.manual_seed` also
    notes it for devices that come into use later, which takes milliseconds.)"""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def seed_step(*words: int) -> None:
    """Seed the generators by the job's seed, the member and the step, or what else tells apart."""
    seed_generators(int.from_bytes(seeded("draws", *words)(8), "little"))


def model_of(task: Task, seed: int) -> nn.Module:
    """A fresh model as every member of a job with this seed begins with it."""
    seed_generators(seed)
    return task.model()


def drawn_by(call: Callable[[], object]) -> set[str]:
    """Which generators this call draws from: "torch", "NumPy", "Python". They are seeded for it."""
    found = list[dict[str, float]]()
    for each in (lambda: None, call):
        seed_generators(0)
        each()
        torchs = float(torch.rand(()))
        found.append({"torch": torchs, "NumPy": np.random.random(), "Python": random.random()})
    fresh, after = found
    return {name for name in fresh if fresh[name] != after[name]}


def generator_states() -> dict[str, Any]:
    """The states of the generators of the process, as plain values and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.array(keys).astype(np.int64)), *rest],
    }


def put_back_generators(states: Mapping[str, Any]) -> None:
    """Go on as `generator_states` found them; GPUs only where there are as many."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the generators of the process are as they were."""
    states = generator_states()
    try:
        yield
    finally:
        put_back_generators(states)


def figures_of(task: Task, model: nn.Module) -> dict[str, float]:
    """What the task finds out about a model, whose modes are as before afterwards, and so are the
    generators. What an evaluation draws is the same each time. TaskError unless these are numbers
    by name, with that of its metric."""
    said = ""
    with DRAWING, generators_kept(), modes_kept(model):
        seed_generators(0)
        found = task.evaluate(model)
    if not isinstance(found, Mapping):
        said = f"a {type(found).__name__}"
    elif task.metric not in found:
        said = f"{', '.join(map(repr, found)) or 'nothing'}, and not its metric '{task.metric}'"
    elif wrong := [name for name, each in found.items() if not _is_number(each)]:
        said = f"{wrong[0]!r} = {found[wrong[0]]!r}".splitlines()[0]
    if said:
        said = f"task '{task.name}': evaluate(model) returns {said}"
        raise TaskError(said, "numbers by name, as in {'loss': 0.5}")
    return found


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, str | bytes)
