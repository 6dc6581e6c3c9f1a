"""Running a job: one member, a fleet of processes, a fleet in virtual time, chaos.

No command-line arguments, no printing.
"""
