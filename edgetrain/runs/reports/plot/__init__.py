"""Pictures: several runs compared, one run, a sweep, a capacity plan, topologies, a calibration.

Each has a module and is drawn from run folders or rows alone; its file is written whole or not at
all. They share `style`, `bars`, `curves`, `headings` and `quality`. Importing this package does not
load matplotlib.
"""

from edgetrain.runs.reports.plot.calibrated import (
    calibration_figure,
    draw_calibration,
)
from edgetrain.runs.reports.plot.capacity import capacity_figure, draw_capacity
from edgetrain.runs.reports.plot.compared import comparison_figure, draw_comparison
from edgetrain.runs.reports.plot.one_run import History, draw_run, run_figure
from edgetrain.runs.reports.plot.paper import formats_of, paper_figures
from edgetrain.runs.reports.plot.sweeps import draw_sweep, sweep_figure
from edgetrain.runs.reports.plot.topologies import draw_topologies, topology_figure

__all__ = [
    "History",
    "calibration_figure",
    "capacity_figure",
    "comparison_figure",
    "draw_calibration",
    "draw_capacity",
    "draw_comparison",
    "draw_run",
    "draw_sweep",
    "draw_topologies",
    "formats_of",
    "paper_figures",
    "run_figure",
    "sweep_figure",
    "topology_figure",
]
