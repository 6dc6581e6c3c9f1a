"""Block maps (`.bmap`): which parts of an image matter, with a checksum of each."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from edgetrain.errors import ConfigError

_HASHES = {"sha256": hashlib.sha256, "sha1": hashlib.sha1, "md5": hashlib.md5}


@dataclass(frozen=True)
class Range:
    """Bytes from `begin` up to `end` that must be written; `digest` is of them ("" is unknown)."""

    begin: int
    end: int
    digest: str = ""


@dataclass(frozen=True)
class BlockMap:
    """The ranges of an image that must be written. The rest may keep whatever a card has there."""

    path: Path
    size: int
    """Bytes of the image."""
    ranges: tuple[Range, ...]
    """Ranges in order, apart from each other."""
    kind: str = "sha256"
    """Kind of the digests: sha256, sha1 or md5."""

    @property
    def mapped(self) -> int:
        """Bytes that must be written."""
        return sum(r.end - r.begin for r in self.ranges)


class RangeChecks:
    """Checks the ranges of a map while the image passes by, in pieces and in order."""

    def __init__(self, block_map: BlockMap) -> None:
        self._map = block_map
        self._at = 0
        self._hash = _HASHES[block_map.kind]()

    def parts(self, offset: int, data: memoryview) -> list[tuple[int, memoryview]]:
        """The parts of a piece of the image that must be written.

        Raises ConfigError when a range that ends here has another digest than the map says.
        """
        pieces = []
        ranges, end = self._map.ranges, offset + len(data)
        while self._at < len(ranges) and ranges[self._at].begin < end:
            this = ranges[self._at]
            low, high = max(this.begin, offset), min(this.end, end)
            part = data[low - offset : high - offset]
            pieces.append((low, part))
            self._hash.update(part)
            if high < this.end:
                break
            if this.digest and self._hash.hexdigest() != this.digest:
                raise ConfigError(
                    f"the image is not the one of {self._map.path}: bytes {this.begin} to "
                    f"{this.end} have another checksum",
                    "download both again",
                )
            self._at += 1
            self._hash = _HASHES[self._map.kind]()
        return pieces


def read(path: str | Path) -> BlockMap:
    """Read a block map, version 1.3 to 2.0. Raises ConfigError if it is damaged or none."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the block map {path}: {error.strerror}") from None
    try:
        root = ElementTree.fromstring(raw)  # noqa: S314  no entities are declared, none is expanded
        if root.tag != "bmap":
            raise ValueError(f"it begins with <{root.tag}>")
        # Its checksum of itself, which it has since version 1.4.
        said = (root.findtext("BmapFileChecksum") or root.findtext("BmapFileSHA1") or "").strip()
        if said:
            blank = raw.replace(said.encode(), b"0" * len(said))
            of_length = {64: hashlib.sha256, 40: hashlib.sha1, 32: hashlib.md5}
            if len(said) not in of_length or of_length[len(said)](blank).hexdigest() != said:
                raise ValueError("its own checksum is wrong")
        block, size = _number(root, "BlockSize"), _number(root, "ImageSize")
        if block < 512 or size < 0:
            raise ValueError(f"blocks of {block} bytes")
        kind = (root.findtext("ChecksumType") or "sha1").strip()
        if kind not in _HASHES:
            raise ValueError(f"checksums of the kind {kind}")
        ranges, last = [], 0
        for element in root.findall("BlockMap/Range"):
            first, _, until = (element.text or "").strip().partition("-")
            begin, end = int(first) * block, min((int(until or first) + 1) * block, size)
            if not last <= begin < end:
                raise ValueError(f"the range {element.text} is out of order or outside the image")
            last = end
            digest = (element.get("chksum") or element.get("sha1") or "").lower()
            ranges.append(Range(begin, end, digest))
        if not ranges:
            raise ValueError("it has no ranges")
        return BlockMap(path, size, tuple(ranges), kind)
    except (ElementTree.ParseError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged, or not a block map: {error}", "download it again, or remove it"
        ) from None


def beside(image: Path) -> Path | None:
    """The block map that lies beside an image: image.img.xz has image.img.xz.bmap or image.bmap."""
    stem = re.sub(r"\.(img|raw|bin|iso)?(\.(xz|gz|zst))?\Z", "", image.name)
    names = [
        f"{image.name}.bmap",
        f"{re.sub(r'[.](xz|gz|zst)$', '', image.name)}.bmap",
        f"{stem}.bmap",
    ]
    return next((image.with_name(n) for n in names if image.with_name(n).is_file()), None)


def digest_beside(image: Path) -> str:
    """The SHA-256 that lies beside an image, in image.img.xz.sha256 (as sha256sum writes it)."""
    path = image.with_name(f"{image.name}.sha256")
    if not path.is_file():
        return ""
    match = re.match(r"([0-9a-fA-F]{64})\b", path.read_text(encoding="utf-8", errors="replace"))
    if not match:
        raise ConfigError(f"{path} does not begin with a SHA-256", "download it again")
    return match[1].lower()


def _number(root: ElementTree.Element, name: str) -> int:
    return int((root.findtext(name) or "").strip())
