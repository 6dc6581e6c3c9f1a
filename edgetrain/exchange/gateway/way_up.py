"""The link of a gateway to the hub above: that of a member, which waits for nothing."""

from __future__ import annotations

from edgetrain import codecs
from edgetrain.exchange.member.beginning import Beginning
from edgetrain.exchange.member.link import Link, entry_of
from edgetrain.exchange.member.session import Ask, Session, Silence
from edgetrain.exchange.messages import Base, Fixed, Message, Start, Welcome
from edgetrain.exchange.seam import Entry, Past, Request
from edgetrain.vectors.vector import Vector


class WayUp(Link):
    """A Link whose contributions are sites', in full precision, and whose replies are kept as they
    came. `begin_join` and `poll_join` take the place of `join`."""

    _request: Request
    _beginning: Beginning
    _welcome: Welcome

    def begin_join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> None:
        """Ask to be let in, with the arguments of `join`."""
        self._request = request
        self._session = Session(request, params.size, checksum, past)
        self._silence = Silence(self._transport, self._clock, self._patience_s, self._outage_s)
        self._beginning = Beginning(params, request.fixed_tensors, self._session.fixed)
        self._ask(0)

    def poll_join(self) -> Entry | None:
        """Go on by what has arrived: the entry, once training starts. Raises what `join` does."""
        while (frames := self._transport.receive(0.0)) is not None:
            self._check_connection()
            if (entry := self._join_on(self._read(frames))) is not None:
                return entry
        self._check_connection(silence=True)
        self._silence.check()
        return None

    def _join_on(self, message: Message) -> Entry | None:
        match self._session.accept_before_start(message):
            case Welcome() as welcome:
                self._welcome = welcome
                self._take_terms(welcome, self._request)
                self._beginning.restart()
                for each in self._beginning.messages() if welcome.upload else ():
                    self._send(each)
            case Base() | Fixed() as part:
                self._beginning.accept_part(part)
            case Start() as start:
                self._session.fixed = self._beginning.finish(start.fixed)
                return entry_of(self._welcome, start, self._silence.heard)
            case Ask():
                self._ask(0)
        return None

    def check_silence(self) -> None:
        """Raise HubUnreachable if the hub above has been silent for too long, as `wait` does."""
        self._silence.check()

    def _take_terms(self, welcome: Welcome, request: Request) -> None:
        super()._take_terms(welcome, request)
        self.outbox.codec = codecs.verbatim(self.outbox.codec)
        self.inbox.keeps_payloads = True
