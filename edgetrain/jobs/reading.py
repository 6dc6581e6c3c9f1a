"""The job: one file that means the same simulated, emulated and real.

Reads TOML and `key=value` overrides into frozen dataclasses; every key is known, typed and ranged,
and an unknown one names the near miss. Nothing is looked up here (no profile, no task, no
strategy): what a name stands for is known where it is used. Neither torch nor zmq is imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgetrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from edgetrain.exchange.member.checkpoint import Sparing

Plain = bool | int | float | str | list[Any] | dict[str, Any]


def _ranged(default: float, low: float, high: float, doc: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "doc": doc})


def _said(default: str, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


def _switch(default: bool, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


def _sgd() -> dict[str, Any]:
    return {"name": "sgd", "lr": 0.05, "momentum": 0.9}


@dataclass(frozen=True)
class Fleet:
    """Who trains, on what, over which network."""

    members: int = _ranged(4, 1, 100_000, "training processes")
    device: str = _said("host", "device profile(s): 'raspberry-pi-4b', 'raspberry-pi-4b:6, host:2'")
    network: str = _said("none", "network profile(s): 'wan-200ms', 'wifi:4, 4g-bad:4'")
    sites: str = _said("", "members behind one shared uplink: 'home-fixed: 0-3, 4g-good: 4 5'")
    congestion: str = _said("cubic", "TCP's congestion control on all links: cubic, reno, bbr, …")
    pace_s: float = _ranged(0.0, 0.0, 3600.0, "seconds a step takes; 0: as the device profile says")
    stays_s: float = _ranged(0.0, 0.0, 1e9, "simulated: mean seconds until a device goes; 0: never")
    away_s: float = _ranged(60.0, 0.0, 1e9, "simulated: mean seconds until it starts anew")
    backend: str = _said("auto", "how the network is emulated: auto, packet, tc, stream or none")


@dataclass(frozen=True)
class Train:
    """What a member does between exchanges."""

    steps: int = _ranged(400, 1, 10**9, "optimizer steps of each member")
    batch: int = _ranged(16, 1, 10**6, "samples in a step, per member")
    optimizer: dict[str, Any] = field(
        default_factory=_sgd, metadata={"doc": "sgd, adam, adamw, …: a torch optimizer"}
    )
    evaluate_every: int = _ranged(0, 0, 10**9, "steps between evaluations; 0: about 50 in a run")
    threads: int = _ranged(1, 1, 1024, "torch threads of each member")


@dataclass(frozen=True)
class StrategyTable:
    """How members exchange what they learn."""

    name: str = _said("dga", "see `edgetrain strategies`")
    every: int = _ranged(0, 0, 10**9, "local steps in a round (K); 0: the strategy's default")
    delay: int | Literal["auto"] = field(
        default="auto",
        metadata={"low": 0, "high": 10**9, "doc": "local steps a reply may take (D), or 'auto'"},
    )
    codec: str = _said("fp32", "how contributions are encoded")
    reply_codec: str = _said("", "how replies are encoded; '': like contributions")
    merge: str = _said("mean", "how contributions become one; see `edgetrain strategies`")
    secure: bool = _switch(False, "mask contributions, so that the hub learns only their sum")
    threshold: int = _ranged(0, 0, 100_000, "secure: members that a sum takes; 0: more than 2/3")
    span: float = _ranged(8.0, 2**-20, 2**20, "secure: elements are sent within [-span, span]")


@dataclass(frozen=True)
class HubTable:
    """How patient the hub is."""

    quorum: int = _ranged(1, 1, 100_000, "contributions a round needs to close at its deadline")
    deadline_s: float = _ranged(60.0, 0.01, 86_400.0, "then a round closes without the late ones")
    gone_s: float = _ranged(5.0, 0.1, 86_400.0, "a member unreachable for so long is given up")
    beat_s: float = _ranged(1.0, 0.05, 60.0, "the hub says something to everyone this often")
    outage_s: float = _ranged(600.0, 1.0, 10**7, "members wait so long for a hub that is away")
    return_s: float = _ranged(60.0, 1.0, 10**7, "a hub that was restored waits so for its members")
    fsync: str = _said("always", "when the journal reaches the disk: always, round-every N, never")
    when_full: str = _said("stop", "on a full disk: stop, or 'go on' without the journal")
    snapshot_every: int = _ranged(0, 0, 10**9, "rounds between snapshots of the base; 0: by size")
    message_s: float = _ranged(0.001, 0.0, 10.0, "simulated: seconds the hub takes for a message")


@dataclass(frozen=True)
class CheckpointTable:
    """How sparingly a member writes its checkpoint, where it is told to keep one."""

    every_s: float = _ranged(600.0, 0.0, 1e9, "seconds between two checkpoints of a member")
    share: float = _ranged(0.02, 1e-6, 1.0, "of a member's time that writing them may take")
    mb_an_hour: float = _ranged(256.0, 1e-3, 1e9, "megabytes that they may write in an hour")

    def sparing(self) -> Sparing:
        """As `checkpoint` takes it."""
        from edgetrain.exchange.member.checkpoint import Sparing

        return Sparing(self.every_s, self.share, 1e6 * self.mb_an_hour)


@dataclass(frozen=True)
class Privacy:
    """Differential privacy: whose data, how much noise, and who is trusted."""

    unit: str = _said("none", "what is protected: none, example, or member (all it has)")
    clip: float = _ranged(1.0, 1e-9, 1e12, "length (L2) that one unit's part is cut to")
    noise: float = _ranged(0.0, 0.0, 1e6, "noise multiplier: standard deviation / clip")
    epsilon: float = _ranged(0.0, 0.0, 1e6, "in place of noise: what the whole job may spend")
    delta: float = _ranged(1e-5, 1e-100, 0.5, "the chance that epsilon does not hold")
    where: str = _said("member", "who adds the noise: member, or a hub that is trusted: hub")
    sampling: str = _said("poisson", "of examples: poisson, or shuffle (which hides less)")


@dataclass(frozen=True)
class Job:
    """A training job. Keys and defaults are these fields; `docs/jobs.md` explains them."""

    task: str = _said("edgetrain.tasks:digits", "model, data, loss, evaluation: 'module:object'")
    name: str = _said("", "of the run folder; '': the task's name")
    seed: int = _ranged(0, 0, 2**63 - 1, "of initial parameters, partition, batches, network")
    data: dict[str, Any] = field(
        default_factory=dict, metadata={"doc": "options of the task: folder, partition, …"}
    )
    fleet: Fleet = field(default_factory=Fleet)
    train: Train = field(default_factory=Train)
    strategy: StrategyTable = field(default_factory=StrategyTable)
    hub: HubTable = field(default_factory=HubTable)
    checkpoint: CheckpointTable = field(default_factory=CheckpointTable)
    privacy: Privacy = field(default_factory=Privacy)
    faults: list[dict[str, Any]] = field(
        default_factory=list, metadata={"doc": "what goes wrong with links, and when; a list"}
    )
    absences: list[dict[str, Any]] = field(
        default_factory=list, metadata={"doc": "simulated: devices that are off, and when; a list"}
    )

    def digest(self) -> str:
        """Of everything that members of one job must agree on; where they run is not part of it."""
        data = {key: value for key, value in self.data.items() if key not in ("folder", "download")}
        agreed = {
            "task": self.task,
            "seed": self.seed,
            "data": data,
            "members": self.fleet.members,
            "train": {
                key: value
                for key, value in dataclasses.asdict(self.train).items()
                if key not in ("threads", "evaluate_every")
            },
            "strategy": dataclasses.asdict(self.strategy),
            "privacy": dataclasses.asdict(self.privacy),
        }
        text = json.dumps(agreed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """All keys as plain values, in the order of the file."""
        return dataclasses.asdict(self)


def load(path: str | Path | None, overrides: Iterable[str] = ()) -> Job:
    """A job from a file (None: all defaults) and `key=value` overrides, which win.

    Raises ConfigError naming the file, the key, the value and what is allowed.
    """
    return parse(_read(path), overrides, str(path or "defaults"))


def parse(table: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "job") -> Job:
    """A job from plain values, as `load`."""
    values = {key: dict(v) if isinstance(v, Mapping) else v for key, v in table.items()}
    for override in overrides:
        _override(values, override)
    job = _build(Job, values, "", source)
    assert isinstance(job, Job)
    return job


def _read(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no job file '{path}'", "write one with `edgetrain init`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


# -- overrides ------------------------------------------------------------------------------------

_TABLES: dict[str, type[Any]] = {
    "fleet": Fleet,
    "train": Train,
    "strategy": StrategyTable,
    "hub": HubTable,
    "checkpoint": CheckpointTable,
    "privacy": Privacy,
}
_SHORT = {"strategy": "strategy.name", "privacy": "privacy.unit"}
"""Tables that may be said in one word."""
_OPEN = ("data", "optimizer")
"""Tables whose keys belong to someone else (the task, torch)."""


def keys() -> dict[str, dataclasses.Field[Any]]:
    """Every dotted key of a job, with its field."""
    found = {f.name: f for f in dataclasses.fields(Job) if f.name not in _TABLES}
    for name, cls in _TABLES.items():
        found |= {f"{name}.{f.name}": f for f in dataclasses.fields(cls)}
    return found


def _full_key(key: str) -> str:
    """`network` for `fleet.network`: a last part will do where it is the only one."""
    known = keys()
    head = key.split(".")[0]
    if key in known or head == "data" or key.startswith("train.optimizer"):
        return key
    if key in _SHORT:
        return _SHORT[key]
    if key.startswith("optimizer") or head == "lr":
        return "train.optimizer.lr" if head == "lr" else f"train.{key}"
    short = [full for full in known if full.rsplit(".", 1)[-1] == key]
    if len(short) == 1:
        return short[0]
    choices = [*known, *(full.rsplit(".", 1)[-1] for full in known)]
    raise ConfigError(f"no key '{key}' in a job", did_you_mean(key, set(choices)))


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"'{override}' is not an override", "it reads key=value, as steps=200")
    *path, last = _full_key(key.strip()).split(".")
    if [*path, last] == ["train", "optimizer"] and not text.strip().startswith("{"):
        text = f'{{ name = "{text.strip()}" }}'  # another optimizer has other settings
    table = values
    for depth, part in enumerate(path):
        inner = table.get(part)
        if inner is None and path[: depth + 1] == ["train", "optimizer"]:
            inner = _sgd()
        table[part] = table = dict(inner or {})
    table[last] = _value(text.strip())


def _value(text: str) -> Any:
    """A TOML value where it is one, else the text itself: names need no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


# -- checking -------------------------------------------------------------------------------------


def _build(cls: type[Any], values: Mapping[str, Any], prefix: str, source: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{source}: no key '{prefix}{key}'", did_you_mean(key, fields))
        if key in _TABLES and cls is Job:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: '{key}' is a table, not {value!r}")
            arguments[key] = _build(_TABLES[key], value, f"{key}.", source)
        else:
            arguments[key] = _checked(f"{prefix}{key}", value, hints[key], fields[key], source)
    return cls(**arguments)


def _checked(key: str, value: Any, hint: Any, spec: dataclasses.Field[Any], source: str) -> Any:
    allowed = _allowed(hint, spec)
    if hint is float and type(value) is int:
        value = float(value)
    if spec.name == "delay":
        fits = type(value) is int or value == "auto"
    else:
        fits = type(value) is (typing.get_origin(hint) or hint)
    if fits and type(value) in (int, float) and "low" in spec.metadata:
        fits = spec.metadata["low"] <= value <= spec.metadata["high"] and math.isfinite(value)
    if isinstance(value, list):
        fits = fits and all(isinstance(item, Mapping) for item in value)
    if not fits:
        raise ConfigError(f"{source}: {key} = {value!r}", f"allowed is {allowed}")
    if isinstance(value, list):
        return [dict(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _allowed(hint: Any, spec: dataclasses.Field[Any]) -> str:
    words = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    tables = {dict: "a table", list: "a list of tables"}
    what = words.get(hint) or tables.get(typing.get_origin(hint), "an integer or 'auto'")
    if "low" in spec.metadata:
        what += f" from {spec.metadata['low']:g} to {spec.metadata['high']:g}"
    return what
