"""Chaos: seeded schedules of what goes wrong, and a verdict against the laws.

    schedule    what goes wrong when, by seed                 pure
    laws        what has to hold afterwards                   pure
    simulated   one schedule over a simulated fleet           torch, virtual time
    processes   one schedule over real processes: `hub`, `member`, `forwarder`, `clock`
    trials      many of those, each apart, and nothing left behind

Nothing is loaded by importing this.
"""
