"""Random numbers of a group: streams that follow from the job's seed, the step and the place.

A forward pass draws from a stream of its stage and micro-batch, which ranks with other samples or
positions do not share. Ranks of one tensor group do: what they all hold is dropped alike, and so
are equal places of the parts that each has of a divided layer (torch's own trackers draw for the
whole tensor and keep a part, on GPUs only). The loss has a stream of its own, the same one on the
first stage, which draws what enters the model, and on the last.

No state is kept between steps, so a run that goes on draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from edgetrain.tasks.draws import seed_generators
from edgetrain.training.servers.mesh import Ranks

_STREAM = 0x524E47
"""Keeps these draws apart from others of the same seed."""
_LOSS, _ELSEWHERE, _STAGES = 0, 1, 2
"""Kinds of streams; stages count from the last."""


class Streams:
    """The streams of one rank of a group, which may be one `member` of several."""

    def __init__(self, seed: int, ranks: Ranks, member: int = 0) -> None:
        self._of_rank = (seed, _STREAM, ranks.data_rank + (member << 32), ranks.slice)
        self._devices = [] if ranks.device.type == "cpu" else [ranks.device]
        self._step = self._micro = self._calls = 0

    def begin(self, step: int) -> None:
        """Draw for the step with this number, from 0."""
        self._step = step
        self._begin(_ELSEWHERE)  # in a backward pass, for example

    @contextmanager
    def drawing_loss(self, micro: int) -> Iterator[None]:
        """Within it the loss of a micro-batch draws."""
        self._micro, self._calls = micro, 0
        with self._drawing(_LOSS, micro):
            yield

    def apply_to_model(self, module: nn.Module) -> None:
        """Let a whole model draw from its own stream within each of its calls by a loss."""
        forward = module.forward

        def drawn(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            with self._drawing(_STAGES, self._micro, self._calls):
                return forward(*args, **kwargs)

        module.forward = drawn

    def apply_to_stage(self, stage: Any) -> None:
        """Let a stage of a pipeline draw from its own stream, for each micro-batch."""
        forward = stage.forward_one_chunk

        def drawn(micro: int, *args: Any, **kwargs: Any) -> Any:
            with self._drawing(_STAGES + stage.stage_index, micro, 1):
                return forward(micro, *args, **kwargs)

        stage.forward_one_chunk = drawn

    @contextmanager
    def _drawing(self, *place: int) -> Iterator[None]:
        with torch.random.fork_rng(self._devices):
            self._begin(*place)
            yield

    def _begin(self, *place: int) -> None:
        words = np.random.SeedSequence([*self._of_rank, self._step, *place])
        seed_generators(int(words.generate_state(1, np.uint64)[0]))
