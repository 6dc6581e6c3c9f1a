"""Pictures: runs compared, a sweep, a capacity plan, topologies.

They are drawn from run folders or rows alone; `save` writes its file whole or not
at all. They share `style`, `bars`, `ends` and `quality`. Importing this package does
not load matplotlib.
"""

from edgetrain.runs.reports.plot.estimates import draw_capacity as draw_capacity
from edgetrain.runs.reports.plot.estimates import draw_topologies as draw_topologies
from edgetrain.runs.reports.plot.paper import formats_of as formats_of
from edgetrain.runs.reports.plot.paper import paper_figures as paper_figures
from edgetrain.runs.reports.plot.runs import draw_comparison as draw_comparison
from edgetrain.runs.reports.plot.style import save as save
from edgetrain.runs.reports.plot.sweeps import draw_sweep as draw_sweep
