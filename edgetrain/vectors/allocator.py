"""Two words with the C library's allocator (glibc; elsewhere they do nothing). No policy here."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MMAP_MAX = 32 << 20
"""The largest threshold that glibc takes on 64 bits."""


def keep_freed(most_bytes: int = (1 << 31) - 1) -> None:
    """Keep freed memory for the next allocation, in this whole process, up to `most_bytes`.

    For a process that takes in and drops the same megabytes in every round: giving them back to the
    system in between costs a page fault for each 4 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Arenas of threads live in heaps of 64 MB that are unmapped as soon as they are empty.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_MAX)
        mallopt(_M_TRIM_THRESHOLD, most_bytes)


def release_freed() -> None:
    """Give freed memory back to the system, now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
