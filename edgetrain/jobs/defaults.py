"""What a command and its function in Python take where no job file is given."""

SIMULATED = ("device=raspberry-pi-4b", "network=wan-200ms")
"""Defaults of a simulation: this machine's own speed means nothing in it."""

DEMO = (
    "members=8",
    "network=wan-200ms",
    "pace_s=0.02",
    "steps=320",
    "optimizer={ name = 'sgd', lr = 0.2 }",
)
"""Defaults of a comparison: eight members, steps of 20 ms, 200 ms from their hub."""
