"""The link of a gateway to the hub above: that of a member, which waits for nothing."""

from __future__ import annotations

from edgetrain import codecs
from edgetrain.exchange.member.link import Link, Newcomer
from edgetrain.exchange.messages import Welcome
from edgetrain.exchange.seam import Entry


class WayUp(Link):
    """A Link whose contributions are sites', in full precision, and whose replies are kept as they
    came. `ask_in` and `poll_join` take the place of `join`."""

    def poll_join(self) -> Entry | None:
        """Go on by what has arrived: the entry, once training starts. Raises what `join` does."""
        while (frames := self._transport.receive(0.0)) is not None:
            self._check_connection()
            if (entry := self._accept_before_start(self._read(frames))) is not None:
                return entry
        self._check_connection(silence=True)
        self._silence.check()
        return None

    def check_silence(self) -> None:
        """Raise HubUnreachable if the hub above has been silent for too long, as `wait` does."""
        self._silence.check()

    def _take_terms(self, welcome: Welcome, joining: Newcomer) -> None:
        super()._take_terms(welcome, joining)
        self.outbox.codec = codecs.verbatim(self.outbox.codec)
        self.inbox.keeps_payloads = True
