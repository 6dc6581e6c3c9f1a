"""Settings of the C library's allocator (glibc; elsewhere no effect). Callers decide when."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MMAP_MAX = 32 << 20
"""The largest threshold that glibc accepts on 64 bits."""


def keep_freed(most_bytes: int = (1 << 31) - 1) -> None:
    """Keep freed memory for the next allocation, in this whole process, up to `most_bytes`.

    For a process that allocates and frees the same megabytes in every round: returning them to the
    system in between costs a page fault for each 4 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Thread arenas are heaps of 64 MB, which are unmapped as soon as they are empty.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_MAX)
        mallopt(_M_TRIM_THRESHOLD, most_bytes)


def map_large(threshold_bytes: int = 1 << 20) -> None:
    """Map each block from this size on by itself, in this whole process, and return it to the
    system as soon as it is freed.

    For a process whose peak has to be known: by default glibc raises the threshold to the largest
    block that was ever freed, up to 32 MB, and keeps holes between smaller ones.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, threshold_bytes)


def release_freed() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
