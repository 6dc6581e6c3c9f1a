"""A trained run as files that are carried away: torch weights, ONNX, ONNX in 8 bits.

What may be exported, where to, and what is written of it stands here; how a model becomes ONNX, and
how such a file computes, is `onnx_files`'. torch is loaded only once all that can be seen without
it was looked at.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError, did_you_mean, quoted, refuse_first, require
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import JOB, read_summary, runs_in

if TYPE_CHECKING:
    from torch import nn

    from edgetrain.jobs.job import Job
    from edgetrain.tasks.protocol import Task

MODEL = "model.safetensors"
FIGURES = "export.json"
SAMPLE = "sample.npz"
FILES = {"torch": "model.pt", "onnx": "model.onnx", "int8": "model.int8.onnx"}
"""File of each format."""
PACKAGES = ("onnx", "onnxruntime", "onnxscript")
FORMAT = 1
"""Version of export.json."""

ACCURACY_BAR = 0.005
"""A file's accuracy may be this much below the trained model's."""
FIGURE_BAR = 0.01
"""Any other figure may be worse by this part of the trained model's."""
OUTPUT_BAR = 1e-4
"""Outputs of a file in float32 differ by no more than this, or this part of the largest."""


def export(
    run: str | Path, formats: Sequence[str] = tuple(FILES), into: str | Path | None = None
) -> dict[str, Any]:
    """Write the trained model of a finished run into a new folder, and evaluate each file.

    `run`: its folder. `formats`: keys of FILES. `into`: the new folder (None: RUN/export). Modules
    of the user's own task are imported from the current folder. The task evaluates every file, read
    back from the disk: ONNX files with onnxruntime, in float32 or int8, on the CPU. A file below
    the bar is kept. Returns the content of export.json (docs/how-to/export.md): the task's figures,
    sizes in bytes.

    Raises ConfigError, without a new folder, if the model cannot be exported, and TaskError for a
    missing task.
    """
    folder, target = Path(run), Path(into) if into else Path(run) / "export"
    job, summary = _checked(folder, formats, target)
    task = task_of(replace(job, start=str((folder / MODEL).absolute())), Path.cwd())
    make = partial(_trained, task, job.seed)
    trained = _evaluated(task, make(), MODEL)
    said: dict[str, Any] = {
        "format": FORMAT, "run": folder.resolve().name, "task": job.task, "metric": task.metric,
        "better": task.better, "trained": _plain(trained),
        "final": (summary.get("final") or {}).get(task.metric),
    }  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as draft:
            inside = Path(draft) / "export"
            inside.mkdir()
            said["files"] = _written(task, make, trained[task.metric], formats, inside, job)
            (inside / FIGURES).write_text(json.dumps(said, indent=2) + "\n", "utf-8")
            inside.rename(target)
    except OSError as error:
        raise ConfigError(
            f"cannot write {target}: {error.strerror or error}", "choose another folder"
        ) from None
    return said


def holds(metric: str, better: str, trained: float, found: float) -> bool:
    """Whether a file's figure is as good as the trained model's, within the bar; not NaN."""
    worse = trained - found if better == "higher" else found - trained
    bar = ACCURACY_BAR if metric.endswith("accuracy") else FIGURE_BAR * abs(trained)
    return worse <= bar + 1e-12


def _checked(folder: Path, formats: Sequence[str], target: Path) -> tuple[Job, dict[str, Any]]:
    """The run's job and summary. ConfigError for what can be seen without torch."""
    for name in formats:
        if name not in FILES:
            raise ConfigError(f"no format '{name}' to export", did_you_mean(name, FILES))
    if set(formats) - {"torch"}:
        require("an ONNX file, other than --torch,", "export", *PACKAGES)
    found = runs_in(folder)
    if found != [folder]:
        raise ConfigError(f"{folder} has {len(found)} runs", f"name one of them: {found[0]}")
    summary = read_summary(folder)
    if summary is None:
        raise ConfigError(f"{folder} is not over: its model is not trained yet", "wait for its end")
    if (status := summary.get("status")) not in ("finished", "incomplete"):
        raise ConfigError(
            f"{folder} was stopped in the middle: its status is '{status}'",
            "export a run that came to its end",
        )
    refuse_first(
        (not (folder / MODEL).is_file(), f"{folder} has no {MODEL}",
         "on several machines the member with --index 0 writes it, into its own run folder"),
        (target.exists(), f"{target} is there already", "choose another folder with -o"),
        (not target.parent.is_dir(), f"{target.parent} is no folder", "make it first"),
    )  # fmt: skip
    return load(folder / JOB), summary


def _trained(task: Task, seed: int) -> nn.Module:
    """The run's model, made as its members made theirs: what no file holds is the same. What is
    written is one that the task has not evaluated, because that may leave a model in training
    mode, or with other weights."""
    from edgetrain.tasks.draws import generators_kept, model_of

    with generators_kept():
        return model_of(task, seed).eval()


def _written(
    task: Task,
    make: Callable[[], nn.Module],
    trained: float,
    formats: Sequence[str],
    folder: Path,
    job: Job,
) -> list[dict[str, Any]]:
    from edgetrain.training import onnx_files

    paths = {each: folder / name for each, name in FILES.items()}
    read: dict[str, nn.Module] = {}
    if "torch" in formats:
        # Write a state_dict with every name, also those of tied parameters, and read it back
        path = paths["torch"]
        import torch

        torch.save({name: each.cpu() for name, each in make().state_dict().items()}, path)
        back = make()
        back.load_state_dict(torch.load(path, weights_only=True))
        read["torch"] = back
    if set(formats) - {"torch"}:
        given = onnx_files.input_of(task, make())
        onnx_files.write_onnx(make(), given, paths["onnx"])
        if "onnx" in formats:
            read["onnx"] = onnx_files.Compared(paths["onnx"], make())
        if "int8" in formats:
            onnx_files.write_int8(paths["onnx"], paths["int8"])
            read["int8"] = onnx_files.Compared(paths["int8"], make())
        if job.privacy.unit == "none":  # else held-out data stay where they are
            onnx_files.write_sample(make(), given, folder / SAMPLE)
    rows = [_row(task, each, paths[each], read[each], trained) for each in FILES if each in read]
    if "onnx" not in formats:
        paths["onnx"].unlink(missing_ok=True)
    return rows


def _row(task: Task, kind: str, path: Path, read: nn.Module, trained: float) -> dict[str, Any]:
    from edgetrain.training.onnx_files import Compared

    figures = _evaluated(task, read, path.name)
    row = {"file": path.name, "bytes": path.stat().st_size, "figures": _plain(figures)}
    fine = holds(task.metric, task.better, trained, figures[task.metric])
    if isinstance(read, Compared):
        row |= _plain({"outputs_differ": read.differs})
        most = math.inf if kind == "int8" else OUTPUT_BAR * max(1.0, read.largest)
        fine = fine and read.differs <= most
    return {**row, "holds": fine}


def _evaluated(task: Task, model: nn.Module, name: str) -> dict[str, float]:
    """The task's figures of a file. ConfigError where it does more than call the model."""
    try:
        figures = task.evaluate(model)
    except ConfigError:
        raise
    except Exception as error:  # whatever a task's own code raises
        raise ConfigError(
            f"the task cannot evaluate {name}: {quoted(error)}",
            "its evaluate(model) may only call the model",
        ) from error
    return figures


def _plain(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Figures as JSON has them: what is no number is null."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
