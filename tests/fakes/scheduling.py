"""Which worker of pytest-xdist takes which file of tests.

Two workers compute. A third takes the files that mostly wait: for deadlines, processes, emulated
links. It needs no processor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from costs import Cost
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class Scheduling(LoadFileScheduling):
    """Hands out files. Of three workers or more, the last takes those that wait, and the others
    take them when they have no other."""

    def __init__(self, config: pytest.Config, log: object, costs: Mapping[str, Cost]) -> None:
        super().__init__(config, log)  # type: ignore[arg-type]
        self._waiting = {name for name, cost in costs.items() if cost.waits}

    def _assign_work_unit(self, node: WorkerController) -> None:
        mine = [each for each in self.workqueue if self._suits(each, node)]
        self.workqueue.move_to_end((mine or list(self.workqueue))[0], last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self._waits(node) and not any(self._suits(each, node) for each in self.workqueue):
            if not node.shutting_down:
                node.shutdown()
            return
        super()._reschedule(node)

    def _suits(self, scope: str, node: WorkerController) -> bool:
        return len(self.nodes) < 3 or (scope in self._waiting) == self._waits(node)

    def _waits(self, node: WorkerController) -> bool:
        return len(self.nodes) > 2 and node is self.nodes[-1]
