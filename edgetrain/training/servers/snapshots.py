"""Snapshots of a group that load on any other placement: torch's DCP, by the names of the model.

    RUN/snapshots/step-000120/     a whole one: written as a draft, then renamed
    RUN/snapshots/.step-000120     a draft, of an attempt that ended

Values are named after parameters and buffers: "model.NAME", "optimizer.NAME.KEY". One that several
stages hold is written once, and read by all of them.

A snapshot is on the leader's disk. Ranks that do not see it write to their own, and their parts are
brought to the leader's; before one is loaded they are given the whole of it.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.training.servers.owned import OwnedOptimizer, local_part, state_of, whole_of
from edgetrain.training.servers.rank import Rank

_CHUNK = 1 << 24


class Disks:
    """Which ranks see the run folder of the leader, rank 0. All ranks make one together. Files go
    over `group`, which has all ranks; None: the default one."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._rank = group, dist.get_rank()
        token = torch.zeros(1, dtype=torch.int64)
        if self._rank == 0:
            token[0] = secrets.randbits(62)
            mark = folder / f".seen-{int(token)}"
            mark.touch()
        dist.broadcast(token, 0)
        self.sees = (folder / f".seen-{int(token)}").exists()
        """Whether this rank sees it."""
        seen = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        seen[self._rank] = self.sees
        dist.all_reduce(seen)
        self._blind = [rank for rank, sees in enumerate(seen.tolist()) if not sees]
        if self._rank == 0:
            mark.unlink(missing_ok=True)

    @property
    def are_one(self) -> bool:
        return not self._blind

    def collect(self, folder: Path, pattern: str) -> None:
        """Bring the files of ranks that do not see the leader's disk to its `folder`: those in
        their own with names like `pattern`, in which {rank} is theirs. All ranks call it. OSError
        if the leader's disk refuses one; no rank waits for it then."""
        for rank in self._blind:
            if self._rank == rank:
                self._send(sorted(folder.glob(pattern.format(rank=rank))), 0)
            elif self._rank == 0:
                self._receive(folder, rank)

    def spread(self, folder: Path, into: Path) -> None:
        """Give the files of the leader's `folder` to each rank that does not see them, in its
        folder `into`. All ranks call it."""
        for rank in self._blind:
            if self._rank == 0:
                self._send(sorted(path for path in folder.iterdir() if path.is_file()), rank)
            elif self._rank == rank:
                into.mkdir(parents=True, exist_ok=True)
                self._receive(into, 0)

    def _send(self, paths: Sequence[Path], to: int) -> None:
        """A list of names and sizes as JSON, never as a pickle, and then the files."""
        told = json.dumps([(path.name, path.stat().st_size) for path in paths]).encode()
        self._send_bytes(len(told).to_bytes(8, "little"), to)
        self._send_bytes(told, to)
        for path in paths:
            with path.open("rb") as file:
                for count in _chunks(path.stat().st_size):
                    self._send_bytes(file.read(count), to)

    def _receive(self, folder: Path, source: int) -> None:
        size = int.from_bytes(self._receive_bytes(8, source), "little")
        problem: OSError | None = None
        for name, length in json.loads(self._receive_bytes(size, source)):
            chunks = (self._receive_bytes(count, source) for count in _chunks(length))
            try:
                with (folder / Path(name).name).open("wb") as file:
                    file.writelines(chunks)
            except OSError as error:
                problem = error
            for _ in chunks:
                pass  # the sender would wait
        if problem is not None:
            raise problem

    def _send_bytes(self, content: bytes, to: int) -> None:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.send(tensor, to, group=self._group)

    def _receive_bytes(self, count: int, source: int) -> bytes:
        found = torch.empty(count, dtype=torch.uint8)
        dist.recv(found, source, group=self._group)
        return found.numpy().tobytes()


def _chunks(size: int) -> Iterator[int]:
    while size > 0:
        yield min(size, _CHUNK)
        size -= _CHUNK


FOLDER = "snapshots"
SNAPSHOTS = 10
"""Snapshots in a run unless the job says how often."""
_NAME = re.compile(r"step-(\d{6,})\Z")
_KEPT = 2


def latest(folder: Path) -> tuple[int, Path] | None:
    """The newest whole snapshot of a run, and its step; None: there is none."""
    found = [
        (int(match[1]), path)
        for path in (folder / FOLDER).glob("step-*")
        if (match := _NAME.match(path.name)) and (path / ".metadata").exists()
    ]
    return max(found, default=None)


def leaders_step(folder: Path) -> int:
    """The step of the leader's newest snapshot; 0: there is none. All ranks call it."""
    found = latest(folder)
    told = torch.tensor([found[0] if found else 0])
    dist.broadcast(told, 0)
    return int(told)


class Snapshots:
    """The snapshots of a run, kept by all of its ranks together.

    A rank copies what it has into main memory and trains on, while a thread writes the copy. One is
    written at a time: the next one waits for it. The threads of all ranks talk over a process group
    of their own.
    """

    @classmethod
    def of(cls, job: Job, rank: Rank, folder: Path) -> Snapshots:
        """As often as the job says. All ranks call it. ConfigError."""
        every = job.servers.snapshot_every or max(1, job.train.steps // SNAPSHOTS)
        return cls(rank, folder, every, job.servers.async_snapshots)

    def __init__(self, rank: Rank, folder: Path, every: int, beside: bool = True) -> None:
        """In the run's `folder`, `every` so many steps; 0: never. Training goes on while one is
        written if `beside`. All ranks call it. ConfigError for a folder that cannot be there."""
        self._rank, self._folder, self._every, self._beside = rank, folder, every, beside
        self._kept, self._problem = folder / FOLDER, ""
        self._is_leader = rank.ranks.rank == 0
        self._group = dist.new_group(backend="gloo")
        self._disks = Disks(folder, self._group)
        self._writing: Thread | None = None
        self._report: Callable[[str], None] = lambda line: None
        try:
            self._kept.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write a snapshot to {self._kept}: {error.strerror}",
                "a run folder on a disk that can be written to",
            ) from None

    def report_to(self, report: Callable[[str], None]) -> None:
        """Call `report` with a line, in the thread that trains, for each snapshot that could not be
        written."""
        self._report = report

    def keep_if_due(self, step: int) -> None:
        """Write a snapshot after this step, if it is due. All ranks call it."""
        if self._every and step % self._every == 0:
            self.keep(step)
        elif self._writing is None or not self._writing.is_alive():
            self.wait()

    def keep(self, step: int) -> None:
        """Write a snapshot. All ranks call it."""
        self.wait()
        values = _values(self._rank)
        if not self._beside:
            self._write(values, step)
            self.wait()
            return
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # Not kept for the next: torch 2.11's takes one copy and no more.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = stager.stage(values)
        stager.close()  # else it holds the copy until garbage is collected
        self._writing = Thread(target=self._write, args=(copied, step), daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until the snapshot that is being written is there, or could not be written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._problem:
            problem, self._problem = self._problem, ""
            self._report(problem)

    # -- writing -------------------------------------------------------------------------------

    def _write(self, values: Any, step: int) -> None:
        """Write these values as the snapshot of a step: a draft of all ranks, then renamed."""
        draft, path = self._kept / f".step-{step:06}", self._kept / f"step-{step:06}"
        has_own = self._is_leader or not self._disks.sees
        try:
            written = self._all(lambda: _make_empty(draft) if has_own else None)
            written = written and self._all(lambda: self._write_parts(values, draft))
            if written and self._is_leader:
                shutil.rmtree(path, ignore_errors=True)
                draft.rename(path)
                for old in sorted(self._kept.glob("step-*"))[:-_KEPT]:
                    shutil.rmtree(old, ignore_errors=True)
        except Exception as error:  # a peer that is gone: training meets it too, and says so
            self._note(error)
        if has_own:
            shutil.rmtree(draft, ignore_errors=True)

    def _write_parts(self, values: Any, draft: Path) -> None:
        save(values, checkpoint_id=draft, process_group=self._group)
        self._disks.collect(draft, "__{rank}_*")

    def _all(self, act: Callable[[], None]) -> bool:
        """Whether all ranks could do it. They all call it together."""
        failed = torch.zeros(1, dtype=torch.int64)
        try:
            act()
        except (OSError, CheckpointException) as error:
            self._note(error)
            failed[0] = 1
        dist.all_reduce(failed, group=self._group)
        return not int(failed)

    def _note(self, error: BaseException) -> None:
        self._problem = (
            f"cannot write a snapshot to {self._kept}: {_first_cause(error)} "
            "(training goes on; free some space on that disk)"
        )

    # -- reading -------------------------------------------------------------------------------

    def load(self, step: int) -> None:
        """Go on from the leader's snapshot of this step, of any placement. All ranks call it.
        ConfigError for a snapshot of another model, or one that is damaged."""
        kept = path = self._folder / FOLDER / f"step-{step:06}"
        if not self._disks.are_one:
            own = self._folder / FOLDER / f".of-the-leader-{self._rank.ranks.rank}"
            self._disks.spread(kept, own)
            path = kept if self._disks.sees else own
        try:
            known = FileSystemReader(path).read_metadata().state_dict_metadata
            values = _values(self._rank, known)
            load(values, checkpoint_id=path)
            # Give the other copies of a shared tensor on this rank what the first one was given
            rank = self._rank
            with torch.no_grad():
                for copies in _copies(rank).values():
                    for other in copies[1:]:
                        other.copy_(copies[0])
                    _, state, others = _states(rank, copies)
                    for each in others:
                        for key, value in (state or {}).items():
                            each[key] = value.clone() if isinstance(value, Tensor) else value
        except (Exception, CheckpointException) as error:
            cause = _first_cause(error)
            is_other = "ize mismatch" in cause or "Missing key" in cause
            raise ConfigError(
                f"cannot go on from the snapshot {path}: {cause}",
                "the job's model is another one than the run's" if is_other
                else "remove it: the one before it is taken",
            ) from None  # fmt: skip
        finally:
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _first_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of DCP: what each rank met
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    # What torch's writer says where the operating system refused it a byte.
    return f"the disk takes no more ({first})" if "unexpected pos" in first else first


def _values(rank: Rank, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """What this rank has of a snapshot, sharing memory with model and optimizer.

    To write: without copies that an earlier stage writes. To read (`known` is what DCP says of each
    value): the first copy of each, with the optimizer's values that are there.
    """
    found: dict[str, Any] = {}
    for name, copies in _copies(rank, written=known is None).items():
        found[f"model.{name}"] = copies[0].data
        parameter, state, _ = _states(rank, copies)
        if known is not None and state is not None:
            values = {_key(key, name): value for key, value in known.items()}
            _make_room(parameter, state, values,
                       isinstance(rank.steps.optimizer, OwnedOptimizer))  # fmt: skip
        for key, value in (state or {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = whole_of(parameter, value)
    return found


def _states(
    rank: Rank, copies: list[Tensor]
) -> tuple[Tensor, dict[str, Any] | None, list[dict[str, Any]]]:
    """The first of these copies of a parameter whose optimizer state this rank has, that state, and
    those of the other ones. Buffers have none."""
    parameters = [each for each in copies if isinstance(each, nn.Parameter)]
    states = [(each, state_of(rank.steps.optimizer, each)) for each in parameters]
    owned = [(each, state) for each, state in states if state is not None]
    if not owned:
        return copies[0], None, []
    return owned[0][0], owned[0][1], [state for _, state in owned[1:]]


def _copies(rank: Rank, written: bool = False) -> dict[str, list[Tensor]]:
    """This rank's copies of each parameter and buffer: a shared one may be on two of its stages.
    `written`: only those that this rank writes."""
    found: dict[str, list[Tensor]] = {}
    for stage, own in zip(rank.ranks.stages, rank.held.tensors, strict=True):
        for name, tensor in own.items():
            if not written or rank.held.parts.holders[name][0] == stage:
                found.setdefault(name, []).append(tensor)
    return found


def _key(key: str, name: str) -> str:
    """The optimizer's key in the name of a value, "" if it is another's."""
    prefix = f"optimizer.{name}."
    rest = key.removeprefix(prefix)
    return rest if key.startswith(prefix) and "." not in rest else ""


def _make_room(parameter: Tensor, state: Any, values: dict[str, Any], is_local: bool) -> None:
    """Zeros for what a snapshot has of an optimizer: scalars, means of rows and columns, all else
    as the parameter."""
    like = local_part(parameter.data) if is_local else parameter.data
    for key, value in values.items():
        if not key or key in state:
            continue
        if value.size == parameter.shape:
            state[key] = torch.zeros_like(like, dtype=value.properties.dtype)
        else:
            where = None if not value.size else like.device
            state[key] = torch.zeros(value.size, dtype=value.properties.dtype, device=where)
