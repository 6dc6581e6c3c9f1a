"""The machines of a job and the links between them: profiles, emulation, absences.

Does not load torch, zmq or numpy. Does not know strategies or jobs.
"""
