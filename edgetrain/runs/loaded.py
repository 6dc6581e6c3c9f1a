"""Run folders as Python sees them: columns, figures, a page. For notebooks, beside `report`.

Reading only: nothing here starts a run, and nothing that trains is asked.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import ConfigError, explain_os_errors
from edgetrain.files.writing import write_text
from edgetrain.runs.folder import read_job, read_metrics, read_summary, runs_in
from edgetrain.runs.summary import summarise

Columns = dict[str, NDArray[Any]]
"""Arrays [lines] by the name of a key: float64 with NaN where a line has no number, bool, or object
where there is text or a list."""

KINDS = {
    "steps": "step",
    "evaluations": "eval",
    "own_evaluations": "own_eval",
    "exchanges": "exchange",
    "rounds": "round",
    "events": "event",
}
"""Names of columns, and the kind of the lines that they are of. Keys and units:
docs/reference/run-folder.md."""

_MOST_ON_A_PAGE = 24
_PAGE_HEIGHT = 640


class Run:
    """One run, read from its folder.

    `steps`, `evaluations`, `own_evaluations`, `exchanges`, `rounds` and `events` are the lines of
    metrics.jsonl as columns, in the file's order; `member` is the name of a line's member. Each
    access reads the file again, so a running run has its lines so far. A notebook shows the page
    of `edgetrain report`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError unless `folder` has exactly one run."""
        found = runs_in(Path(folder))
        if found != [Path(folder)]:
            raise ConfigError(f"{folder} has {len(found)} runs", "edgetrain.load(…) reads them all")
        self.folder = found[0]

    @property
    def job(self) -> dict[str, Any]:
        """The job of job.toml, with every key."""
        return read_job(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json, or a summary of the lines so far. Raises ConfigError."""
        return read_summary(self.folder) or summarise(self.folder)

    @property
    def steps(self) -> Columns:
        """Members' steps: seconds, bytes, loss."""
        return self.columns("steps")

    @property
    def evaluations(self) -> Columns:
        """The task's figures, with step and time."""
        return self.columns("evaluations")

    @property
    def own_evaluations(self) -> Columns:
        """Evaluations on members' own data: a row for each figure of a member, with its sum, its
        count and their quotient."""
        return self.columns("own_evaluations")

    @property
    def exchanges(self) -> Columns:
        """Contributions and their replies."""
        return self.columns("exchanges")

    @property
    def rounds(self) -> Columns:
        """Rounds merged by the hub."""
        return self.columns("rounds")

    @property
    def events(self) -> Columns:
        """Other events: joins, departures, choices, warnings."""
        return self.columns("events")

    def columns(self, name: str) -> Columns:
        """The lines of one of KINDS. Raises ConfigError for another name."""
        if name not in KINDS:
            raise ConfigError(f"no columns '{name}' in a run", f"there are {', '.join(KINDS)}")
        records = list(read_metrics(self.folder, KINDS[name]))
        if name == "own_evaluations":
            from edgetrain.runs.over_members import rows_of

            records = rows_of(records)
        return columns_of(records)

    def frame(self, name: str = "steps") -> Any:
        """The same as a pandas DataFrame. Raises ConfigError without pandas."""
        return _frame(self.columns(name))

    def report(self, path: str | Path | None = None) -> Path:
        """Write the page of `edgetrain report`, by default report.html in the folder, and return
        its path. Raises ConfigError."""
        return _report([self.folder], Path(path) if path else self.folder / "report.html")

    def __repr__(self) -> str:
        return f"<edgetrain run {self.folder}: {_outcome(self.summary)}>"

    def _repr_html_(self) -> str:
        return _page([self.folder]) or html.escape(repr(self))


class Runs(Sequence[Run]):
    """The runs of a comparison or a sweep; the first one is the reference of the others.

    `summary` is the one of their common folder; `rows` has the figures of each run."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError for a folder without runs."""
        self.folder = Path(folder)
        self._runs = [Run(inside) for inside in runs_in(self.folder)]

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json of all runs; {} before the last one has ended."""
        return read_summary(self.folder) or {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each run: of a sweep the rows of sweep.csv, its axes first; otherwise the
        table of `edgetrain compare`, in seconds, bytes and fractions."""
        from edgetrain.runs.reports.comparison import compare
        from edgetrain.runs.reports.sweep_rows import rows_in

        if found := rows_in(self.folder):
            return [{key: _number_or_text(value) for key, value in row.items()} for row in found]
        summaries = [run.summary for run in self._runs]
        rows: list[dict[str, Any]]
        rows = compare(summaries, [], [run.job for run in self._runs]).as_json()["runs"]
        return rows

    def frame(self) -> Any:
        """`rows` as a pandas DataFrame. Raises ConfigError without pandas."""
        rows = self.rows
        return _frame({key: [row.get(key) for row in rows] for key in rows[0]})

    def report(self, path: str | Path | None = None) -> Path:
        """Write the page of `edgetrain report`, and return its path. Raises ConfigError for more
        than 24 runs."""
        return _report([self.folder], Path(path) if path else self.folder / "report.html")

    def __getitem__(self, which: Any) -> Any:
        return self._runs[which]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __repr__(self) -> str:
        lines = [f"<edgetrain: {len(self)} runs in {self.folder}>"]
        return "\n".join([*lines, *(f"  {run!r}" for run in self._runs)])

    def _repr_html_(self) -> str:
        if len(self) <= _MOST_ON_A_PAGE and (page := _page([self.folder])):
            return page
        return f"<pre>{html.escape(repr(self))}</pre>"


def load(folder: str | Path) -> Run | Runs:
    """Read one run, or the runs of a comparison or sweep, also running or interrupted ones.

    Raises ConfigError for a folder without a run, or of another format."""
    if not isinstance(folder, str | Path):
        raise ConfigError(f"folder = {folder!r}", "the path of a run folder, or of several runs")
    found = runs_in(Path(folder))
    return Run(folder) if found == [Path(folder)] else Runs(folder)


def columns_of(records: Sequence[Mapping[str, Any]]) -> Columns:
    """Columns of plain records, whose keys need not be the same."""
    keys = dict.fromkeys(key for record in records for key in record if key != "kind")
    return {key: _column([record.get(key) for record in records]) for key in keys}


def _column(values: list[Any]) -> NDArray[Any]:
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, bool) for value in known) and len(known) == len(values):
        return np.array(values, bool)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _number_or_text(value: str) -> float | str | None:
    try:
        return float(value)
    except ValueError:
        return value or None


def _frame(columns: Mapping[str, Any]) -> Any:
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise ConfigError(
            "a frame needs pandas", "pip install pandas; the columns are there without it"
        ) from None
    return pandas.DataFrame({key: list(values) for key, values in columns.items()})


def _report(folders: Sequence[Path], path: Path) -> Path:
    with explain_os_errors(f"cannot write {path}", "choose another place"):
        write_text(path, _document(folders))
    return path


def _document(folders: Sequence[Path]) -> str:
    from edgetrain.runs.reports.page.document import document
    from edgetrain.runs.reports.page.story import report_of

    return document(report_of(folders))


def _page(folders: Sequence[Path]) -> str:
    """The page in a frame of its own; "": there is nothing to show yet."""
    try:
        page = html.escape(_document(folders))
    except ConfigError:
        return ""
    style = f"width:100%;height:{_PAGE_HEIGHT}px;border:0;background:white"
    return f'<iframe sandbox="" style="{style}" srcdoc="{page}"></iframe>'


def _outcome(summary: Mapping[str, Any]) -> str:
    metric = str(summary.get("metric"))
    final = (summary.get("final") or {}).get(metric)
    said = [str(summary.get("status", "under way")), f"{summary.get('steps', 0)} steps"]
    return ", ".join([*said, f"{metric} {final:.4g}"] if isinstance(final, int | float) else said)
