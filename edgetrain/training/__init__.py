"""Running a job: one member, a fleet of processes, a fleet in virtual time.

No command-line arguments, no printing.
"""
