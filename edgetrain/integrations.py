"""Trainers of other libraries, whose loops call a fleet through what they let users hook in.

None of these libraries is imported: a trainer asks its callbacks for methods by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgetrain.training.member.joining import JoinedMember


class TrainerCallback:
    """A callback of Hugging Face's `Trainer`: it joins when training begins, and closes at its end.

        trainer.add_callback(edgetrain.integrations.TrainerCallback("tcp://hub.local:5555"))

    `hub` and `options` are those of `edgetrain.join`; `member` is what it returned, once training
    has begun. The model and the optimizer are the trainer's. Where training raises, nobody closes:
    the fleet gives the member up. Raises what `join` and `close` do.
    """

    def __init__(self, hub: str | Sequence[str], **options: Any) -> None:
        self.member: JoinedMember | None = None
        self._hub, self._options = hub, options

    def on_train_begin(self, *about: Any, model: Any, optimizer: Any, **more: Any) -> None:
        """Join, with what the trainer has put on its device."""
        from edgetrain.training.member.joining import join

        self.member = join(self._hub, model, optimizer, **self._options)

    def on_train_end(self, *about: Any, **more: Any) -> None:
        """Close: the model then is the fleet's."""
        if self.member is not None:
            self.member.close()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """What else a trainer calls, by whatever release: nothing is done."""
        if not name.startswith("on_"):
            raise AttributeError(f"a TrainerCallback has no '{name}'")
        return lambda *about, **more: None
