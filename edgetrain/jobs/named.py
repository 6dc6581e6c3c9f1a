"""What a job names, looked up without torch and data: a misspelt name costs no second.

`plan.plan` adds what only the task knows.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.fleet import devices, networks
from edgetrain.fleet.assignment import devices_of, networks_of, parse_sites, spread
from edgetrain.fleet.devices import Device
from edgetrain.fleet.networks import Fault, Profile, Site
from edgetrain.fleet.presence import Presence, parse_absences
from edgetrain.jobs import bundles
from edgetrain.jobs.job import Job
from edgetrain.jobs.resolved import Resolved, look_up
from edgetrain.jobs.rules import refuse_absences, resolve
from edgetrain.tasks import spelling


@dataclass(frozen=True, kw_only=True)
class Named(Resolved):
    """A job, and every object that it names but its task and its optimizer."""

    devices: tuple[str, ...]
    """The device profile of each member."""
    device_profiles: dict[str, Device]
    """Those profiles, by name."""
    networks: tuple[str, ...]
    """The network profile of each member."""
    network_profiles: dict[str, Profile]
    """Those profiles, by name."""
    sites: tuple[Site, ...]
    """Members that share an uplink."""
    faults: tuple[Fault, ...]
    """What goes wrong with the links, and when."""
    congestion: str
    """The congestion control of all links."""
    presence: Presence
    """Which devices come and go."""

    @property
    def links(self) -> list[Profile]:
        """The network profile of each member."""
        return [self.network_profiles[name] for name in self.networks]


def name_all(job: Job) -> Named:
    """Look up what a job names, and check that it goes together. ConfigError, NetworkError.

    Loads neither torch nor the task.
    """
    boards, job = _members(job)
    found = resolve(job)
    check_optimizer(job)
    check_task(job)
    links = spread(networks_of(job.fleet.network), len(boards), "network")
    profiles = {name: networks.load(name) for name in set(links)}
    faults = networks.parse_faults(job.faults, len(boards))
    networks.refuse_idle(faults, [profiles[name] for name in links])
    absences = parse_absences(job.absences, len(boards))
    presence = Presence(absences, job.fleet.stays_s, job.fleet.away_s, job.seed)
    refuse_absences(found.strategy, presence)
    return Named(
        **vars(found),
        devices=boards,
        device_profiles={name: devices.load(name) for name in set(boards)},
        networks=links,
        network_profiles=profiles,
        sites=parse_sites(job.fleet.sites, len(boards)),
        faults=faults,
        congestion=networks.parse_congestion(job.fleet.congestion),
        presence=presence,
    )


def check_names(job: Job) -> None:
    """ConfigError for a name that does not exist; NetworkError for a network's. Whether the names
    go together is not checked. Loads neither torch nor the task."""
    look_up(job)
    for name in set(devices_of(job.fleet.device)):
        devices.load(name)
    for name in set(networks_of(job.fleet.network)):
        networks.load(name)
    check_optimizer(job)
    check_task(job)


def check_task(job: Job) -> None:
    """TaskError for what is wrong with the job's task and can be said before it is loaded."""
    if bundles.named(job.task) is None:
        spelling.check(job.task, job.data)


def check_optimizer(job: Job) -> None:
    """ConfigError for an optimizer that neither the installed torch nor edgetrain has, or that
    members cannot have. Torch is not loaded."""
    name, known = str(job.train.optimizer.get("name", "")), optimizers()
    if not name:
        raise ConfigError(
            "train.optimizer has no name", "as in { name = 'sgd', lr = 0.05, momentum = 0.9 }"
        )
    if known and name.lower() not in known:
        raise ConfigError(f"no optimizer '{name}'", did_you_mean(name, known))
    for key in sorted(_NUMBERS & set(job.train.optimizer)):
        value = job.train.optimizer[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ConfigError(f"optimizer '{name}': {key} = {value!r} (allowed is a finite number)")
    if name.lower() == "lbfgs":
        raise ConfigError(
            f"optimizer '{name}' computes the loss again within its step, which neither a member "
            "nor a rank can",
            "use adam or sgd",
        )


_NUMBERS = {"lr", "momentum", "weight_decay", "dampening", "eps", "rho", "alpha", "lambd"}
"""Settings that are numbers wherever an optimizer of torch has them."""

ELEMENTWISE = (
    "sgd", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "rprop",
    "asgd",
)  # fmt: skip
"""Optimizers that step each element by itself. All others are taken to look at whole tensors."""

LAYER_WISE = ("lars", "lamb")
"""The optimizers of `edgetrain.tasks.layerwise`, which needs torch."""


@functools.cache
def optimizers() -> tuple[str, ...]:
    """The classes that torch.optim imports from its modules, and those of edgetrain's own, in small
    letters; (): torch's are not known."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return ()
    try:
        text = (Path(found.origin).parent / "optim" / "__init__.py").read_text("utf-8")
    except OSError:
        return ()
    names = re.findall(r"^from (?:torch)?\.(?:optim\.)?\w+ import (\w+)", text, re.MULTILINE)
    classes = [name for name in names if name[0].isupper() and name != "Optimizer"]
    return (*(name.lower() for name in classes), *LAYER_WISE)


def _members(job: Job) -> tuple[tuple[str, ...], Job]:
    """One device per member; a device list with counts also says how many members there are."""
    named = devices_of(job.fleet.device)
    if len(named) > 1:
        job = replace(job, fleet=replace(job.fleet, members=len(named)))
    return spread(named, job.fleet.members, "device"), job
