"""What a member keeps beside its log when training is over. An error does not undo the training."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from edgetrain.errors import ConfigError
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.tasks import weights
from edgetrain.tasks.personal import save_personal


def keep_personal(model: nn.Module, log: MetricsLog, name: str) -> None:
    """Write the personal layers of the member `name`, if it has any."""
    try:
        save_personal(model, log.path.parent, name)
    except ConfigError as error:
        log.event("error", f"the personal layers are not kept: {error}")


def keep_model(model: nn.Module, log: MetricsLog, check: Callable[[], None] = lambda: None) -> None:
    """Write the fleet's model, after `check`, which may raise ConfigError."""
    try:
        check()
        weights.save(model, log.path.with_name(weights.FILE))
    except ConfigError as error:
        logging.getLogger("edgetrain").warning("the trained model is not kept: %s", error)
        log.event("error", f"the trained model is not kept: {error}")
