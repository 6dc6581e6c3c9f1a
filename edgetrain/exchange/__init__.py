"""The protocol between members and hubs: messages, transports, keys, masks and both halves.

No torch, tasks, jobs, run folders or emulated networks.

Doors: addresses, delay, descriptors, further_messages, gateway.site, gateway.way_up,
hub.collective, hub.copies, hub.dealing, hub.delay, hub.density, hub.direct, hub.drawing,
hub.effects, hub.fallback, hub.final_sync, hub.journal, hub.lead, hub.orders, hub.protocol,
hub.records, hub.reducer, hub.replica, hub.replicated, hub.serve, hub.shared, hub.terms,
keys.credentials, keys.gate, keys.host_keys, keys.keyring, keys.pairs, limits, masks.aggregator,
masks.terms, member.checkpoint, member.doubled, member.driver, member.link, member.ranges,
member.shared, member.telemetry, member.work, messages, peers.beside, peers.dialled, peers.direct,
peers.listener, peers.neighbours, peers.peering, peers.reducer_link, peers.schedules,
peers.together, peers.wrapped, pipeline.desk, pipeline.relay, pipeline.serve, seam, transport,
zeromq.curve, zeromq.enrolment, zeromq.hub_socket, zeromq.member_socket, zeromq.standby_socket,
zeromq.tcp_counters.
"""
