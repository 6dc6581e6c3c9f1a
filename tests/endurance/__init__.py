"""Runs too long for `make test`: a hub that is attacked, a fleet that comes and goes for a day.

`make test-endurance` runs them and prints their tables; docs/reference/tests.md says when. `room`
is a hub and its members in virtual time, for `churn` and `fuzz`; `attacks` has a hub in a process
of its own. Importing this package loads nothing.
"""
