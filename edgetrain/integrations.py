"""Callbacks for trainers of other libraries, to train in a fleet.

None of these libraries is imported: a trainer calls its callbacks' methods by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgetrain.training.member.joining import JoinedMember


class TrainerCallback:
    """A callback of Hugging Face's `Trainer`: it joins when training begins, and closes at its end.

        trainer.add_callback(edgetrain.integrations.TrainerCallback("tcp://hub.local:5555"))

    `hub` and `options`: as for `edgetrain.join`. `member`: its result, once training has begun. The
    model and the optimizer are the trainer's. If training raises, the member is not closed, and the
    fleet drops it. Raises the errors of `join` and `close`.
    """

    def __init__(self, hub: str | Sequence[str], **options: Any) -> None:
        self.member: JoinedMember | None = None
        self._hub, self._options = hub, options

    def on_train_begin(self, *about: Any, model: Any, optimizer: Any, **more: Any) -> None:
        """Join, with the model on the trainer's device."""
        from edgetrain.training.member.joining import join

        self.member = join(self._hub, model, optimizer, **self._options)

    def on_train_end(self, *about: Any, **more: Any) -> None:
        """Close: the model then is the fleet's."""
        if self.member is not None:
            self.member.close()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Every other callback of a trainer: does nothing."""
        if not name.startswith("on_"):
            raise AttributeError(f"a TrainerCallback has no '{name}'")
        return lambda *about, **more: None
