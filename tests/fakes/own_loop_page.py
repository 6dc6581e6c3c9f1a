"""The Python blocks of docs/how-to/your-own-loop.md."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import edgetrain

PAGE = (Path(__file__).parents[2] / "docs/how-to/your-own-loop.md").read_text("utf-8")

_SECTIONS = re.split(r"^##? ", PAGE, flags=re.MULTILINE)[1:]
BLOCKS = {
    section.partition("\n")[0]: code
    for section in _SECTIONS
    for code in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
}
"""By the title of their section."""

TRAINERS = ("HuggingFace Accelerate", "Lightning", "Hugging Face's Trainer")
"""Those that need another library."""


def run_block(title: str, hub: str, model: torch.nn.Module, batches: object) -> None:
    """Run a block as a member's whole loop."""
    names = {
        "hub": hub,
        "model": model,
        "batches": batches,
        "torch": torch,
        "cross_entropy": cross_entropy,
        "edgetrain": edgetrain,
    }
    exec(compile(BLOCKS[title], title, "exec"), names)
