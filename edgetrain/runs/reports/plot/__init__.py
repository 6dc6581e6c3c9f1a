"""The pictures: several runs against each other, one run, a sweep, a plan, a calibration.

Each is drawn from run folders (or rows) alone and written whole, by a module of its own; what they
share is in `style`, `bars` and `quality`. Importing this loads no matplotlib.
"""

from edgetrain.runs.reports.plot.calibrated import calibration_figure, draw_calibration
from edgetrain.runs.reports.plot.capacity import capacity_figure, draw_capacity
from edgetrain.runs.reports.plot.compared import comparison_figure, draw_comparison
from edgetrain.runs.reports.plot.latency import draw_latency, latency_figure, relative_speed
from edgetrain.runs.reports.plot.one_run import History, draw_run, run_figure
from edgetrain.runs.reports.plot.sweeps import draw_sweep, sweep_figure

__all__ = [
    "History",
    "calibration_figure",
    "capacity_figure",
    "comparison_figure",
    "draw_calibration",
    "draw_capacity",
    "draw_comparison",
    "draw_latency",
    "draw_run",
    "draw_sweep",
    "latency_figure",
    "relative_speed",
    "run_figure",
    "sweep_figure",
]
