"""What people tell a hub that runs: to pause, to resume, to remove a member, to end the job.

=========  ==========  ===========================================================================
course     told        what follows
=========  ==========  ===========================================================================
""         pause       "paused": no round closes, members wait, and the time of rounds stands still
paused     go on       "": rounds close again; no deadline has come nearer meanwhile
"", paused stop        "stopped": no round closes any more. Members are told that the job is over,
                       at once and whenever they come back; it ends when all have left
=========  ==========  ===========================================================================

Each change is in the journal before it is answered, and before anyone hears of it. A hub that is
restored has the course that its journal says, so a hub that is killed obeys all the same.

Contributions that come during a pause count as if they came at its beginning: a member that is slow
gets more time by it, and none gets less. Members that cannot be reached are not given up meanwhile.
Pure: the time is an argument. Who may tell, and over what, is the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from edgetrain.errors import did_you_mean
from edgetrain.exchange.hub.effects import Answered, Effect, Note, Save, Write, refusal
from edgetrain.exchange.hub.members import Members
from edgetrain.exchange.hub.membership import Membership, turn_away
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.records import Course, Record, State, Steered
from edgetrain.exchange.hub.rounds import Rounds
from edgetrain.exchange.messages import CODES, Join, Resume

STOPPED = "people ended the job"

MOST_NAMED = 16
"""Members that a refusal names."""

COURSES: dict[str, Course] = {"pause": "paused", "resume": "", "stop": "stopped"}
"""Where each word leads."""

NEWS: dict[Course, str] = {
    "paused": "paused: no round closes until people resume the job",
    "": "resumed: people asked for it",
    "stopped": f"stopped: {STOPPED}",
}
"""What the hub's news says; its first word is read again by whoever looks."""

Why = tuple[str, str]
"""Why not, and the way out."""


class Steering:
    """The course of one job. All but `snapshot`, which makes the hub's state, are the hub's."""

    def __init__(
        self,
        members: Members,
        rounds: Rounds,
        membership: Membership,
        snapshot: Callable[[], State],
    ) -> None:
        self._members, self._rounds, self._membership = members, rounds, membership
        self._snapshot = snapshot
        self.course: Course = ""
        """Only to be looked at."""
        self._since: float | None = None
        """When the pause began that lasts; None: there is none."""
        self._stood_s = 0.0
        """Seconds of all pauses that are over."""

    @property
    def stands(self) -> bool:
        return self.course != ""

    @property
    def is_over(self) -> bool:
        return self.course == "stopped" and not self._members

    def time(self, now: float) -> float:
        """The time that rounds go by: it stands still while the job is paused."""
        return (now if self._since is None else self._since) - self._stood_s

    # -- what people tell ---------------------------------------------------------------------

    def obey(self, order: Order, now: float) -> list[Effect]:
        """Do it, or refuse it. The caller looks whether a round is due then."""
        why: Why | None = None
        if self.course == "stopped":
            why = "the job is ending: people told it to stop", ""
        else:
            why = self._why_not(order.words)
        if why is not None:
            order.refuse(*why)
            return []
        effects = (
            self._remove(order.words[1]) if order.words[1:] else self.turn(order.words[0], now)
        )
        told = {"course": self.course, "round": self._rounds.round, "members": self._members.names}
        return [*effects, Answered(order.answer, told)]

    def _why_not(self, words: tuple[str, ...]) -> Why | None:
        match words:
            case ("pause" | "resume" | "stop" as word,):
                if self._rounds.started:
                    return None
                return f"{word}: training has not begun", "Ctrl-C, or SIGTERM, ends the hub"
            case ("remove", name):
                names = self._members.names
                if name not in names:
                    few = len(names) <= MOST_NAMED
                    hint = did_you_mean(name[:200], names) if few else "`edgetrain watch` has all"
                    return f"no member '{name[:200]}' is in", hint
                last = f"{name} is the last member", "end the job: edgetrain control RUN stop"
                return last if names == [name] else None
        why = f"{' '.join(words[:2])[:200]}: this hub takes no such order"
        return why, "`edgetrain control --help` says which there are, and where"

    def turn(self, word: str, now: float) -> list[Effect]:
        """Take the course that this word leads to; nothing where it is that already."""
        course = COURSES[word]
        if course == self.course:
            return []
        if self._since is not None:
            self._stood_s += now - self._since
            self._rounds.delay.note_pause(self._rounds.round)
        self._begin(course, now)
        effects: list[Effect] = [Write(Steered(course)), Note("told", "hub", NEWS[course])]
        if course == "stopped":
            effects.append(Save(self._snapshot()))
            effects += [refusal(each.sender, "ended", STOPPED) for each in self._members]
        return effects

    def _begin(self, course: Course, now: float) -> None:
        self.course, self._since = course, now if course == "paused" else None

    def _remove(self, name: str) -> list[Effect]:
        member = self._members.named(name)
        assert member is not None
        removed = self._membership.remove(member, "removed", CODES["removed"])
        return [refusal(member.sender, "removed", CODES["removed"]), *removed]

    # -- what follows -------------------------------------------------------------------------

    def send_home(self, sender: bytes, message: Join | Resume) -> list[Effect]:
        """The job was ended: tell a peer that joins, or comes back."""
        member = self._members.in_session(message.session)
        if member is None or not member.may_be_at(sender):
            return turn_away(sender, message.name, "ended", STOPPED)
        gone = self._membership.remove(member, "left", STOPPED)
        return [refusal(sender, "ended", STOPPED), *gone]

    def followed(self, state: State, records: Iterable[Record], now: float) -> Iterator[Record]:
        """The records of a journal; behind the last the course is as they say."""
        self._begin(state.course, now)
        for record in records:
            if isinstance(record, Steered):
                self._begin(record.course, now)
            yield record
