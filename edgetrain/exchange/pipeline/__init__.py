"""A pipeline whose stages are members: what a stage does next, and how the hub passes it on.

Pure: no socket, no clock, no torch. What computes is a `Computes`; strategies, codecs of
contributions and rounds have no part in it.
"""
