"""The interface of an emulation: links for the members of one machine.

    with emulate(profiles, ("127.0.0.1", 0)) as net:
        hub process:    net.hub_attachment().enter(), then bind net.hub_address
        member i:       own = net.attachment(i); own.enter(), then connect to own.address

`start` has `emulate`, `probe` chooses the backend. The emulator is a process of its own, which ends
with the process that started it, even if that is killed. Does not load torch or zmq.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks import congestion as control
from edgetrain.fleet.networks.emulation import lateness
from edgetrain.fleet.networks.emulation.namespaces import Namespace
from edgetrain.fleet.networks.faults import Fault
from edgetrain.fleet.networks.profile import BARE, Profile
from edgetrain.fleet.networks.site import Site


@dataclass(frozen=True, slots=True)
class Attachment:
    """Attaches one process to the emulated network. Can be pickled.

    A member connects to `hubs`, the lead's address first; a hub binds its own, which is the one of
    its `hubs`. Call `enter` once, in the process itself, before it opens a socket and before it
    starts a thread.
    """

    hubs: tuple[str, ...]
    namespace: Namespace | None = None
    host: str = ""
    """The address at which other members reach this one, without a port; "": they cannot."""

    @property
    def address(self) -> str:
        """The lead's address, or a hub's own."""
        return self.hubs[0]

    def enter(self) -> None:
        """Move this process into its network. Raises NetworkError if it cannot."""
        if self.namespace is not None:
            self.namespace.enter()


@dataclass(frozen=True, slots=True)
class EmulationRequest:
    """The links to emulate: the checked arguments of `emulate`."""

    profiles: tuple[Profile, ...]
    hub: tuple[str, int]
    seed: int = 0
    congestion: str = "cubic"
    sites: tuple[Site, ...] = ()
    faults: tuple[Fault, ...] = ()
    hubs: tuple[Profile, ...] = (BARE,)
    """The access link of each hub; BARE: it has none of its own."""
    nat: frozenset[int] = frozenset()
    """Members to which nobody can connect."""

    @property
    def bare_hubs(self) -> bool:
        """Whether no hub has a link of its own."""
        return all(hub.up.is_plain and hub.down.is_plain for hub in self.hubs)

    @property
    def smallest_delay_ms(self) -> float:
        """The smallest delay of all links with a delay; the limit of lateness is a share of it."""
        ways = [
            way for profile in (*self.profiles, *self.hubs) for way in (profile.up, profile.down)
        ]
        return min((way.mean_delay_ms for way in ways if way.mean_delay_ms), default=0.0)


class Emulation(ABC):
    """A running emulation. Leave the `with` block, or call `close`, to end it."""

    backend: str

    def __init__(self, request: EmulationRequest, reason: str) -> None:
        self.request = request
        self.reason = reason
        self._final: dict[str, Any] | None = None

    @property
    def pid(self) -> int | None:
        return None

    @property
    @abstractmethod
    def hub_addresses(self) -> tuple[str, ...]:
        """The tcp:// address that each hub binds, after `hub_attachment(number).enter()`."""

    @property
    def hub_address(self) -> str:
        return self.hub_addresses[0]

    @abstractmethod
    def attachment(self, member: int) -> Attachment:
        """Return the attachment of a member's process."""

    def hub_attachment(self, number: int = 0) -> Attachment:
        """Return the attachment of a hub's process; 0 is the lead."""
        return Attachment((self.hub_addresses[number],))

    def start_faults(self, began_s: float | None = None) -> None:
        """Start the schedule of faults, now or at `began_s` of time.monotonic()."""
        if self.request.faults:
            raise NetworkError(f"backend '{self.backend}' has no faults", "use packet or stream")

    def report(self) -> dict[str, Any]:
        """Return the facts for the run folder: backend, reason, kernel, lateness, timing_ok."""
        if self._final is not None:
            return self._final
        measured = self._measured()
        limit = lateness.limit_ms(self.request.smallest_delay_ms)
        late = measured.get("late_ms_p99")  # None if it is not measured: backends none and tc
        kept = late is None or late <= limit
        return {
            "backend": self.backend,
            "reason": self.reason,
            "kernel": platform.release(),
            "congestion": self._congestion(),
            "late_ms_p99": late,
            "late_limit_ms": limit,
            "timing_ok": kept and not measured.get("ring_dropped", 0),
            **measured,
        }

    def _congestion(self) -> str:
        return control.of_kernel()

    def _measured(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """End the emulation and keep its last report. May be called twice."""
        if self._final is None:
            try:
                self._final = self.report()
            except NetworkError as error:
                self._final = {"backend": self.backend, "reason": self.reason, "timing_ok": False}
                self._final["error"] = str(error)
            self._end()

    def _end(self) -> None:
        return

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
