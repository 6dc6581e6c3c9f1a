"""The access to a card: bytes at offsets, that last.

This is the seam for cards that misbehave: everything that writes and reads back takes a medium.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

from edgetrain.errors import ConfigError

ALIGNMENT = 4096
"""Offsets, lengths and addresses that O_DIRECT accepts everywhere are multiples of this."""
_RE_READ_PARTITIONS = 0x125F
_FLUSH_BUFFERS = 0x1261
_IS_READ_ONLY = 0x125E


def aligned(length: int) -> memoryview:
    """A buffer of zeros that begins on a page, as O_DIRECT wants it."""
    return memoryview(mmap.mmap(-1, max(length, 1)))


def same(one: memoryview, other: memoryview) -> bool:
    """Whether two buffers hold the same bytes. Views compare element by element, bytes at once."""
    return one.tobytes() == other.tobytes()


class FileMedium:
    """A whole block device, opened exclusively, or a regular file that stands for one. Methods
    raise OSError if the card refuses or is gone.

    Uses O_DIRECT where the file system can do it: then reading back asks the card itself, and
    writing fills no caches.
    """

    def __init__(self, path: str | Path, size: int | None = None, *, direct: bool = True) -> None:
        """Open a device or a file. With `size` (bytes) make the file, or set its length; it grows
        with what is written behind its end. Nobody but its owner may read it: a card has secrets.

        direct: whether to try O_DIRECT.

        Raises ConfigError if it cannot be opened, is in use, or is neither of the two.
        """
        self._name = str(path)
        if size is not None and self._name.startswith("/dev/"):
            raise ConfigError(f"{path} is not there", "is the card in the reader?")
        try:
            self._fd, self._direct = _open(Path(path), direct, create=size is not None)
        except OSError as error:
            raise ConfigError(*_explain(self._name, error)) from None
        mode = os.fstat(self._fd).st_mode
        self._block = stat.S_ISBLK(mode)
        if not self._block and not stat.S_ISREG(mode):
            os.close(self._fd)
            raise ConfigError(f"{path} is neither a block device nor a file")
        # Some kernels open a device that is write-protected.
        if self._block and any(fcntl.ioctl(self._fd, _IS_READ_ONLY, bytes(4))):
            os.close(self._fd)
            raise ConfigError(*_explain(self._name, OSError(errno.EROFS, "")))
        if size is not None:
            try:
                os.ftruncate(self._fd, size)
                os.fchmod(self._fd, 0o600)
            except OSError as error:
                os.close(self._fd)
                raise ConfigError(*_explain(self._name, error)) from None

    @property
    def name(self) -> str:
        """Name for people: a path."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes that it holds, or says it holds."""
        return os.lseek(self._fd, 0, os.SEEK_END)

    @property
    def direct(self) -> bool:
        """Whether it is written without the kernel's cache."""
        return self._direct

    def read(self, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset` on; returns how many there were."""
        done = 0
        while done < len(into):
            self._set_direct((offset + done) % ALIGNMENT == 0 and len(into) % ALIGNMENT == 0)
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, offset: int, data: memoryview) -> None:
        whole = len(data) // ALIGNMENT * ALIGNMENT if offset % ALIGNMENT == 0 else 0
        self._write_all(offset, data[:whole], direct=True)
        self._write_all(offset + whole, data[whole:], direct=False)

    def flush(self) -> None:
        """Return when everything written is on the card."""
        os.fsync(self._fd)

    def forget(self) -> None:
        """Drop what this machine remembers of the card's content, so that `read` asks the card.
        Call `flush` before."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if self._block:
            with contextlib.suppress(OSError):  # root only; O_DIRECT does not need it
                fcntl.ioctl(self._fd, _FLUSH_BUFFERS)

    def close(self) -> None:
        """Let go of the card; the kernel looks at its partitions again. Works twice."""
        if self._fd < 0:
            return
        if self._block:
            with contextlib.suppress(OSError):  # a loop device without partitions refuses
                fcntl.ioctl(self._fd, _RE_READ_PARTITIONS)
        os.close(self._fd)
        self._fd = -1

    def _write_all(self, offset: int, data: memoryview, *, direct: bool) -> None:
        if not data:
            return
        self._set_direct(direct)
        while data:
            done = os.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done

    def _set_direct(self, wanted: bool) -> None:
        """Turn O_DIRECT off for what is not aligned: the tail of an image."""
        if not self._direct:
            return
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if bool(flags & os.O_DIRECT) != wanted:
            if wanted:
                os.fsync(self._fd)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags ^ os.O_DIRECT)


def _open(path: Path, direct: bool, *, create: bool) -> tuple[int, bool]:
    """A descriptor, and whether it is one with O_DIRECT. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISBLK(path.stat().st_mode):
            flags |= os.O_EXCL  # the kernel refuses if anything uses the device
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o600), False


def _explain(name: str, error: OSError) -> tuple[str, str]:
    if error.errno == errno.EBUSY:
        return f"{name} is in use", "unmount its partitions (umount), and stop what holds it"
    if error.errno in (errno.EROFS, errno.ENOMEDIUM):
        return f"{name} is read-only or empty", "look at the card and its lock switch"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{name} may not be written by this user", "sudo, or the group that owns the device"
    return f"cannot open {name}: {error.strerror}", ""
