"""torchvision beside any build of torch, and a program that imports it so:
`python torchvision_beside.py PROGRAM WORDS…`."""

from __future__ import annotations

import runpy
import sys

import torch

_LIBRARIES: list[torch.library.Library] = []


def let_in() -> None:
    """torchvision's build for GPUs does not load its operators beside a torch for CPUs, and cannot
    be imported then: the two that it describes are there, and do nothing. No model calls them."""
    if not _LIBRARIES:
        _LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        _LIBRARIES[0].define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES[0].define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    let_in()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
