"""The gateway of a site: a hub to its members, and one member of the hub above.

No socket, no clock, no torch, no job.
"""
