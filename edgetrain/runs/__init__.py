"""Run folders: written and read, and everything that displays them.

What produced a run is not known here: no strategies, hubs, members or processes.
"""
