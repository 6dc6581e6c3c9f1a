"""The machines of a job and the links between them: profiles, emulation, absences.

Does not load torch, zmq or numpy. Does not know strategies or jobs.

Doors: assignment, catalog, cluster, devices, devices.cost, devices.energy, devices.health,
devices.sensors, devices.speed, interpreters, networks, networks.emulation.check,
networks.emulation.guard, networks.emulation.probe, networks.faults, networks.links.fluid,
networks.links.loss_recovery, networks.links.model, networks.links.receive_window,
networks.links.window, networks.nodes, networks.profile, presence, ssh.
"""
