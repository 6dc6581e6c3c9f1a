"""Running a job: one member, a fleet of processes, a fleet in virtual time.

No command-line arguments, no printing.

Doors: both_ways, emulated, host_pace, hub, joining, member, readiness, servers.commands,
servers.group, servers.process, servers.rehearsing, servers.snapshots, service,
simulated.simulation, stopping, sweep, train.
"""
