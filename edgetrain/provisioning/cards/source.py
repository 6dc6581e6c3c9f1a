"""An image file as a stream of its bytes: raw, xz, gz or zst, checked while it is read."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import lzma
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from edgetrain.errors import ConfigError
from edgetrain.provisioning.cards.medium import aligned

CHUNK = 4 << 20
"""Bytes read at a time."""
SECTOR = 512
SECTORS_OF_4096 = "is for disks with sectors of 4096 bytes, and cards have 512"
_XZ, _ZST, _GZ = b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_OTHERS = {
    b"PK\x03\x04": "a zip archive", b"BZh": "packed with bzip2", b"]\0\0": "packed with lzma",
    b"7z\xbc\xaf": "a 7z archive", b"\x04\x22\x4d\x18": "packed with lz4", b"Rar!": "a rar archive",
}  # fmt: skip
"""Beginnings of files that are not read."""


class Source:
    """An open image. Iterate over `chunks` once; then `finish` says whether it was the right one.

    Raises ConfigError for a file that cannot be read or decoded, with the file's name.
    """

    def __init__(self, path: str | Path, sha256: str = "") -> None:
        """Open the image. sha256: of the file as it is, or of what it decodes to; "" is unknown."""
        self.path = Path(path)
        self._wanted = sha256
        try:
            self.packed_size = self.path.stat().st_size
            with self.path.open("rb") as file:
                self.kind = _kind(file.read(6), self.path)
            self.size = _decoded_size(self.path, self.kind)
            """Bytes of the decoded image; None: not known before decoding."""
            raw = self.path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read the image {path}: {error.strerror}") from None
        self._file = _Counted(raw, hash_it=bool(sha256))
        self._stream: Any = self._file
        if self.kind == "xz":
            self._stream = _XzStreams(self._file)
        elif self.kind == "gz":
            self._stream = gzip.GzipFile(fileobj=self._file)  # type: ignore[call-overload]
        elif self.kind == "zst":
            self._stream = _zstd(self._file)
        self._decoded = hashlib.sha256()
        self._at = 0

    @property
    def consumed(self) -> float:
        """The share of the file that has been read, from 0 to 1."""
        return self._file.position / self.packed_size if self.packed_size else 1.0

    @property
    def position(self) -> int:
        return self._at

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes), in order, CHUNK bytes at a time; the last may be shorter.

        Each is a buffer of its own that begins on a page.
        """
        while True:
            buffer, length = aligned(CHUNK), 0
            with _reading(self.path):
                while length < len(buffer) and (n := self._stream.readinto(buffer[length:])):
                    length += n
            if not length:
                return
            data = buffer[:length]
            if self._wanted:
                self._decoded.update(data)
            at, self._at = self._at, self._at + length
            yield at, data

    def finish(self) -> None:
        """Check length and SHA-256 of all that was read. Raises ConfigError."""
        if self.size is not None and self._at != self.size:
            raise ConfigError(
                f"{self.path} is cut short: {self._at} of {self.size} bytes", "download it again"
            )
        if not self._wanted:
            return
        with _reading(self.path):
            digest = self._file.digest()
        if self._wanted not in (digest, self._decoded.hexdigest()):
            raise ConfigError(
                f"{self.path} is not the image that was meant: its SHA-256 is {digest}, wanted is "
                f"{self._wanted}",
                "download it again",
            )

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.close()
        self._file.close()


def partition_starts(head: memoryview | bytes) -> tuple[int, ...]:
    """Beginnings of the partitions, in bytes from the beginning of an image; () without a table.

    head: at least 17 KiB, which hold a GPT; an MBR is in the first sector.
    """
    if len(head) < SECTOR or bytes(head[510:512]) != b"\x55\xaa":
        return ()
    entries = [struct.unpack_from("<4xB3xII", head, 446 + 16 * i) for i in range(4)]
    if any(kind == 0xEE for kind, _, _ in entries):
        if bytes(head[SECTOR : SECTOR + 8]) != b"EFI PART":
            return ()
        count, length = struct.unpack_from("<II", head, SECTOR + 80)
        places = range(2 * SECTOR, min(2 * SECTOR + count * length, len(head) - 40), length or 128)
        rows = [
            (bytes(head[p : p + 16]), struct.unpack_from("<Q", head, p + 32)[0]) for p in places
        ]
        return tuple(sorted(SECTOR * first for kind, first in rows if kind != bytes(16)))
    return tuple(sorted(SECTOR * first for kind, first, sectors in entries if kind and sectors))


class _Counted:
    """A file that counts what is read from it, and hashes it if asked to."""

    def __init__(self, file: IO[bytes], *, hash_it: bool) -> None:
        self._file = file
        self._hash = hashlib.sha256() if hash_it else None
        self.position = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.position += len(data)
        if self._hash:
            self._hash.update(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        count = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self.position += count
        if self._hash:
            self._hash.update(buffer[:count])
        return int(count)

    def digest(self) -> str:
        """SHA-256 of the whole file: reads what the decoder left unread."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest() if self._hash else ""

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what decoders raise into one clear error."""
    try:
        yield
    except EOFError:
        raise ConfigError(f"{path} is cut short", "download it again") from None
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is damaged: {error}", "download it again") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("zstandard", "compression", "_zstd"):
            raise
        raise ConfigError(f"{path} is damaged: {error}", "download it again") from None


def _kind(magic: bytes, path: Path) -> str:
    for begin, kind in ((_XZ, "xz"), (_ZST, "zst"), (_GZ, "gz")):
        if magic.startswith(begin):
            return kind
    if _is_skippable(magic):
        return "zst"
    for begin, what in _OTHERS.items():
        if magic.startswith(begin):
            raise ConfigError(f"{path} is {what}", "unpack it, and give the image inside")
    return "raw"


def _is_skippable(magic: bytes) -> bool:
    """Whether it begins a frame of zstandard that decodes to nothing."""
    return magic[1:4] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5


class _XzStreams:
    """Decodes xz streams one behind the other, with zeros between them, which lzma takes for the
    end. Methods raise LZMAError, and EOFError for a stream that is cut short."""

    def __init__(self, file: _Counted) -> None:
        self._file = file
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readinto(self, buffer: memoryview) -> int:
        while True:
            stream, packed = self._stream, b""
            if stream.eof:
                packed = stream.unused_data.lstrip(b"\0")
                while not packed:
                    if not (more := self._file.read(CHUNK)):
                        return 0
                    packed = more.lstrip(b"\0")
                stream = self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif stream.needs_input and not (packed := self._file.read(1 << 16)):
                raise EOFError
            if data := stream.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)

    def close(self) -> None:
        """Nothing is held."""


def _zstd(file: _Counted) -> Any:
    """A reader of zstandard frames: the standard library's from Python 3.14 on, else a package."""
    with contextlib.suppress(ImportError):
        zstd = importlib.import_module("compression.zstd")
        return zstd.ZstdFile(file, options={zstd.DecompressionParameter.window_log_max: 31})
    try:
        package = importlib.import_module("zstandard")
    except ImportError:
        raise ConfigError(
            "reading a .zst image needs zstandard before Python 3.14", "pip install zstandard"
        ) from None
    unpacker = package.ZstdDecompressor(max_window_size=1 << 31)
    return unpacker.stream_reader(file, read_across_frames=True)


def _decoded_size(path: Path, kind: str) -> int | None:
    if kind == "raw":
        return path.stat().st_size
    if kind == "gz":
        return None
    with path.open("rb") as file:
        if kind == "zst":
            with _reading(path):
                return _zst_size(file)
        try:
            # The decoded size of an xz file: the sum of the index records of all its streams
            total, end = 0, file.seek(0, os.SEEK_END)
            while end > 0:
                file.seek(end - 12)
                footer = file.read(12)
                if footer[8:] == bytes(4):  # padding between streams
                    end -= 4
                    continue
                if footer[10:] != b"YZ":
                    return None
                length = (struct.unpack("<I", footer[4:8])[0] + 1) * 4
                file.seek(end - 12 - length)
                index = file.read(length)
                numbers = _varints(index[1:])
                packed = 0
                for _ in range(next(numbers)):
                    packed += (next(numbers) + 3) // 4 * 4
                    total += next(numbers)
                end -= 12 + length + packed + 12
            return total
        except (struct.error, IndexError, StopIteration, OSError):
            return None


def _zst_size(file: IO[bytes]) -> int | None:
    """The decoded size of a zstandard file: the sum of what its frames state; None if one does not.
    EOFError where it ends inside a frame, which decoders do not say; ConfigError."""
    total: int | None = 0
    at, end = 0, file.seek(0, os.SEEK_END)
    while at < end:
        file.seek(at)
        header = file.read(18)
        if _is_skippable(header):
            at += 8 + int.from_bytes(header[4:8], "little")
            continue
        if not header.startswith(_ZST):
            return None  # the decoder says what it is
        flags = int.from_bytes(header[4:5], "little")
        if flags & 3:
            raise ConfigError(
                f"{file.name} was packed with a dictionary", "unpack it with zstd -D DICTIONARY"
            )
        single = flags >> 5 & 1
        width = (single, 2, 4, 8)[flags >> 6]
        begins = 6 - single
        size = int.from_bytes(header[begins : begins + width], "little") + 256 * (width == 2)
        total = total + size if width and total is not None else None
        at += begins + width
        last = False
        while not last and at < end:
            file.seek(at)
            block = int.from_bytes(file.read(3), "little")
            last = bool(block & 1)
            at += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
        at += 4 * (flags >> 2 & 1) + (not last)
    if at > end:
        raise EOFError
    return total


def _varints(data: bytes) -> Iterator[int]:
    """Numbers of seven bits a byte, the least significant first."""
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if not byte & 128:
            yield value
            value = shift = 0
    raise IndexError("cut short")
