"""Millions of messages that are none, or wrong, or come at the wrong time: does the hub bear them?

    make test-endurance TESTS=tests/endurance/test_fuzz.py FRAMES=10000000

The real driver, hub and journal, two honest members and an insider, in virtual time; jobs of
several kinds take turns. The insider's own messages are damaged on their way one time in four, and
between them four more members with keys throw in what would fit, which is known from a look into
the hub, and recorded messages of every kind, both ways, and those found to reach new lines of code:
fields, kinds and payloads changed, cut, swapped and taken from what is going on. At times one more
joins and leaves, or comes back and lacks a base, and gives nothing. Lines are watched for one
message in 500. Promised: nothing is raised but what the hub answers with a refusal; no message
leads to more than 24 lines in the log; no connection that gives nothing is sent more than 32 bases;
after each 50,000 frames the hub is killed and goes on from its journal with the same bits, and both
honest members have gone on; memory at the end is at most 5 % above what it was after 100,000
frames, or half of a shorter run of one kind. A message
that breaks a promise is printed.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import msgpack
import numpy as np

import edgetrain
from edgetrain import codecs
from edgetrain.codecs import Codec
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.delay import AT_ONCE, Delay
from edgetrain.exchange.further_messages import Advertise, Reveal, Shares
from edgetrain.exchange.hub.effects import Evaluated, Note, Observed, Reported
from edgetrain.exchange.hub.journal import Fsync, Journal, JournalSettings
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.limits import MOST_UNREQUITED
from edgetrain.exchange.masks.aggregator import Aggregator
from edgetrain.exchange.masks.payloads import SEED_BYTES, advert_bytes, shares_bytes, write_table
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import (
    KINDS,
    MAX_HEADER_BYTES,
    PROTOCOL,
    Base,
    Beat,
    Contribute,
    Figure,
    Fixed,
    Join,
    Leave,
    Message,
    Refuse,
    Resume,
    Telemetry,
    pack,
    unpack,
)
from edgetrain.exchange.seam import Request, Submission
from edgetrain.exchange.transport import owned
from edgetrain.runs.metrics.lines import format_line
from edgetrain.strategies import find, merging
from edgetrain.strategies.merging.rule import Mean
from edgetrain.training.hub_recorder import Statuses
from edgetrain.vectors.blob import blob_digest
from edgetrain.vectors.vector import Buffer, checksum
from endurance.room import Frames, Room, Trainee, Wire, copied

ELEMENTS = 300
HONEST = 2
EPISODE = 50_000
BURST, PAUSE_S = 100, 0.02
"""Thrown in at a time, and virtual seconds between: half of what a hub takes from one sender."""
WATCHED = 500
CORPUS = 4096
MOST_LINES = 24
MOST_GROWTH = 1.05
PACE_S = 0.5
GREEDY = b"greedy"
GREEDY_FRAMES, GREEDY_TURNS = 2_500, 8
"""It is there for so many frames, one time in so many."""
STRANGERS = 4


@dataclass(frozen=True)
class Kind:
    """A job to be attacked."""

    codec: str = "fp32"
    reply_codec: str = "fp32"
    merge: Callable[[], Any] = Mean
    masked: bool = False
    delay: Delay = AT_ONCE
    part_elements: int = 0
    """Of a codec without loss; 0: the named codec's."""
    waiting: bool = False
    """The honest members come when the attack is over, and the job has not begun."""
    fixed_bytes: int = 0
    """Of what the first member hands to all others."""

    def codecs(self) -> tuple[Codec, Codec]:
        """Of contributions and of replies."""
        if self.part_elements:
            codec = codecs.Dense()
            codec.part_elements = self.part_elements
            return codec, codec
        return codecs.parse(self.codec), codecs.parse(self.reply_codec)


KINDS_OF_JOB: dict[str, Kind] = {
    "fp32": Kind(),
    "parts": Kind(part_elements=64),
    "topk": Kind("topk(0.1)", "int8"),
    "replies": Kind("fp32", "int8"),
    "robust": Kind("int8", merge=lambda: merging.parse("median")),
    "delayed": Kind("qsgd(4)", "fp16", delay=Delay(is_measured=True)),
    "masked": Kind(masked=True),
    "waiting": Kind(waiting=True),
    "first": Kind(fixed_bytes=40),
    "first-waiting": Kind(fixed_bytes=40, waiting=True),
}


class Bytes:
    """Fixed tensors that are bytes; see seam.FixedTensors."""

    def __init__(self, size: int) -> None:
        self.values = os.urandom(size)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.values)

    @property
    def digest(self) -> str:
        """Of the bytes."""
        return blob_digest([self.values])

    def read(self) -> bytes:
        """The bytes."""
        return self.values

    def write(self, blob: Buffer) -> None:
        """Other bytes, as many."""
        if memoryview(blob).nbytes != self.size:
            raise ValueError(f"{memoryview(blob).nbytes} bytes where {self.size} were told")
        self.values = bytes(blob)


def fixed_of(kind: Kind) -> Bytes | None:
    """What a member brings of it."""
    return Bytes(kind.fixed_bytes) if kind.fixed_bytes else None


def hub_of(kind: Kind) -> Hub:
    """A hub with room for the honest, the insider and one more."""
    members = HONEST if kind.waiting else HONEST + 4
    masks = Aggregator(MaskTerms(members, 2, 8.0)) if kind.masked else None
    return Hub(
        Terms(find("dga" if kind.delay.is_measured else "local-sgd"), 1, kind.delay),
        Policy(members, 1, 1.0, 2.0, 1.0, 20.0, status_s=1.0),
        kind.merge(),
        *kind.codecs(),
        masks,
    )


# -- messages that are wrong ----------------------------------------------------------------------

ODD: list[Any] = [
    0, 1, 2, -1, 127, 128, 255, 2**16, 2**31 - 1, 2**32, 2**32 - 1, 2**63 - 1, 2**64 - 1, 5,
    0.0, 1.0, -1.0, 1e-9, 1e15, 1e300, float("nan"), float("inf"), True, False, None, "", "model",
    "m0", "h0", "x" * 64, "x" * 300, "\n", "\ud7ff", b"", b"m", [], [[]], [1] * 60, {},
]  # fmt: skip
FLOATS = np.array(
    [0, -0.0, 1, -1, 3e38, -3e38, 1e-45, np.nan, np.inf, -np.inf, 8.0, 65504, 1e5], np.float32
)


class Mutator:
    """Changes messages: fields where a message can be read, bytes where not."""

    def __init__(self, rng: random.Random, attack: Attack) -> None:
        self._rng, self._attack = rng, attack
        self.corpus: list[Frames] = []

    def keep(self, frames: Frames) -> None:
        """Remember a message to be changed later."""
        if len(self.corpus) < CORPUS:
            self.corpus.append(frames)
        else:
            self.corpus[self._rng.randrange(CORPUS)] = frames

    def thrown(self) -> Frames:
        """One of those remembered, changed, or now and then as it was."""
        frames = self._rng.choice(self.corpus)
        if self._rng.random() < 0.1:
            return frames
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            frames = self.changed(frames)
        return frames

    def changed(self, frames: Frames) -> Frames:
        """One thing is different."""
        rng = self._rng
        draw = rng.random()
        if len(frames) < 2 or draw < 0.04:
            return self._frames_changed(list(frames))
        if draw < 0.08:
            return [rng.choice(list(KINDS)), *frames[1:]]
        if draw < 0.60:
            return [frames[0], self._header_changed(frames[1]), *frames[2:]]
        if draw < 0.92 and len(frames) > 2:
            return [*frames[:2], self._payload_changed(frames[2]), *frames[3:]]
        return [frames[0], self._bytes_changed(frames[1]), *frames[2:]]

    def _frames_changed(self, frames: Frames) -> Frames:
        rng = self._rng
        match rng.randrange(4):
            case 0:
                frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randrange(20)))
            case 1 if frames:
                del frames[rng.randrange(len(frames))]
            case 2:
                frames = frames + rng.choice(self.corpus)
            case _:
                frames = rng.choice(self.corpus)[:1] + frames[1:]
        return frames

    def _header_changed(self, header: bytes) -> bytes:
        rng = self._rng
        try:
            values = msgpack.unpackb(header)
            assert isinstance(values, list)
        except Exception:
            return self._bytes_changed(header)
        match rng.randrange(12):
            case 0:
                values.append(rng.choice(ODD))
            case 1 if values:
                values.pop()
            case 2 if len(values) > 1:
                one, other = rng.sample(range(len(values)), 2)
                values[one], values[other] = values[other], values[one]
            case _ if values:
                at = rng.randrange(len(values))
                values[at] = self._value(values[at])
        with suppress(Exception):
            return bytes(msgpack.packb(values))
        return header

    def _value(self, old: Any) -> Any:
        """Another value for a field: near the old one, odd, or one of this moment."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.4 and type(old) is int:
            return max(0, min(2**64 - 1, old + rng.choice((-2, -1, 1, 2, 64, 1000))))
        if draw < 0.75:
            hub = self._attack.hub
            near = max(0, hub.round + rng.choice((-2, -1, 0, 0, 1, 2, 5, 2000)))
            return rng.choice((near, near, hub.epoch, hub.rounds.delay.delay, self._sum()))
        return rng.choice(ODD)

    def _sum(self) -> int:
        hub = self._attack.hub
        return hub.checksum(hub.round, 0)

    def _payload_changed(self, payload: bytes) -> bytes:
        rng = self._rng
        match rng.randrange(7):
            case 0:
                return payload[: rng.randrange(len(payload) + 1)]
            case 1:
                return payload + rng.randbytes(rng.choice((1, 4, 700)))
            case 2:
                other = rng.choice(self.corpus)
                return other[2] if len(other) > 2 else b""
            case 3:
                return rng.randbytes(len(payload))
            case 4:
                return bytes(len(payload))
            case 5 if len(payload) >= 4:
                at = 4 * rng.randrange(len(payload) // 4)
                return payload[:at] + bytes(rng.choice(FLOATS).tobytes()) + payload[at + 4 :]
            case _:
                return self._bytes_changed(payload)

    def _bytes_changed(self, data: bytes) -> bytes:
        rng = self._rng
        if not data:
            return rng.randbytes(rng.randrange(8))
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(changed))
            changed[at] = rng.choice((rng.randrange(256), changed[at] ^ 1 << rng.randrange(8), 255))
        if rng.random() < 0.02:
            changed *= 1 + (MAX_HEADER_BYTES + 1) // len(changed)
        return bytes(changed)


# -- which lines a message reaches ----------------------------------------------------------------


class Lines:
    """The lines of edgetrain that were run while it watched."""

    def __init__(self) -> None:
        self._inside = str(Path(edgetrain.__file__).parent)
        self.seen: set[tuple[str, int]] = set()
        self._before = 0

    def watch(self) -> None:
        """From the next call on."""
        self._before = len(self.seen)
        sys.settrace(self._call)

    def stop(self) -> bool:
        """Whether there was something new."""
        sys.settrace(None)
        return len(self.seen) > self._before

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._inside) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


# -- one job under attack -------------------------------------------------------------------------


class Leaky(Wire):
    """The insider's end: what it sends may be damaged on the way; all of it is remembered."""

    attack: Attack

    def send(self, frames: Any) -> None:
        """As Wire."""
        copy = [bytes(frame) for frame in frames]
        self.attack.mutator.keep(copy)
        if self.attack.rng.random() < 0.25:
            copy = self.attack.mutator.changed(copy)
        super().send(copy)

    def arrive(self, frames: Frames) -> None:
        """As Wire; what the hub says is remembered too."""
        if self.attack.rng.random() < 0.05:
            self.attack.mutator.keep(frames)
        super().arrive(frames)


class Attack(Room):
    """A room in which all of it happens; also the hub's observer."""

    def __init__(self, kind: Kind, seed: int, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.journal = None if kind.waiting else self._opened()
        self.rng = random.Random(seed)
        self.lines = Lines()
        self.frames = self.messages = self.restarts = 0
        self.events: Counter[str] = Counter()
        self.statuses = Statuses()
        self.said = self.sent = self.most_said = self.most_sent = 0
        self.last: tuple[bytes, Frames] = (b"", [])
        self.wordiest: Frames = []
        self.attacking = True
        self.again = 0
        """Connections over which no more bases are sent; those who had them open others."""
        self.strangers = [b"stranger-%d" % number for number in range(STRANGERS)]
        self.greedy = GREEDY
        self.bases: Counter[bytes] = Counter()
        """Sent to each of its connections by this hub."""
        self.most_bases = 0
        self._insiders = itertools.count()
        super().__init__(hub_of(kind), self.observe, self.journal)
        self.fitting = Fitting(self)
        self.mutator = Mutator(self.rng, self)
        bases = Base(0, 1, bytes(1200)), Fixed(0, 1, bytes(40))
        for message in (Beat(), Leave("x"), self.fitting.join(b"x"), *bases):
            self.mutator.keep(copied(pack(message)))
        self.honest: list[Trainee] = []
        if not kind.waiting:
            self.let_in()
        self._inside = self.world.start("insider", self._insider)

    def end(self) -> None:
        """No attackers any more; their connections are gone."""
        self.attacking = False
        self._inside.kill()
        for name in [name for name in self.wires if not name.startswith(b"khonest")]:
            self.wires[name].close()

    def let_in(self) -> None:
        """The honest members join."""
        codec = self.kind.codecs()[0] if self.kind.part_elements else None
        for number in range(HONEST):
            trainee = Trainee(
                f"h{number}", ELEMENTS, PACE_S, codec=codec, fixed=fixed_of(self.kind)
            )
            trainee.start(self, Wire(self, owned((b"honest-%d" % number).ljust(32), b"")))
            self.honest.append(trainee)

    def _opened(self) -> Journal:
        return Journal(self.folder, JournalSettings(Fsync(0), snapshot_every=500))

    def restart(self) -> None:
        """Kill the hub, and go on with another one, from the journal."""
        base, journal = self.hub.base, self.journal
        assert base is not None  # the job has begun
        assert journal is not None
        before = self.hub.round, base.tobytes()
        journal.close()
        self.journal = journal = self._opened()
        hub = hub_of(self.kind)
        assert journal.state is not None
        hub.restore(journal.state, journal.records(), self.world.clock())
        restored = None if hub.base is None else (hub.round, hub.base.tobytes())
        if journal.mended or restored != before:
            raise AssertionError("the restored hub is another one")
        self.restarts += 1
        self.serve(hub, journal)

    def serve(self, hub: Hub, journal: Journal | None) -> None:
        """See Room; another hub knows nothing of what was sent before."""
        self.bases.clear()
        super().serve(hub, journal)

    # what the driver sees

    def observe(self, effect: Observed) -> None:
        """As the recorder would."""
        if isinstance(effect, Note):
            self.said += 1
            self.events[effect.event] += 1
        elif isinstance(effect, Reported):
            self.events["report"] += 1
            format_line({**self.statuses.keys_of(effect.member, effect.telemetry)})
        elif isinstance(effect, Evaluated):
            self.events["figure"] += 1
            format_line({**asdict(effect.figure)})

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """See HubTransport; counts what each message leads to, and watches some."""
        for sender, frames in super().poll(timeout_s):
            attacker = not sender.startswith(b"khonest")
            self.last = sender, copied(frames)
            self.said = self.sent = 0
            watched = attacker and self.rng.randrange(WATCHED) == 0
            if watched:
                self.lines.watch()
            yield sender, frames
            if watched and self.lines.stop():
                self.mutator.keep(self.last[1])
            if attacker:
                self.messages += 1
                self.frames += len(frames)
                self.most_sent = max(self.most_sent, self.sent)
                if self.said > self.most_said:
                    self.most_said, self.wordiest = self.said, copied(frames)
        self.said = self.sent = 0

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        self.sent += 1
        thrown_in = to in self.strangers or to.startswith(GREEDY)
        if thrown_in and frames[0] == Refuse.kind:
            self._refused(to, unpack(copied(frames)))
        if to.startswith(GREEDY) and frames[0] == Base.kind:
            self.bases[to] += 1
            self.most_bases = max(self.most_bases, self.bases[to])
        return super().send(to, frames) or (self.attacking and thrown_in)

    def _refused(self, to: bytes, message: Message) -> None:
        if not isinstance(message, Refuse) or message.code != "again":
            return
        self.again += 1
        other = to.partition(b"+")[0] + b"+%d" % self.again
        if to == self.greedy:
            self.greedy = other
        elif to in self.strangers:
            self.strangers[self.strangers.index(to)] = other

    # what the insider does

    def _insider(self) -> None:
        """Join, take part, be thrown out, join again, come back, leave."""
        while self.attacking:
            wire = Leaky(self, b"insider-%d" % (next(self._insiders) % 8))
            wire.attack = self
            with suppress(EdgetrainError, AssertionError, ValueError, IndexError):
                self._take_part(wire)
            wire.close()
            self.world.sleep(0.2)

    def _take_part(self, wire: Leaky) -> None:
        rng, clock = self.rng, self.world.clock
        link = Link(wire, clock, hub_timeout_s=5.0)
        params = np.zeros(ELEMENTS, np.float32)
        name = rng.choice(("", "insider", f"i{rng.randrange(50)}"))
        start = link.join(
            Request("model", name, fixed_tensors=fixed_of(self.kind)), params, checksum(params)
        )
        if self.kind.part_elements:
            link.outbox.codec, link.inbox.codec = self.kind.codecs()
        round, applied, known = start.round, start.applied, start.checksum
        for _ in range(rng.randrange(1, 40)):
            own = rng.choice((np.ones, np.zeros))(ELEMENTS, np.float32) * rng.choice(
                (1, 1e-3, 1e30)
            )
            vector, wanted = own.astype(np.float32), rng.randrange(50)
            link.submit(Submission(round, vector, 1.0, applied, known, wanted))
            round += 1
            while applied < round:
                if rng.random() < 0.05:
                    link.ask_again()
                found = link.wait(applied)
                if not hasattr(found, "pieces"):
                    round, applied = max(round, found.round), found.applied
                    known = found.checksum
                    break
                applied, known = found.round + 1, found.checksum
            self.world.sleep(0.05)
        if rng.random() < 0.5:
            link.leave("done")

    def throw(self, count: int) -> None:
        """Throw in so many messages: remembered ones, or what would fit, most of them changed."""
        rng = self.rng
        greedy = self.frames // GREEDY_FRAMES % GREEDY_TURNS == 1
        if not greedy and (peer := self.hub.members.named("greedy")) is not None:
            self.inbox.put((peer.sender, copied(pack(Leave("")))))  # rounds would wait for it
        for _ in range(count):
            if greedy and rng.random() < 0.1:
                message = self.fitting.greedy(self.greedy)
                self.inbox.put((self.greedy, copied(pack(message))))
                continue
            sender = rng.choice(self.strangers)
            if rng.random() < 0.4:
                frames = self.mutator.thrown()
            else:
                try:
                    frames = copied(pack(self.fitting.message(sender)))
                except EdgetrainError:  # what the hub has been told is out of range
                    continue
                if rng.random() < 0.02:
                    self.mutator.keep(frames)
                if rng.random() < 0.4:
                    frames = self.mutator.changed(frames)
            self.inbox.put((sender, frames))


class Fitting:
    """Messages that the hub waits for: it is looked into, which no attacker can."""

    def __init__(self, attack: Attack) -> None:
        self._attack, self._rng = attack, attack.rng
        codec = attack.kind.codecs()[0]
        vectors = [np.full(ELEMENTS, value, np.float32) for value in (1, 0, -1e-3, 65000, 3e38)]
        vectors.append(np.linspace(-1, 1, ELEMENTS, dtype=np.float32))
        self._encoded: list[Frames] = []
        for vector in vectors:
            with suppress(EdgetrainError), np.errstate(all="ignore"):
                self._encoded.append(copied(codec.encode(vector)))

    def message(self, sender: bytes) -> Message:
        """What may come next from there."""
        hub, rng = self._attack.hub, self._rng
        peer = hub.members.get(sender)
        if peer is None:
            away = [each for each in hub.members.away if not each.name.startswith("h")]
            if away and rng.random() < 0.5:
                return self._resume(rng.choice(away))
            return self.join(sender)
        draw = rng.random()
        if peer.standing != "in step" or draw < 0.02:
            return self._resume(peer)
        if draw < 0.04:
            return Leave("")
        if draw < 0.06:
            return Beat()
        if draw < 0.08:
            return self._telemetry() if rng.random() < 0.8 else self._figure()
        if not hub.started and draw < 0.8:
            here, fixed = len(hub.membership.first_base), self._attack.kind.fixed_bytes
            if here and fixed:
                return Fixed(here - 1, 1, rng.randbytes(fixed))
            return Base(here, 1, bytes(4 * ELEMENTS))
        if hub.rounds.masks is not None:
            said = self._masking(peer)
            if said is not None:
                return said
        return self._contribution(peer)

    def greedy(self, sender: bytes) -> Message:
        """What gets a base, or replies once more, for nothing."""
        peer = self._attack.hub.members.named("greedy")
        if peer is None:
            fixed = self._attack.kind.fixed_bytes
            return Join(PROTOCOL, "", "model", ELEMENTS, "greedy", 1.0, 5, 9, fixed)
        if peer.sender == sender and self._rng.random() < 0.5:
            return Leave("")
        lacks_base = self._rng.random() < 0.5
        return Resume(
            PROTOCOL, "model", ELEMENTS, "greedy", 9, peer.applied if lacks_base else 0, 0,
            peer.next_round, peer.next_round, 1, lacks_base, "other",
        )  # fmt: skip

    def join(self, sender: bytes) -> Join:
        """A newcomer."""
        name = self._rng.choice(("", sender.decode()))
        session = self._rng.choice((0, 7, self._rng.randrange(1, 2**64)))
        fixed = self._attack.kind.fixed_bytes if self._rng.random() < 0.9 else 7
        return Join(PROTOCOL, "", "model", ELEMENTS, name, 1.0, 5, session, fixed)

    def _resume(self, peer: MemberRecord) -> Resume:
        hub, rng = self._attack.hub, self._rng
        applied = max(0, rng.choice((hub.round, peer.applied, hub.round - rng.randrange(9))))
        known = hub.checksum(applied, 0)
        oldest = max(0, peer.next_round - rng.randrange(3))
        return Resume(
            PROTOCOL, "model", ELEMENTS, peer.name, max(1, peer.session), applied, known,
            max(peer.next_round, oldest), oldest, rng.randrange(1, 4), rng.random() < 0.2,
            rng.choice(("", "other")),
        )  # fmt: skip

    def _telemetry(self) -> Telemetry:
        """Whatever the fields allow: sums that fall, a thousand years, no step at all."""
        rng = self._rng
        values: list[Any] = [
            rng.choice((0, 1, 1 << 40, rng.randrange(1 << rng.randrange(1, 40)))) for _ in range(7)
        ]
        values += [rng.randrange(1 << 32), rng.randrange(1 << 60), rng.randrange(1 << 60)]
        values += [rng.randrange(1 << 32), rng.randrange(-274, 1001), rng.randrange(-1, 2)]
        values += [rng.randrange(-1, 1 << 40), rng.choice(("", "0.1 3.11 2.9"))]
        return Telemetry(*values)

    def _figure(self) -> Figure:
        """Any name, also that of a key of a line, and any value."""
        rng = self._rng
        return Figure(
            rng.choice(("", "accuracy", "t", "kind")), rng.choice((0.0, -1e300, 1e300, 0.5)),
            rng.random() < 0.5, rng.randrange(1 << 60), rng.randrange(1 << 45),
        )  # fmt: skip

    def _contribution(self, peer: MemberRecord) -> Contribute:
        hub, rng = self._attack.hub, self._rng
        payloads = rng.choice(self._encoded)
        if hub.rounds.masks is not None:
            payloads = [rng.randbytes(4 * ELEMENTS)]
        applied = max(0, rng.choice((hub.round, hub.round, hub.round - 1)))
        part = len(peer.incoming)
        return Contribute(
            peer.next_round, part, len(payloads), 1.0, applied, hub.checksum(applied, 0),
            rng.randrange(200), payloads[part % len(payloads)],
        )  # fmt: skip

    def _masking(self, peer: MemberRecord) -> Message | None:
        """Keys, shares or revealed shares, of the right size."""
        hub, rng = self._attack.hub, self._rng
        assert hub.rounds.masks is not None
        masks = hub.rounds.masks.aggregator
        for block in masks.blocks:
            places = len(block.names)
            if block.phase == "advertise" and peer.name in {*block.weights} - {*block.adverts}:
                return Advertise(block.number, rng.randbytes(advert_bytes(block.rounds)))
            if block.phase == "share" and peer.name in {*block.names} - {*block.shares}:
                size = shares_bytes(block.rounds)
                own = block.place(peer.name)
                rows = {p: rng.randbytes(size) for p in range(places) if p != own}
                return Shares(block.number, write_table(rows, places, size))
        for round, entry in masks.open_sums.items():
            covering = next((b for b in masks.blocks if b.first <= round < b.end), None)
            if entry.asked is not None and covering and peer.name in covering.holders:
                if rng.random() < 0.5:
                    break
                rows = {p: rng.randbytes(SEED_BYTES) for p in range(len(covering.names))}
                table = write_table(rows, len(covering.names), SEED_BYTES)
                return Reveal(entry.asked.block, round, table)
        return None


@dataclass
class Result:
    """What came of the attack on one job."""

    kind: str
    frames: int = 0
    messages: int = 0
    seconds: float = 0.0
    rounds: int = 0
    honest_rounds: int = 0
    lines: int = 0
    most_said: int = 0
    most_sent: int = 0
    most_bases: int = 0
    """To one connection that gives nothing."""
    again: int = 0
    """Connections that were refused more."""
    memory: tuple[int, int] = (0, 0)
    events: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def resident() -> int:
    """Bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def attacked(name: str, frames: int, seed: int) -> Result:
    """Attack one kind of job."""
    with tempfile.TemporaryDirectory() as folder:
        attack = Attack(KINDS_OF_JOB[name], seed, Path(folder))
        result = Result(name)
        began = time.monotonic()
        try:
            fuzz(attack, frames, result)
        except Exception as error:
            sender, last = attack.last
            result.wrong.append(f"{error!r} for {last!r} from {sender!r}")
        result.frames, result.messages = attack.frames, attack.messages
        result.seconds = time.monotonic() - began
        result.rounds, result.events = attack.hub.round, dict(attack.events)
        result.lines = len(attack.lines.seen)
        result.most_said, result.most_sent = attack.most_said, attack.most_sent
        result.most_bases, result.again = attack.most_bases, attack.again
        if attack.most_bases > MOST_UNREQUITED:
            result.wrong.append(f"{attack.most_bases} bases for a connection that gives nothing")
        if attack.most_said > MOST_LINES:
            result.wrong.append(f"{attack.most_said} lines in the log for {attack.wordiest!r}")
        if attack.journal is not None:
            attack.journal.close()
        return result


def fuzz(attack: Attack, frames: int, result: Result) -> None:
    """All of it; what is wrong is added to the result."""
    attack.run(20.0, lambda: all(each.rounds for each in attack.honest))
    first, episode_ends = 0, EPISODE
    gone_on = [each.applied for each in attack.honest]
    while attack.frames < frames:
        attack.throw(BURST)
        attack.run(PAUSE_S)
        if attack.process.over and attack.kind.waiting:
            attack.serve(hub_of(attack.kind), None)  # strangers have begun it and left
        elif attack.process.over:
            ends = [each.process.error for each in attack.honest]
            result.wrong.append(
                f"after {attack.frames:,} frames the honest members are gone: {ends}"
            )
            return
        if attack.frames >= episode_ends or attack.frames >= frames:
            episode_ends = attack.frames + EPISODE
            if attack.kind.waiting and attack.frames < frames:
                continue
            if not check(attack, gone_on):
                stuck = [each.process.error for each in attack.honest]
                result.wrong.append(f"after {attack.frames:,} frames no round closes: {stuck}")
                return
            gone_on = [each.applied for each in attack.honest]
        if not first and attack.frames >= max(frames // 10, min(frames // 2, 100_000)):
            first = resident()
    result.memory = first, resident()
    result.honest_rounds = min(each.rounds for each in attack.honest)
    grown = result.memory[1] / max(first, 1)
    if grown > MOST_GROWTH:
        result.wrong.append(f"memory grew by {grown - 1:.1%}")


def check(attack: Attack, before: list[int]) -> bool:
    """Whether the honest members go on: under attack, and after a restart of the hub."""
    if attack.kind.waiting:
        attack.end()
        attack.run(60.0, lambda: attack.process.over)
        if attack.process.over:
            attack.serve(hub_of(attack.kind), None)
        attack.let_in()
        before = [0] * HONEST
    else:
        attack.restart()
    attack.run(30.0, lambda: have_gone_on(attack, before))
    return have_gone_on(attack, before)


def have_gone_on(attack: Attack, before: list[int]) -> bool:
    """Whether both honest members have had replies since."""
    return all(each.applied > past for each, past in zip(attack.honest, before, strict=True))


# -- printing ---------------------------------------------------------------------------------


def line(result: Result) -> str:
    """A row of the table."""
    before, after = result.memory
    return (
        f"{result.kind:8} {result.frames:11,} {result.messages:11,} "
        f"{result.frames / max(result.seconds, 1e-9):9,.0f} {result.rounds:8,} "
        f"{result.honest_rounds:8,} {result.lines:6} {result.most_said:5} {result.most_sent:6} "
        f"{before / 1e6:6.1f} {after / 1e6:6.1f}"
    )


HEADER = (
    f"{'job':8} {'frames':>11} {'messages':>11} {'frames/s':>9} {'rounds':>8} {'honest':>8} "
    f"{'code':>6} {'lines':>5} {'sent':>6} {'MB':>6} {'MB':>6}"
)
