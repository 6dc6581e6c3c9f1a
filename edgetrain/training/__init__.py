"""Running a job: one member, a fleet of processes, a fleet in virtual time.

No command-line arguments, no printing.

Doors: both_ways, emulated, host_pace, hub, member.joining, member.member, member.service,
member.train, readiness, servers.commands, servers.group, servers.process, servers.rehearsing,
servers.snapshots, simulated.simulation, stopping, sweep.
"""
