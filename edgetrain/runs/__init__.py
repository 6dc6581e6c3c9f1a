"""Write and read run folders, and display them.

Nothing here knows what produced a run: strategies, hubs, members or processes.
"""
