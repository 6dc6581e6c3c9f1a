"""Cards for tests: in memory, honest and otherwise; and images for them."""

from __future__ import annotations

import errno
import hashlib
import random
import struct
from collections.abc import Callable

KB, MB = 1 << 10, 1 << 20


class MemoryMedium:
    """A card in memory. `flushed` is what a loss of power leaves: what was not flushed is lost."""

    def __init__(self, size: int, fill: int = 0, name: str = "memory") -> None:
        self.name = name
        self.content = bytearray([fill]) * size
        self.writes: list[tuple[int, int]] = []
        self.flushes = 0
        self.closed = False

    @property
    def size(self) -> int:
        return len(self.content)

    def read(self, offset: int, into: memoryview) -> int:
        found = self.content[offset : offset + len(into)]
        into[: len(found)] = found
        return len(found)

    def write(self, offset: int, data: memoryview) -> None:
        if offset + len(data) > self.size:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.writes.append((offset, len(data)))
        self.content[offset : offset + len(data)] = data

    def flush(self) -> None:
        self.flushes += 1

    def forget(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class LyingMedium(MemoryMedium):
    """Changes one byte, after it was written and before it is read back."""

    def __init__(self, size: int, where: int) -> None:
        super().__init__(size, name="liar")
        self._where = where

    def forget(self) -> None:
        self.content[self._where] ^= 1


class WrappingMedium(MemoryMedium):
    """Says it has `size` bytes, and has `real`: what is written behind them comes round again."""

    def __init__(self, size: int, real: int) -> None:
        super().__init__(real, name="false")
        self._says = size

    @property
    def size(self) -> int:
        return self._says

    def read(self, offset: int, into: memoryview) -> int:
        return super().read(offset % len(self.content), into)

    def write(self, offset: int, data: memoryview) -> None:
        offset %= len(self.content)
        here = data[: len(self.content) - offset]
        self.content[offset : offset + len(here)] = here
        if len(here) < len(data):
            self.content[: len(data) - len(here)] = data[len(here) :]


class PulledMedium(MemoryMedium):
    """Is taken out after `writes` writes."""

    def __init__(self, size: int, writes: int) -> None:
        super().__init__(size, name="pulled")
        self._left = writes

    def write(self, offset: int, data: memoryview) -> None:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENODEV, "No such device")
        super().write(offset, data)


class CallingMedium(MemoryMedium):
    """Calls a function before each write."""

    def __init__(self, size: int, call: Callable[[int], None]) -> None:
        super().__init__(size, name="calling")
        self._call = call

    def write(self, offset: int, data: memoryview) -> None:
        self._call(offset)
        super().write(offset, data)


def image(size: int = 12 * MB, start: int = 4 * MB, *, gpt: bool = False, seed: int = 0) -> bytes:
    """A disk image: a partition table, noise in some places, zeros in the others."""
    content = bytearray(size)
    noise = random.Random(seed).randbytes(1 * MB)
    content[:440] = noise[:440]
    if gpt:
        struct.pack_into("<4xB3xII", content, 446, 0xEE, 1, size // 512 - 1)
        content[512:520] = b"EFI PART"
        struct.pack_into("<II", content, 512 + 80, 128, 128)
        content[1024:1040] = b"t" * 16
        struct.pack_into("<QQ", content, 1024 + 32, start // 512, size // 512 - 1)
    else:
        struct.pack_into("<4xB3xII", content, 446, 0x0C, start // 512, (size - start) // 512)
    content[510:512] = b"\x55\xaa"
    for begin in (2 * MB, start, start + 3 * MB + 64 * KB, size - 100 * KB):
        part = noise[: size - begin]
        content[begin : begin + len(part)] = part
    return bytes(content)


def block_map(content: bytes, ranges: list[tuple[int, int]], block: int = 4096) -> str:
    """A .bmap of these ranges of blocks (first and last), with checksums, as bmaptool writes it."""
    lines = []
    for first, last in ranges:
        digest = hashlib.sha256(content[first * block : (last + 1) * block]).hexdigest()
        lines.append(f'<Range chksum="{digest}"> {first}-{last} </Range>')
    blank = "0" * 64
    text = (
        f'<?xml version="1.0" ?>\n<bmap version="2.0">\n<ImageSize> {len(content)} </ImageSize>\n'
        f"<BlockSize> {block} </BlockSize>\n<BlocksCount> {len(content) // block} </BlocksCount>\n"
        f"<ChecksumType> sha256 </ChecksumType>\n<BmapFileChecksum> {blank} </BmapFileChecksum>\n"
        f"<BlockMap>\n{chr(10).join(lines)}\n</BlockMap>\n</bmap>\n"
    )
    return text.replace(blank, hashlib.sha256(text.encode()).hexdigest(), 1)
