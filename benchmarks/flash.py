"""How fast cards are written, as ratios to a plain copy of the same blocks in the same run.

Writes to files, with O_DIRECT where it can (TMPDIR says where; on an SD card the card is the
limit). Also: what a second writing writes of a card that has the image, and of one in which 40 MB
were changed; and what personalising a card takes: all files of its boot partition, with a worker
archive of 120 MB, written and read back (needs mtools).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import Measured, measure

from edgetrain.provisioning.cards import personal, writing
from edgetrain.provisioning.cards.bootfiles import BootFiles
from edgetrain.provisioning.cards.looking import CLOUD_INIT, Partition
from edgetrain.provisioning.cards.medium import FileMedium, aligned
from edgetrain.provisioning.cards.source import CHUNK, Source

MB = 1 << 20
SIZE = 256 * MB


def make_image(path: Path, size: int) -> None:
    """An image of noise behind an MBR."""
    noise = random.Random(0).randbytes(8 * MB)
    head = bytearray(noise[:512])
    head[446:510] = bytes(64)
    head[450], head[454:458] = 0x0C, (8192).to_bytes(4, "little")
    head[458:462] = (size // 512 - 8192).to_bytes(4, "little")
    head[510:] = b"\x55\xaa"
    with path.open("wb") as file:
        for at in range(0, size, len(noise)):
            file.write(at.to_bytes(8, "little") + noise[8 : min(len(noise), size - at)])
        file.seek(0)
        file.write(head)


def plain_copy(image: Path, card: Path, size: int) -> float:
    """Seconds of read, write, read, write, fsync, without looking at anything."""
    began = time.monotonic()
    source, medium = Source(image), FileMedium(card)
    for offset, data in source.chunks():
        medium.write(offset, data)
    medium.flush()
    medium.close()
    source.close()
    return time.monotonic() - began


def plain_read(card: Path, size: int) -> float:
    """Seconds of reading a card, without looking at anything."""
    medium, buffer = FileMedium(card), aligned(CHUNK)
    medium.forget()
    began = time.monotonic()
    for offset in range(0, size, CHUNK):
        medium.read(offset, buffer)
    medium.close()
    return time.monotonic() - began


def flash(image: Path, cards: list[Path]) -> tuple[float, float, list[writing.CardState]]:
    """Seconds of writing and of reading back, of the slower card."""
    media = [FileMedium(card) for card in cards]
    source = Source(image)
    try:
        done = writing.write(source, media, probe_size=False)
    finally:
        source.close()
        for medium in media:
            medium.close()
    assert all(card.ok for card in done.cards), [card.error for card in done.cards]
    found = list(done.cards)
    return max(c.write_s for c in found), max(c.check_s for c in found), found


def blank(cards: list[Path]) -> None:
    """Take the partition table away, so that everything is written."""
    for card in cards:
        with card.open("r+b") as file:
            file.write(bytes(MB))
            file.flush()
            os.fsync(file.fileno())


WORKER_MB = 120
"""Of the archive for Raspberry Pi OS 13 with torch 2.9.1, about."""
FIRST = 4 * MB
"""Where the boot partition begins."""


def make_boot_partition(card: Path, worker: Path) -> None:
    """A file with a boot partition as Raspberry Pi OS has it, and a worker archive of noise."""
    noise = random.Random(1).randbytes(8 * MB)
    worker.write_bytes(noise * (WORKER_MB // 8))
    with card.open("wb") as file:
        file.truncate(FIRST + 512 * MB)
    words = ["mformat", "-i", f"{card}@@{FIRST}", "-F", "-T", str(512 * MB // 512), "-h", "64"]
    subprocess.run([*words, "-s", "32", "::"], check=True, env={"MTOOLSRC": "/dev/null"})
    line = {"cmdline.txt": b"console=tty1 root=PARTUUID=1-02 rootwait\n"}
    BootFiles(str(card), Partition(1, FIRST, 512 * MB)).write(line)


def cpu() -> float:
    """CPU seconds of this process and of those it waited for."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def personalise(card: Path, worker: Path) -> tuple[float, float]:
    """Seconds, and CPU seconds, of writing and reading back what makes a card one device's."""
    began, cpu_before = time.monotonic(), cpu()
    device = personal.Personal(
        "pi-0", "fleet", ("ssh-ed25519 AAAA me",), personal.DeviceNetwork(), "i"
    )
    found: dict[str, bytes | Path] = {**personal.files(device, CLOUD_INIT)}
    found |= {"edgetrain/worker.tar": worker, "edgetrain/token": b"t" * 96}
    boot, medium = BootFiles(str(card), Partition(1, FIRST, 512 * MB)), FileMedium(card)
    before = boot.read("cmdline.txt") or b""
    line = personal.command_line(before.decode(), device, CLOUD_INIT)
    found["cmdline.txt"] = line.encode()
    boot.write(found)
    medium.flush()
    medium.forget()
    boot.check(found)
    medium.close()
    return time.monotonic() - began, cpu() - cpu_before


def written(image: Path, cards: list[Path], size: int) -> dict[str, float]:
    """Copied, written and read back, once."""
    at = cpu()
    copied = plain_copy(image, cards[0], size)
    copied_cpu, at = cpu() - at, cpu()
    read = plain_read(cards[0], size)
    read_cpu = cpu() - at
    blank(cards)
    at = cpu()
    one, checked, _ = flash(image, cards[:1])
    one_cpu = cpu() - at
    blank(cards)
    two, _, _ = flash(image, cards)
    _, _, again = flash(image, cards[:1])
    with cards[0].open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(40 * MB))
        file.flush()
        os.fsync(file.fileno())
    _, _, changed = flash(image, cards[:1])
    return {
        "plain copy, MB/s": size / copied / 1e6,
        "writing / plain copy": one / copied,
        "reading back / plain read": checked / read,
        "plain copy and read, CPU s": copied_cpu + read_cpu,
        "writing and reading back, CPU s": one_cpu,
        "two cards / one": two / one,
        "written again, MB": again[0].written / 1e6,
        "written after 40 MB changed, MB": changed[0].written / 1e6,
    }


def measured() -> Iterator[Measured]:
    """Write cards of noise; personalise one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        image, cards = folder / "os.img", [folder / "a.img", folder / "b.img"]
        make_image(image, SIZE)
        for card in cards:
            FileMedium(card, SIZE).close()
            plain_copy(image, card, SIZE)  # allocates its blocks
        yield measure(f"an image of {SIZE / 1e6:.0f} MB", lambda: written(image, cards, SIZE), 5)
        if shutil.which("mformat"):
            boot, worker = folder / "boot.img", folder / "worker.tar"
            make_boot_partition(boot, worker)

            def personalised() -> dict[str, float]:
                return dict(zip(("seconds", "CPU seconds"), personalise(boot, worker), strict=True))

            yield measure("personalising a card", personalised, 5)
