"""The way up of a gateway: the socket and the link between a site's hub and the hub above.

`training.hub` serves the site, as any hub. Nothing here prints or decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgetrain.errors import ConfigError
from edgetrain.exchange.addresses import listen_on, split_address
from edgetrain.exchange.gateway.way_up import WayUp
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.member_socket import MemberSocket


def check_above(addresses: Sequence[str], bind: str) -> None:
    """Raise ConfigError if the hub above at one of these addresses is the gateway itself, which
    listens at `bind`; NetworkError if it cannot."""
    host, port = split_address(bind)
    own = {each.address for each in listen_on(host, port).reachable}
    own |= {host, "localhost", "127.0.0.1", "::1"}
    for above in addresses:
        if split_address(above)[1] == port and split_address(above)[0] in own:
            raise ConfigError(
                f"--above {above} is this gateway's own address",
                "give the address of the hub above, and --bind another port if both are here",
            )


class Uplink:
    """The connection of one site to the hub above, at the first of `above` that answers.

    `members` are those of the site, `name` is what its gateway asks to be called. `hub_timeout_s`:
    for how long a hub above that is away is waited for. Owns its socket.
    """

    def __init__(
        self,
        above: Sequence[str],
        name: str,
        members: int,
        clock: Callable[[], float],
        credentials: Credentials | None = None,
        hub_timeout_s: float = 600.0,
    ) -> None:
        self.members, self.name = members, name
        self.wake: Callable[[MemberSocket], None] = lambda transport: None
        """Called with each socket to the hub above: what arrives there is to be looked at."""
        self._above, self._clock = above, clock
        self._credentials, self._hub_timeout_s = credentials, hub_timeout_s
        self._link: WayUp | None = None

    def connect(self) -> WayUp:
        transport = MemberSocket(self._above, credentials=self._credentials)
        self.wake(transport)
        self._link = WayUp(transport, self._clock, self._hub_timeout_s, self._hub_timeout_s)
        return self._link

    def traffic(self) -> Traffic:
        """Bytes to and from the hub above; zeros before there is a connection."""
        return Traffic(0, 0, 0, 0.0) if self._link is None else self._link.traffic()

    def close(self, finished: bool, say: Callable[[str], None]) -> None:
        """Leave the hub above, if the site has `finished`; otherwise only let go. `say` gets a line
        with the bytes that went there and came. Works twice."""
        if self._link is None:
            return
        carried = self.traffic()
        sent, received = carried.sent_bytes, carried.received_bytes
        say(f"sent {sent:,} bytes to the hub above, received {received:,}")
        if finished:
            self._link.leave("done")
        else:
            self._link.vanish()
