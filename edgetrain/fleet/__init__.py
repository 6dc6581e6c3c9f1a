"""The machines of a job and the links between them: profiles, emulation, absences.

Loads neither torch nor zmq nor numpy; knows no strategy and no job.
"""
