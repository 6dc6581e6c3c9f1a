"""Flat float32 vectors: the type, tiles, checksum, memory, layout, clipping and noise.

No torch, no socket, no clock; no members, rounds or jobs.
"""
