"""Flat float32 vectors: types, tiles, ranges, checksum, memory pool, layout, clipping and noise.

No torch, no socket, no clock; no members, rounds or jobs.

Doors: allocator, blob, blocks, layout, noise, parts, pool, ranges, vector.
"""
