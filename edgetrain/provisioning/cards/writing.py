"""Write one image to several cards at once, read everything back, and make them bootable last.

The state of a card:

    state      event                          next       what is on the card
    begun      its first bytes are blanked    writing    no partition table: it does not boot
    writing    the image has passed by        checking   all of the image but its first bytes
    checking   every block reads back         finishing  the same, proved
    finishing  `finish` returns               done       partition table written and read back
    any        an error                       failed     no partition table, or the old card

A card that was written in part is known by a mark in its blank beginning. A card that has this
image's mark or partitions is read first and written only where it differs: resuming after an
interruption and writing a card again are the same thing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.provisioning.cards.blockmap import BlockMap, RangeChecks
from edgetrain.provisioning.cards.medium import ALIGNMENT, FileMedium, aligned, same
from edgetrain.provisioning.cards.source import (
    CHUNK,
    SECTOR,
    SECTORS_OF_4096,
    Source,
    partition_starts,
)

HELD_BACK = 1 << 20
"""Bytes at the beginning that are written last, unless a partition begins earlier."""
GRAIN = 64 << 10
"""Bytes: zeros are looked for in blocks of this size."""
QUEUED = 4
"""Chunks that a card may be behind the image."""
STALL_S = 60.0
"""Seconds after which a card that accepts nothing is given up."""
TIRED = 16
"""Chunks in a row that differ, after which a card is no longer compared."""
PROBE_EVERY = 1 << 30
"""Bytes between the places behind the image where a card proves that it has its size."""
_ZEROS = memoryview(bytes(CHUNK))
_MARK = b"edgetrain: written in part, image "


@dataclass(frozen=True)
class Chunk:
    """A part of the image: its bytes, or `length` zeros."""

    offset: int
    length: int
    data: memoryview | None = None
    digest: Future[bytes] | None = None
    """SHA-256 of the data; None for zeros. Computed beside the writing, in a thread of its own."""


@dataclass
class CardState:
    """One card and what became of it. `error` is "" while all is well."""

    medium: FileMedium
    state: str = "begun"
    error: str = ""
    written: int = 0
    """Bytes written, the first ones included."""
    skipped: int = 0
    """Bytes that were there already."""
    checked: int = 0
    """Bytes read back."""
    write_s: float = 0.0
    check_s: float = 0.0
    touched: bool = False
    """Whether anything was written to it."""
    compare: bool = False
    """Whether to read before writing: the card may have the image already."""
    probes: list[tuple[int, memoryview]] = field(default_factory=list, repr=False)
    """Blocks behind the image that prove the card's size, while it is written."""
    waiting: queue.Queue[Chunk | None] = field(default_factory=lambda: queue.Queue(QUEUED))

    @property
    def ok(self) -> bool:
        return self.state == "done"

    def fail(self, error: str) -> None:
        """Note why it cannot be used. Only the first reason counts."""
        self.error = self.error or error
        self.state = "failed"


@dataclass(frozen=True)
class CardProgress:
    """Progress: `phase` is "writing", "checking" or "finishing"; `share` from 0 to 1."""

    phase: str
    share: float
    cards: tuple[CardState, ...]
    seconds: float


@dataclass(frozen=True)
class Written:
    """The amount written: bytes of the image, of what had to be written, and the cards."""

    size: int
    mapped: int
    cards: tuple[CardState, ...]


Finish = Callable[[CardState, memoryview], None]
"""Called for each card that reads back, with the first bytes of the image, before these are
written. It may write to the medium, and raises EdgetrainError or OSError to give the card up."""


def write(
    source: Source,
    media: Sequence[FileMedium],
    block_map: BlockMap | None = None,
    *,
    finish: Finish | None = None,
    done: Callable[[CardState], None] = lambda _: None,
    progress: Callable[[CardProgress], None] = lambda _: None,
    probe_size: bool = True,
) -> Written:
    """Write an image to cards. Each card's fate is in the result; media stay open.

    Without a block map zeros of the image become zeros on the card, too. `probe_size`: first check
    that a card is as large as it says. `done` is called for each card that boots, and gives it up
    by an EdgetrainError. Raises ConfigError if the image cannot be used; then no card boots.
    """
    began = time.monotonic()
    chunks = iter(source.chunks())
    _, first = next(chunks, (0, memoryview(b"")))
    starts = partition_starts(first)
    if not starts:
        raise ConfigError(f"{source.path} {_why_no_table(first)}")
    size = block_map.size if block_map else source.size
    if block_map and source.size not in (None, block_map.size):
        raise ConfigError(
            f"{block_map.path} is for an image of {block_map.size} bytes, {source.path} has "
            f"{source.size}"
        )
    head = first[: min(HELD_BACK, starts[0] // ALIGNMENT * ALIGNMENT, len(first))]
    cards = [CardState(medium) for medium in media]
    for card in cards:
        _guarded(card, lambda c: _begin(c, head, size, probe_size))

    one_at_a_time = threading.Lock()

    def told(phase: str, share: Callable[[], float]) -> None:
        with one_at_a_time:
            progress(CardProgress(phase, share(), tuple(cards), time.monotonic() - began))

    try:
        bounds = _Bounds(len(head), *starts[:2]) if len(starts) > 1 else _Bounds(len(head))
        plan = _stream(source, [(0, first)], chunks, bounds, block_map, cards, told)
        total = sum(block.length for block in plan) or 1
        checked = functools.partial(told, "checking", lambda: _checked(cards, total))
        _each(cards, lambda c: _check(c, plan, checked))
        checked()  # a card that failed last has told nothing
        for card in _alive(cards):
            card.state = "finishing"
            told("finishing", lambda: 1.0)
            _guarded(card, lambda c: _finish(c, head, finish, done))
    finally:
        for card in cards:
            if card.touched and not card.ok:
                with contextlib.suppress(OSError):  # a card that failed may still be written
                    card.medium.write(0, _marked(head)[:ALIGNMENT])
                    card.medium.flush()
    mapped = len(head) + sum(block.length for block in plan if block.digest)
    return Written(source.position, mapped, tuple(cards))


def _why_no_table(first: memoryview) -> str:
    if bytes(first[4096:4104]) == b"EFI PART":
        return SECTORS_OF_4096
    return "is not a disk image: unpacked, it would begin with a partition table, an MBR or a GPT"


# -- the beginning -------------------------------------------------------------------------------


def _begin(card: CardState, head: memoryview, size: int | None, probe: bool) -> None:
    if size and card.medium.size < size:
        raise ConfigError(f"it has {card.medium.size} bytes, and the image has {size}")
    mark = _marked(head)
    there = aligned(len(head))
    card.medium.read(0, there)
    alike = partition_starts(there) == partition_starts(head) and bool(partition_starts(there))
    card.compare = alike or same(there, mark)
    card.touched = True
    card.medium.write(0, mark)
    card.medium.flush()
    if probe and size:
        # Write a block of its own at each PROBE_EVERY bytes behind the image, and at the very end.
        # A card smaller than it reports keeps only the last of several writes to one place.
        medium = card.medium
        last = medium.size // ALIGNMENT * ALIGNMENT - ALIGNMENT
        places = [*range(-(-size // PROBE_EVERY) * PROBE_EVERY, last, PROBE_EVERY), last]
        nonce, probes = os.urandom(16), []
        for place in places:
            if place < size:
                continue
            block = aligned(ALIGNMENT)
            block[:32] = hashlib.sha256(nonce + place.to_bytes(8, "little")).digest()
            medium.write(place, block)
            probes.append((place, block))
        card.probes = probes
        card.medium.flush()
        card.medium.forget()
        _check_probes(card)
    card.state = "writing"


def _marked(head: memoryview) -> memoryview:
    """The blank beginning of a card that is being written.

    Its first sector is blank, the rest of its first block has a mark: the write that makes the
    card bootable replaces the mark in the same moment.
    """
    blank = aligned(len(head))
    text = _MARK + hashlib.sha256(head).hexdigest().encode() + b"\n"
    blank[SECTOR:][: len(text)] = text
    return blank


def _check_probes(card: CardState) -> None:
    """Raises ConfigError if a probe is not there any more."""
    there = aligned(ALIGNMENT)
    for place, block in card.probes:
        card.medium.read(place, there)
        if not same(there, block):
            raise ConfigError(
                f"it is smaller than it says: what is written at {place} does not stay there",
                "a false card; throw it away",
            )


# -- writing -------------------------------------------------------------------------------------


def _stream(
    source: Source,
    first: Iterable[tuple[int, memoryview]],
    rest: Iterable[tuple[int, memoryview]],
    bounds: _Bounds,
    block_map: BlockMap | None,
    cards: Sequence[CardState],
    told: Callable[[str, Callable[[], float]], None],
) -> list[Chunk]:
    """Pass the image to all cards, except its first bytes. Returns what was passed.

    Raises ConfigError if the image turns out to be a wrong one.
    """
    plan: list[Chunk] = []
    hashes = _Hashes()
    checks = RangeChecks(block_map) if block_map else None
    threads = [threading.Thread(target=_write_blocks, args=(card,)) for card in cards]
    for thread in threads:
        thread.start()
    try:
        for part in (first, rest):
            for offset, data in part:
                for block in _blocks(offset, data, bounds, checks):
                    for card in _alive(cards):
                        _hand_over(card, block)
                    digest = None if block.data is None else hashes.submit(block.data)
                    plan.append(Chunk(block.offset, block.length, None, digest))
                told("writing", lambda: source.consumed)
                if not _alive(cards):
                    return plan
        source.finish()
    except EdgetrainError as error:
        for card in cards:
            card.fail(str(error))
        raise
    finally:
        for card in cards:
            _end(card)
        for thread in threads:
            thread.join()
        hashes.close()
    return plan


class _Hashes:
    """SHA-256 of buffers, in a thread of its own, which keeps at most QUEUED of them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._under_way: deque[Future[bytes]] = deque()

    def submit(self, data: memoryview) -> Future[bytes]:
        """The digest of a buffer that does not change any more. Waits if too many are under way."""
        if len(self._under_way) == QUEUED:
            self._under_way.popleft().result()
        future = self._pool.submit(_digest, data)
        self._under_way.append(future)
        return future

    def close(self) -> None:
        self._pool.shutdown()


def _digest(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True)
class _Bounds:
    """Parts of an image that are written differently: bytes held back at its beginning, and the
    place of its first partition, all of which is written."""

    held: int
    boot_begin: int = 0
    boot_end: int = 0


def _blocks(
    offset: int, data: memoryview, bounds: _Bounds, checks: RangeChecks | None
) -> Iterable[Chunk]:
    """A piece of the image as blocks to write, without its beginning.

    With a block map also what it leaves out of the boot partition: an older card's secrets may be
    there, in clusters that are free.
    """
    if not checks:
        skip = max(0, min(bounds.held - offset, len(data)))
        yield from _without_zeros(offset + skip, data[skip:])
        return
    end = offset + len(data)
    at, stop = max(offset, bounds.boot_begin), min(end, bounds.boot_end)
    for begin, part in (*checks.parts(offset, data), (end, data[:0])):
        if at < min(begin, stop):
            yield from _without_zeros(at, data[at - offset : min(begin, stop) - offset])
        at = max(at, begin + len(part))
        skip = max(0, min(bounds.held - begin, len(part)))
        if part := part[skip:]:
            yield Chunk(begin + skip, len(part), part)


def _without_zeros(offset: int, data: memoryview) -> Iterable[Chunk]:
    """Blocks of data and of zeros, in grains."""
    if not data:
        return
    if _empty(data):
        yield Chunk(offset, len(data))
        return
    at = 0
    while at < len(data):
        empty = _empty(data[at : at + GRAIN])
        end = at
        while end < len(data) and _empty(data[end : end + GRAIN]) == empty:
            end = min(end + GRAIN, len(data))
        part = data[at:end]
        if empty:
            yield Chunk(offset + at, len(part))
        else:
            yield Chunk(offset + at, len(part), part)
        at = end


def _empty(grain: memoryview) -> bool:
    return grain[0] == 0 and same(grain, _ZEROS[: len(grain)])


def _hand_over(card: CardState, block: Chunk) -> None:
    """Queue a block for a card. A card that accepts none for STALL_S is given up."""
    until = time.monotonic() + STALL_S
    while not card.error:
        with contextlib.suppress(queue.Full):
            card.waiting.put(block, timeout=0.2)
            return
        if time.monotonic() > until:
            card.fail(f"it accepted nothing for {STALL_S:g} s")


def _end(card: CardState) -> None:
    """Let the card's thread end, also if its queue is full and it has stopped reading."""
    while True:
        with contextlib.suppress(queue.Full):
            card.waiting.put(None, timeout=0.2)
            return
        if card.error:
            with contextlib.suppress(queue.Empty):
                card.waiting.get_nowait()


def _write_blocks(card: CardState) -> None:
    """Write blocks to one card, and only where the card differs if that is worth a look."""
    began, there = time.monotonic(), aligned(CHUNK)
    compares, different = card.compare, 0

    def write(block: Chunk) -> None:
        nonlocal compares, different
        data = _ZEROS[: block.length] if block.data is None else block.data
        if compares or block.data is None:
            length = -(-block.length // ALIGNMENT) * ALIGNMENT
            count = card.medium.read(block.offset, there[:length])
            if count >= block.length and same(there[: block.length], data):
                card.skipped += block.length
                different = 0
                return
        different += 1
        compares = compares and different < TIRED
        card.medium.write(block.offset, aligned(block.length) if block.data is None else data)
        card.written += block.length

    while (block := card.waiting.get()) is not None:
        if not card.error:
            _guarded(card, lambda _, block=block: write(block))  # type: ignore[misc]
    if not card.error:
        _guarded(card, lambda c: c.medium.flush())
    card.write_s = time.monotonic() - began


# -- reading back, and the end -------------------------------------------------------------------


def _checked(cards: Sequence[CardState], total: int) -> float:
    """The share that is read back of all cards together. A card that failed counts as done: this
    never goes backwards."""
    return sum(1.0 if card.error else card.checked / total for card in cards) / len(cards)


def _check(card: CardState, plan: Sequence[Chunk], told: Callable[[], None]) -> None:
    """Read every block back. Raises ConfigError for the first that is not what was written."""
    card.state = "checking"
    began = time.monotonic()
    card.medium.forget()
    _check_probes(card)
    buffers = [aligned(CHUNK), aligned(CHUNK)]
    before: tuple[Chunk, Future[bool]] | None = None
    try:
        with ThreadPoolExecutor(1) as pool:  # compares one block while the next is read
            for number, block in enumerate(plan):
                there = buffers[number % 2]
                length = -(-block.length // ALIGNMENT) * ALIGNMENT
                count = card.medium.read(block.offset, there[:length])
                read = there[: min(count, block.length)]
                if before:
                    _passed(card, *before)
                    told()
                before = block, pool.submit(_is_good, block, read)
            if before:
                _passed(card, *before)
                told()
    finally:
        card.check_s = time.monotonic() - began


def _is_good(block: Chunk, content: memoryview) -> bool:
    if len(content) < block.length:
        return False
    if block.digest is None:
        return same(content, _ZEROS[: block.length])
    return _digest(content) == block.digest.result()


def _passed(card: CardState, block: Chunk, good: Future[bool]) -> None:
    if not good.result():
        raise ConfigError(
            f"it does not keep what is written: bytes {block.offset} to "
            f"{block.offset + block.length} read back as something else",
            "throw it away",
        )
    card.checked += block.length


def _finish(
    card: CardState, head: memoryview, finish: Finish | None, done: Callable[[CardState], None]
) -> None:
    if finish:
        finish(card, head)
        card.medium.flush()
    # The first sector last of all: with it the card boots.
    first = min(ALIGNMENT, len(head))
    for begin, end in ((first, len(head)), (0, first)):
        card.medium.write(begin, head[begin:end])
        card.medium.flush()
    card.written += len(head)
    card.medium.forget()
    there = aligned(len(head))
    card.medium.read(0, there)
    _check_probes(card)
    if not same(there, head):
        raise ConfigError("its first bytes read back as something else", "throw it away")
    done(card)
    card.state = "done"


def _each(cards: Sequence[CardState], work: Callable[[CardState], None]) -> None:
    threads = [threading.Thread(target=_guarded, args=(card, work)) for card in _alive(cards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _guarded(card: CardState, work: Callable[[CardState], None]) -> None:
    """Do it; an error is this card's alone."""
    try:
        work(card)
    except EdgetrainError as error:
        card.fail(str(error))
    except OSError as error:
        said = {
            **dict.fromkeys((errno.ENODEV, errno.ENXIO, errno.ENOMEDIUM), "it was taken out"),
            errno.EIO: "it fails (input/output error): broken, or taken out",
            errno.ENOSPC: "there is no space left",
        }
        card.fail(said.get(error.errno or 0) or error.strerror or str(error))


def _alive(cards: Sequence[CardState]) -> list[CardState]:
    return [card for card in cards if not card.error]
