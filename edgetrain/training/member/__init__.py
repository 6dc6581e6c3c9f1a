"""One member: joining a hub, its steps, its checkpoints, and what it reports and records.

Hubs, fleets and groups of ranks stand one folder up or beside it: they import this, it does not
import them. Whoever may be asked to stop, hubs as well, reads `training/stopping.py`.
"""
