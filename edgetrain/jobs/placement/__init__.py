"""Where a job fits and how long a step takes there: layers and machines in, placements out.

Pure: no torch, no clock, no process. What runs a placement is in `training/servers/`.
"""
