"""The protocol between members and hubs: messages, transports, keys, masks and both halves.

No torch, tasks, jobs, run folders or emulated networks.
"""
