"""Chaos tests: seeded schedules of faults, and a verdict by laws that hold whatever goes wrong.

The idea: the hub promises that a contribution counts once, that nothing that was answered is lost,
and that all replicas are equal, bit for bit. The model is a sum of contributions in the order of
rounds. So the test records every contribution as it is sent, lets things go wrong, and then merges
again what the hub says it counted: the result has to be the base that members ended with. No fault
needs an expected result of its own.

    module      what it does                                              needs
    schedule    draws what goes wrong when, from a seed                   nothing
    laws        judges rounds, contributions and ends                     numpy
    simulated   carries out one schedule over a simulated fleet           torch, virtual time
    fleet       carries out one schedule over real processes              Linux
    trials      runs many of those, each in a process of its own          Linux

`hub`, `member`, `standin`, `forwarder`, `clock` and `ledger` are the parts of `fleet`. Importing
this package loads nothing.
"""
