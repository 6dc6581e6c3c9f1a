"""Writing cards: what arrives, what is refused, and that nothing half-written boots."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import hashlib
import importlib
import importlib.util
import lzma
import os
import subprocess
import threading
from pathlib import Path

import media
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media import MB, MemoryMedium, block_map, image
from test_medium import loop_device

from edgetrain.errors import ConfigError
from edgetrain.provisioning.cards import blockmap, writing
from edgetrain.provisioning.cards.medium import FileMedium
from edgetrain.provisioning.cards.source import CHUNK, Source, partition_starts

IMAGE = image()
SIZE = len(IMAGE)


@pytest.fixture
def raw(tmp_path) -> Path:
    path = tmp_path / "os.img"
    path.write_bytes(IMAGE)
    return path


def write(path: Path, *cards: object, bmap: Path | None = None, sha256: str = "", **more):
    source = Source(path, sha256)
    try:
        return writing.write(source, cards, blockmap.read(bmap) if bmap else None, **more)
    finally:
        source.close()


def blank(card: MemoryMedium) -> bool:
    """Whether the first sector is blank: such a card does not boot."""
    return bytes(card.content[:512]) == bytes(512)


@pytest.mark.parametrize("failing", [None, 9 * MB])
def test_progress_of_four_cards_never_goes_back(raw, failing):
    """A card that fails in the middle of reading back counts as done."""
    seen: list[tuple[str, float]] = []
    cards = [MemoryMedium(SIZE) for _ in range(4)]
    if failing:
        cards[2] = media.LyingMedium(SIZE, failing)
    write(raw, *cards, progress=lambda p: seen.append((p.phase, p.share)), probe_size=False)
    phases = [phase for phase, _ in seen]
    assert list(dict.fromkeys(phases)) == ["writing", "checking", "finishing"]
    for phase in set(phases):
        shares = [share for p, share in seen if p == phase]
        assert shares == sorted(shares), phase
        assert shares[-1] == 1.0


# -- what arrives ---------------------------------------------------------------------------------


def packed(kind: str, folder: Path) -> Path:
    path = folder / f"os.img{'.' * bool(kind)}{kind}"
    path.write_bytes(packed_bytes(kind))
    return path


@functools.cache
def xz_streams() -> list[bytes]:
    return [lzma.compress(part, preset=0) for part in (IMAGE[: 5 * MB], IMAGE[5 * MB :])]


@functools.cache
def packed_bytes(kind: str) -> bytes:
    if kind == "xz":  # two streams, as xz -T writes them
        return b"".join(xz_streams())
    if kind == "gz":
        return gzip.compress(IMAGE, 1)
    if kind == "zst":
        if importlib.util.find_spec("compression"):  # Python 3.14
            zstd = importlib.import_module("compression.zstd")
            options = {zstd.CompressionParameter.checksum_flag: 1}  # as the program zstd does
            found: bytes = zstd.compress(IMAGE, options=options)
        else:
            package = pytest.importorskip("zstandard")
            found = package.ZstdCompressor(write_checksum=True).compress(IMAGE)
        return found
    return IMAGE


@pytest.mark.parametrize("kind", ["", "xz", "gz", "zst"])
@pytest.mark.parametrize("fill", [0, 0xFF], ids=["new card", "used card"])
def test_a_card_holds_the_image_bit_for_bit(tmp_path, kind, fill):
    card = MemoryMedium(16 * MB, fill)
    done = write(packed(kind, tmp_path), card)
    assert done.cards[0].ok, done.cards[0].error
    assert bytes(card.content[:SIZE]) == IMAGE
    assert done.size == SIZE


def skippable(number: int, size: int) -> bytes:
    return bytes([0x50 + number]) + b"\x2a\x4d\x18" + size.to_bytes(4, "little") + bytes(size)


def zst(content: bytes, **how: bool) -> bytes:
    package = pytest.importorskip("zstandard")
    found: bytes = package.ZstdCompressor(**how).compress(content)
    return found


RARE = {
    "two frames": lambda: zst(IMAGE[: 5 * MB]) + zst(IMAGE[5 * MB :]),
    "frames that skip": lambda: (
        skippable(0, 9) + zst(IMAGE[:MB]) + skippable(15, 0) + zst(IMAGE[MB:]) + skippable(7, 5000)
    ),
    "frames without a size": lambda: zst(IMAGE, write_content_size=False) + zst(b""),
    "frames with checksums": lambda: (
        zst(IMAGE[:7], write_checksum=True) + zst(IMAGE[7:], write_checksum=True)
    ),
    "streams with padding": lambda: bytes(8).join((*xz_streams(), lzma.compress(b""), bytes(4096))),
}


@pytest.mark.parametrize("how", RARE)
def test_rare_forms_that_are_legal_are_the_image(tmp_path, how):
    path = tmp_path / "os.img.xz"
    path.write_bytes(RARE[how]())
    with contextlib.closing(Source(path)) as source:
        assert source.size == (None if how == "frames without a size" else SIZE)
    card = MemoryMedium(16 * MB)
    assert write(path, card).cards[0].ok
    assert bytes(card.content[:SIZE]) == IMAGE
    whole = len(path.read_bytes().rstrip(b"\0")) if how == "streams with padding" else None
    for keep in (0.3, 0.999):
        path.write_bytes(RARE[how]()[: int((whole or path.stat().st_size) * keep)])
        refused(path, "cut short")


def test_zeros_are_not_written_where_there_are_zeros(raw):
    card = MemoryMedium(16 * MB)
    done = write(raw, card)
    assert done.mapped < 6 * MB
    assert done.cards[0].written == done.mapped


def test_a_block_map_leaves_the_rest_alone(raw, tmp_path):
    bmap = tmp_path / "os.img.bmap"
    bmap.write_text(
        block_map(IMAGE, [(0, 300), (1024, 1279), (SIZE // 4096 - 25, SIZE // 4096 - 1)])
    )
    card = MemoryMedium(16 * MB, 0xAA)
    done = write(raw, card, bmap=bmap)
    assert done.cards[0].ok
    assert card.content[: 301 * 4096] == IMAGE[: 301 * 4096]
    assert set(card.content[301 * 4096 : 1024 * 4096]) == {0xAA}
    assert card.content[SIZE - 25 * 4096 : SIZE] == IMAGE[SIZE - 25 * 4096 :]
    assert done.mapped == (301 + 256 + 25) * 4096


@pytest.mark.parametrize("gpt", [False, True])
@pytest.mark.parametrize("start", [32256 // 512 * 512, 1 * MB, 4 * MB])
def test_partition_tables(gpt, start):
    content = image(start=start, gpt=gpt)
    assert partition_starts(content[:CHUNK]) == (start,)
    assert partition_starts(content[:100]) == ()
    assert partition_starts(bytes(4096)) == ()


def test_several_cards_get_the_same(raw):
    cards = [MemoryMedium(16 * MB, fill) for fill in (0, 1, 2)]
    done = write(raw, *cards)
    assert all(card.ok for card in done.cards)
    assert all(card.content[:SIZE] == IMAGE for card in cards)


def test_a_file_with_a_last_block_that_is_not_whole(tmp_path):
    content = image(SIZE + 512)
    (tmp_path / "odd.img").write_bytes(content)
    medium = FileMedium(tmp_path / "card.img", len(content))
    done = write(tmp_path / "odd.img", medium, probe_size=False)
    medium.close()
    assert done.cards[0].ok, done.cards[0].error
    assert (tmp_path / "card.img").read_bytes() == content


@pytest.mark.real
def test_a_loop_device(raw, tmp_path):
    (tmp_path / "card").write_bytes(bytes(16 * MB))
    device = loop_device(tmp_path / "card")
    try:
        medium = FileMedium(device)
        done = write(raw, medium)
        medium.close()
        assert done.cards[0].ok, done.cards[0].error
        assert (tmp_path / "card").read_bytes()[:SIZE] == IMAGE
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


# -- the first bytes last -------------------------------------------------------------------------


def test_the_first_sector_is_written_last_after_everything_was_read_back(raw):
    card = MemoryMedium(16 * MB, 0xAA)
    states = []

    def finish(found: writing.CardState, head: memoryview) -> None:
        states.append((found.state, found.checked, blank(card), bytes(head[510:512])))

    done = write(raw, card, finish=finish)
    assert states == [("finishing", SIZE - len(IMAGE[: 1 * MB]), True, b"\x55\xaa")]
    assert card.writes[0][0] == 0
    assert card.writes[-1] == (0, 4096)
    assert done.cards[0].ok


def test_a_partition_that_begins_early_is_not_held_back(tmp_path):
    content = image(start=64 << 10)
    (tmp_path / "os.img").write_bytes(content)
    card = MemoryMedium(16 * MB)
    seen = []
    write(tmp_path / "os.img", card, finish=lambda c, head: seen.append(len(head)))
    assert seen == [64 << 10]
    assert card.content[:SIZE] == content


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_killed_at_any_write_it_does_not_boot_and_the_next_run_goes_on(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("killed") / "os.img"
    path.write_bytes(IMAGE)
    whole = MemoryMedium(16 * MB, 0xFF)
    write(path, whole)
    stop = data.draw(st.integers(1, len(whole.writes) - 1))
    card = media.PulledMedium(16 * MB, stop)
    card.content[:] = b"\xff" * (16 * MB)
    done = write(path, card)
    assert not done.cards[0].ok
    assert "taken out" in done.cards[0].error
    assert blank(card)
    again = MemoryMedium(16 * MB)
    again.content[:] = card.content
    second = write(path, again)
    assert second.cards[0].ok
    assert again.content[:SIZE] == IMAGE
    assert second.cards[0].compare
    written_first = sum(length for _, length in card.writes[2:])
    assert second.cards[0].skipped >= written_first - 3 * MB


# -- delta ----------------------------------------------------------------------------------------


def test_a_card_written_again_gets_only_what_differs(raw):
    card = MemoryMedium(16 * MB)
    write(raw, card)
    card.content[5 * MB] ^= 1
    card.content[SIZE - 10] ^= 1
    done = write(raw, card)
    assert done.cards[0].ok
    assert card.content[:SIZE] == IMAGE
    assert done.cards[0].written <= 1 * MB + CHUNK + 4096 * 100
    assert done.cards[0].skipped > 6 * MB


def test_another_image_is_written_whole(raw):
    card = MemoryMedium(16 * MB)
    write(raw, card)
    raw.write_bytes(image(start=2 * MB, seed=1))
    done = write(raw, card)
    assert not done.cards[0].compare
    assert card.content[:SIZE] == image(start=2 * MB, seed=1)


# -- cards that misbehave -------------------------------------------------------------------------


@pytest.mark.parametrize("where", [2 * MB + 5, SIZE - 1, 3 * MB + 10])
def test_a_card_that_changes_a_byte_is_refused(raw, where):
    liar, honest = media.LyingMedium(16 * MB, where), MemoryMedium(16 * MB)
    done = write(raw, liar, honest)
    assert "does not keep what is written" in done.cards[0].error
    assert blank(liar)
    assert done.cards[1].ok


def test_a_card_that_changes_its_first_bytes_is_refused(raw):
    liar = media.LyingMedium(16 * MB, 100)
    done = write(raw, liar, probe_size=False)
    assert "its first bytes read back" in done.cards[0].error
    assert blank(liar)


@pytest.mark.parametrize("real", [13, 15, 20, 31])
def test_a_card_that_wraps_around_is_refused(raw, real, monkeypatch):
    monkeypatch.setattr(writing, "PROBE_EVERY", 1 * MB)
    card = media.WrappingMedium(32 * MB, real * MB)
    done = write(raw, card)
    assert "smaller than it says" in done.cards[0].error
    assert blank(card)


def test_a_card_that_wraps_around_within_the_image_is_refused(raw):
    card = media.WrappingMedium(SIZE, 8 * MB)
    done = write(raw, card)
    assert not done.cards[0].ok
    assert blank(card)


def test_a_card_that_is_taken_out_does_not_stop_the_others(raw):
    pulled, other = media.PulledMedium(16 * MB, 4), MemoryMedium(16 * MB)
    done = write(raw, pulled, other)
    assert done.cards[0].error == "it was taken out"
    assert blank(pulled)
    assert done.cards[1].ok
    assert other.content[:SIZE] == IMAGE


def test_a_card_that_accepts_nothing_does_not_stop_the_others(raw, monkeypatch):
    monkeypatch.setattr(writing, "STALL_S", 0.0)
    monkeypatch.setattr(writing, "QUEUED", 1)
    release = threading.Event()
    stuck = media.CallingMedium(16 * MB, lambda at: at and release.wait(20))
    other = MemoryMedium(16 * MB)

    def progress(found: writing.CardProgress) -> None:
        if found.cards[0].error:
            release.set()

    done = write(raw, stuck, other, progress=progress, probe_size=False)
    assert "accepted nothing" in done.cards[0].error
    assert blank(stuck)
    assert done.cards[1].ok, done.cards[1].error


def test_a_card_that_is_too_small(raw):
    small = MemoryMedium(SIZE - 4096, 0xAA)
    done = write(raw, small, MemoryMedium(SIZE))
    assert done.cards[0].error == f"it has {SIZE - 4096} bytes, and the image has {SIZE}"
    assert set(small.content) == {0xAA}, "nothing of it was touched"
    assert done.cards[1].ok


def test_a_finish_that_fails_leaves_a_card_that_does_not_boot(raw):
    def finish(card: writing.CardState, head: memoryview) -> None:
        raise ConfigError("no space on the boot partition")

    card = MemoryMedium(16 * MB)
    done = write(raw, card, finish=finish)
    assert done.cards[0].error == "no space on the boot partition"
    assert blank(card)


# -- images that are not what they should be ------------------------------------------------------


def refused(path: Path, said: str, **more) -> None:
    card = MemoryMedium(16 * MB, 0xAA)
    with pytest.raises(ConfigError, match=said) as caught:
        write(path, card, **more)
    assert "\n" not in str(caught.value)
    assert card.content[:512] in (bytes(512), b"\xaa" * 512), "blank, or never touched"


def test_a_wrong_checksum(raw):
    write(raw, MemoryMedium(16 * MB), sha256=hashlib.sha256(IMAGE).hexdigest())
    refused(raw, "is not the image that was meant", sha256="0" * 64)


def test_a_checksum_may_be_of_the_packed_file_or_of_the_image(tmp_path):
    path = packed("xz", tmp_path)
    for content in (path.read_bytes(), IMAGE):
        write(path, MemoryMedium(16 * MB), sha256=hashlib.sha256(content).hexdigest())
    refused(path, "is not the image that was meant", sha256="0" * 64)


@pytest.mark.parametrize("kind", ["xz", "gz", "zst"])
@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_truncated_image(tmp_path, kind, keep):
    path = packed(kind, tmp_path)
    os.truncate(path, int(path.stat().st_size * keep))
    refused(path, "cut short")


def test_a_truncated_raw_image_with_a_block_map(raw, tmp_path):
    bmap = tmp_path / "os.img.bmap"
    bmap.write_text(block_map(IMAGE, [(0, SIZE // 4096 - 1)]))
    os.truncate(raw, SIZE // 2)
    refused(raw, f"is for an image of {SIZE} bytes", bmap=bmap)


@pytest.mark.parametrize("kind", ["xz", "gz", "zst"])
def test_a_damaged_image(tmp_path, kind):
    path = packed(kind, tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = os.urandom(64)
    path.write_bytes(content)
    refused(path, "is damaged|cut short")


@pytest.mark.parametrize("content", [b"", b"hello\n" * 10_000, bytes(2 * MB)], ids=len)
def test_a_file_that_is_not_an_image(tmp_path, content):
    (tmp_path / "notes.img").write_bytes(content)
    refused(tmp_path / "notes.img", "is not a disk image")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04 and more", "is a zip archive"),
        (bz2.compress(b"x"), "is packed with bzip2"),
        (lzma.compress(b"x", lzma.FORMAT_ALONE), "is packed with lzma"),
        (b"7z\xbc\xaf\x27\x1c", "is a 7z archive"),
        (b"\x04\x22\x4d\x18", "is packed with lz4"),
    ],
    ids=["zip", "bz2", "lzma", "7z", "lz4"],
)
def test_a_file_that_is_packed_otherwise_is_named(tmp_path, content, said):
    (tmp_path / "os.img").write_bytes(content)
    with pytest.raises(ConfigError, match=f"{said}.*unpack it, and give the image inside"):
        Source(tmp_path / "os.img")


def test_a_disk_of_larger_sectors_is_named(tmp_path):
    (tmp_path / "os.img").write_bytes(bytes(510) + b"\x55\xaa" + bytes(3584) + b"EFI PART" + IMAGE)
    refused(tmp_path / "os.img", "sectors of 4096 bytes, and cards have 512")


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the image"):
        Source(tmp_path / "none.img")


def test_a_block_map_of_another_image(raw, tmp_path):
    bmap = tmp_path / "os.img.bmap"
    bmap.write_text(block_map(image(seed=9), [(0, SIZE // 4096 - 1)]))
    refused(raw, "have another checksum", bmap=bmap)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<BlockSize> 4096", "<BlockSize> x"),
        (" 0-9 ", " 9-0 "),
        (" 0-9 ", " 0-8 "),
        (" 0-9 ", " 0-99999 "),
        ("<bmap", "<bmapp"),
        ("</bmap>", ""),
    ],
)
def test_a_damaged_block_map(raw, tmp_path, old, new):
    bmap = tmp_path / "os.img.bmap"
    text = block_map(IMAGE, [(0, 9)])
    assert old in text
    bmap.write_text(text.replace(old, new))
    refused(raw, "is damaged, or not a block map", bmap=bmap)


def test_what_lies_beside_an_image_is_found(tmp_path):
    packed_image = tmp_path / "os.img.xz"
    assert blockmap.beside(packed_image) is None
    assert blockmap.digest_beside(packed_image) == ""
    for name in ("os.bmap", "os.img.bmap", "os.img.xz.bmap"):
        (tmp_path / name).write_text("")
        assert blockmap.beside(packed_image) == tmp_path / name
    (tmp_path / "os.img.xz.sha256").write_text(f"{'AB' * 32}  os.img.xz\n")
    assert blockmap.digest_beside(packed_image) == "ab" * 32
    (tmp_path / "os.img.xz.sha256").write_text("<html>")
    with pytest.raises(ConfigError, match="does not begin with a SHA-256"):
        blockmap.digest_beside(packed_image)
