"""Descriptors: the limit of this process, and a reserve that connections cannot use up.

A hub accepts connections in a thread of libzmq's, which takes every descriptor that the soft limit
allows. So the hub holds its soft limit RESERVED below the hard one, and raises it only while it
opens a file of its own. A process that has run out of descriptors has no full disk: see
`is_out_of_descriptors`.
"""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

RESERVED = 32
"""Descriptors that only this process's own files may use."""

MOST = 1 << 20
"""Limit if the system has no hard one."""


def raise_limit() -> int:
    """Raise the soft limit to the hard one, less RESERVED if there is room; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else hard
    wanted = most - RESERVED
    if wanted < 2 * RESERVED:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):  # a hard limit above what the kernel allows
        return soft
    return wanted


@contextlib.contextmanager
def reserve() -> Iterator[None]:
    """Within: RESERVED more descriptors than before may be open, if the hard limit allows it.

    Keep the block short. The limit is the process's: a connection that is accepted meanwhile may
    use the reserve, too. One thread at a time may use it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = soft + RESERVED
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether a file could not be opened because this process, or the machine, has too many."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
