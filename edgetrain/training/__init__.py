"""Running a job: one member, a fleet of processes, a fleet in virtual time.

No command-line arguments, no printing.

What is written of a run: `hub_recorder` writes what a hub does, `member/recording` what a loop of
one's own does; `member/readings` reads what a member reports of its machine; `outcome` opens and
closes the run folder with its summary. `readiness` has nothing to do with runs: it is what
`edgetrain doctor` looks at.

Doors: bench, emulated, export, gateway, host_pace, hub, member.joining, member.member,
member.service, member.train, orders, pipelined.member, pipelined.planning, pipelined.simulated,
readiness, replica, servers.commands, servers.group, servers.leading, servers.process,
servers.rehearsing, servers.snapshots, simulated, simulated.simulation, stopping, sweep.
"""
