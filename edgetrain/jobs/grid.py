"""A grid of jobs on paper: axes, values, cells, and the file that describes them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgetrain import strategies
from edgetrain.errors import ConfigError, did_you_mean, explain_os_errors, nearest
from edgetrain.files.toml import read_toml, to_toml
from edgetrain.files.writing import write_text
from edgetrain.jobs import reading
from edgetrain.jobs.job import AUTO, TOPOLOGIES, Job

FILE = "sweep.toml"

SHORT = {"rtt": "fleet.network", "partition": "data.partition"}
"""Short names of axes, and the keys of the job they set; `rtt` 50 is the network rtt-50ms."""

LABEL = "label"
HOW = ("simulated", "emulated")
MOST_CELLS = 100_000


@dataclass(frozen=True)
class Value:
    """One value of an axis: its label, and the overrides of the job that it stands for."""

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """A setting that varies, and its values in order; others are compared with the first."""

    name: str
    values: tuple[Value, ...]

    @property
    def labels(self) -> list[str]:
        return [value.label for value in self.values]


def axis(name: str, values: Sequence[Any]) -> Axis:
    """An axis over a key of the job, or `rtt`. A value that is a table sets several keys at once.

    >>> axis("rtt", [0, 50]).values[1]
    Value(label='50', overrides=('rtt=50',))
    >>> axis("case", [{"label": "K=9", "strategy": "fedavg", "local_steps": 9}]).values[0].overrides
    ('strategy=fedavg', 'local_steps=9')

    Raises ConfigError for a key that no job has, for no values, and for a repeated value.
    """
    found = tuple(_value(name, value) for value in values)
    labels = [value.label for value in found]
    if not found or len(set(labels)) < len(labels):
        raise ConfigError(
            f"axis '{name}' has the values {', '.join(labels) or 'none'}",
            "name one or more, each once",
        )
    return Axis(name, found)


def _value(name: str, value: Any) -> Value:
    if isinstance(value, Mapping):
        keys = {key: inner for key, inner in value.items() if key != LABEL}
        overrides = tuple(f"{_key(key)}={text_of(inner)}" for key, inner in keys.items())
        said = ", ".join(f"{key} {text_of(inner)}" for key, inner in keys.items())
        return Value(str(value.get(LABEL, said)), overrides)
    text = text_of(value)
    if name == "rtt":
        return Value(text.removesuffix("ms"), (f"rtt={text}",))
    return Value(text, (f"{_key(name)}={text}",))


def _key(name: str) -> str:
    key = SHORT.get(name, name)
    try:
        reading.parse({}, [f"{key}="])  # an empty text fits nowhere: only an unknown key matters
    except ConfigError as error:
        if error.message.startswith("no key"):
            keys = reading.keys()
            known = {full.rpartition(".")[2] for full in keys} | {*SHORT}
            raise ConfigError(
                f"no axis '{name}': a job has no such key",
                nearest(name, known) or "docs/reference/jobs.md lists them",
            ) from None
    return key


def text_of(value: Any) -> str:
    """A value as it is written after KEY= on the command line."""
    return value.strip() if isinstance(value, str) else _inline(value)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_inline(each)}' for key, each in value.items())} }}"
    return to_toml({"v": value}).partition("=")[2].strip()


def split(text: str) -> list[str]:
    """The values of a comma-separated list; commas inside brackets and quotes belong to a value.

    >>> split("fp32, topk(0.01) | q2, {a = 1, b = 2}")
    ['fp32', 'topk(0.01) | q2', '{a = 1, b = 2}']
    """
    found, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += char
    return [part.strip() for part in found if part.strip()]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    labels: tuple[str, ...]
    """The label of its value on each axis."""
    job: Job
    digest: str
    """Digest of its settings: the name of its run folder."""

    @property
    def weight(self) -> float:
        """Roughly proportional to the time it takes."""
        return float(self.job.fleet.members * self.job.train.steps)


@dataclass(frozen=True)
class Sweep:
    """A job, the axes along which it varies, and how its cells are run."""

    job: Mapping[str, Any]
    """As in a job file."""
    axes: tuple[Axis, ...]
    seeds: int = 1
    """Runs of each cell, with the job's seed and the seeds after it."""
    how: str = "simulated"
    name: str = ""
    """Part of the name of its folder."""
    title: str = ""
    """Heading of its pictures."""
    beside: Path | None = None
    """The folder of the job file, where the user's own task may be."""

    @property
    def called(self) -> str:
        return self.name or str(self.job.get("name") or self.job["task"].rpartition(":")[2])

    def joined(self, job: Job, axes: Iterable[Axis], seeds: int | None) -> Sweep:
        """The same of another job, with more `axes`, which win over those of their names, and this
        many seeds; None: its own."""
        merged = {each.name: each for each in (*self.axes, *axes)}
        found = replace(self, job=job.to_dict(), axes=tuple(merged.values()))
        return found if seeds is None else replace(found, seeds=seeds)

    def cells(self) -> list[Cell]:
        """All cells; seeds vary fastest, the first axis slowest. Raises ConfigError.

        `delay` and `local_steps` are left out if a strategy has none, so that cells can be equal:
        they then have the same digest.
        """
        count = self.seeds
        for each in self.axes:
            count *= len(each.values)
        if not self.axes:
            raise ConfigError("a sweep needs an axis", "as in --rtt 0,50,100")
        if not 1 <= count <= MOST_CELLS or self.seeds < 1:
            raise ConfigError(
                f"a sweep over {len(self.axes)} axes and {self.seeds} seeds has {count} cells",
                f"allowed are 1 to {MOST_CELLS:,}: --rtt 0,50,100 --seeds 3",
            )
        return [
            self._cell(chosen, seed)
            for chosen in itertools.product(*(each.values for each in self.axes))
            for seed in range(self.seeds)
        ]

    def samples(self) -> list[Job]:
        """A job for each value of each axis, the first values on the others. Raises ConfigError."""
        first = [each.values[0] for each in self.axes]
        return [
            self._cell([*first[:at], value, *first[at + 1 :]], 0).job
            for at, each in enumerate(self.axes)
            for value in each.values
        ]

    def _cell(self, chosen: Sequence[Value], seed: int) -> Cell:
        overrides = [override for value in chosen for override in value.overrides]
        job = reading.parse(self.job, overrides, "sweep")
        job = replace(fitting(job), seed=job.seed + seed)
        settings = job.to_dict() | {"name": "", "how": self.how}
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Cell(tuple(value.label for value in chosen), job, digest)

    def to_dict(self) -> dict[str, Any]:
        """The table that `write` puts into its folder."""
        return {
            "name": self.name,
            "title": self.title,
            "how": self.how,
            "seeds": self.seeds,
            "beside": None if self.beside is None else str(self.beside),
            "grid": [
                {
                    "name": each.name,
                    "values": [
                        {LABEL: value.label, "overrides": list(value.overrides)}
                        for value in each.values
                    ],
                }
                for each in self.axes
            ],
            "job": dict(self.job),
        }


def fitting(job: Job) -> Job:
    """The job with `local_steps` and `delay` set to 0 if its strategy has no local steps or no
    delay, and without a correction, a final sync or an outer rule of its own if it has none."""
    from edgetrain.jobs.resolved import load_own  # NumPy comes with it

    load_own(job.strategy.name)
    strategy = strategies.find(job.strategy.name)
    table = replace(
        job.strategy,
        local_steps=job.strategy.local_steps if strategy.has_local_steps else 0,
        delay=job.strategy.delay if strategy.delays else 0,
        final_sync=job.strategy.final_sync if strategy.has_local_steps else AUTO,
        correction=job.strategy.correction if strategy.corrections else "",
        outer=job.strategy.outer if strategy.moves_params else "",
    )
    return replace(job, strategy=table)


def variants(job: Job, names: Sequence[str]) -> list[Job]:
    """The job under each of these strategies; their outer rules win. ConfigError."""
    from edgetrain.jobs.resolved import load_own

    load_own(job.strategy.name, *names)
    strategies.find(job.strategy.name)  # also where the names win over it, a slip is a slip
    tables = [
        replace(
            job.strategy,
            name=strategies.find(name).spelled,
            outer="" if "|" in name else job.strategy.outer,
        )
        for name in names
    ]
    return [fitting(replace(job, strategy=table)) for table in tables]


def in_topologies(job: Job, names: Sequence[str]) -> list[Job]:
    """The job with each of these topologies; "gateways" is a star with one at each site.
    ConfigError for a name that stands there twice, or for "auto", which is one of the others."""
    for name in names:
        if name == AUTO or names.count(name) > 1:
            raise ConfigError(
                f"--topologies {','.join(names)}: '{name}' is there twice, or says another",
                "name each once: star,direct",
            )
        if name not in (*TOPOLOGIES, "gateways"):
            known = did_you_mean(name, [*TOPOLOGIES, "gateways"])
            raise ConfigError(f"--topologies: no topology '{name}'", known)
    fleets = [
        replace(job.fleet, topology="star", gateways=True)
        if name == "gateways"
        else replace(job.fleet, topology=name, gateways=False)
        for name in names
    ]
    return [replace(job, fleet=fleet) for fleet in fleets]


def is_sweep(path: Path) -> bool:
    """Whether a TOML file is a sweep and not a job."""
    return "axes" in _read(path)


def load(path: Path) -> Sweep:
    """Read a sweep: `job = {…}` or a job file's name, [axes], and optionally title, seeds, how.

    Raises ConfigError that names what is wrong.
    """
    table = _read(path)
    known = ("title", "job", "axes", "seeds", "how")
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: no key '{key}' in a sweep", did_you_mean(key, known))
    job, axes = table.get("job", {}), table.get("axes", {})
    if isinstance(job, str):
        job = _read(path.parent / job)
    if not isinstance(axes, Mapping) or not isinstance(job, Mapping):
        raise ConfigError(f"{path}: 'axes' and 'job' are tables", "[axes]\nrtt = [0, 50, 100]")
    seeds, how = table.get("seeds", 1), table.get("how", HOW[0])
    if type(seeds) is not int or how not in HOW:
        raise ConfigError(f"{path}: seeds = {seeds!r}, how = '{how}'", f"how is {' or '.join(HOW)}")
    for name, values in axes.items():
        if not isinstance(values, list):
            raise ConfigError(f"{path}: axes.{name} = {values!r}", "a list of values is needed")
    found = tuple(axis(name, values) for name, values in axes.items())
    beside, title = path.resolve().parent, str(table.get("title", ""))
    return Sweep(dict(job), found, seeds, how, path.stem, title, beside)


def resume(folder: Path) -> Sweep:
    """Read the sweep that a folder was made for. Raises ConfigError if it was made for none."""
    if not (folder / FILE).exists():
        raise ConfigError(f"{folder} is no sweep: no {FILE} in it", "give one that sweep made")
    table = _read(folder / FILE)
    axes = tuple(
        Axis(
            each["name"],
            tuple(Value(v[LABEL], tuple(v["overrides"])) for v in each["values"]),
        )
        for each in table["grid"]
    )
    beside = Path(table["beside"]) if "beside" in table else None
    name, title = str(table.get("name", "")), str(table.get("title", ""))
    return Sweep(table["job"], axes, table["seeds"], table["how"], name, title, beside)


def write(folder: Path, sweep: Sweep) -> None:
    """Write the sweep into its folder, for `resume`. Raises ConfigError if the disk refuses."""
    with explain_os_errors(f"cannot write {folder / FILE}"):
        write_text(folder / FILE, to_toml(sweep.to_dict()))


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"no file '{path}'", "write a job with `edgetrain init`") from None
