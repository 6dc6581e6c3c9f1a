"""Start an emulation on a backend that this machine can run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.fleet.networks import congestion as control
from edgetrain.fleet.networks.emulation import probe
from edgetrain.fleet.networks.emulation.emulation import Emulation, EmulationRequest
from edgetrain.fleet.networks.faults import Fault, refuse_idle
from edgetrain.fleet.networks.nodes import by_node
from edgetrain.fleet.networks.profile import BARE, Profile
from edgetrain.fleet.networks.site import Site


def emulate(
    profiles: Sequence[Profile],
    hub: tuple[str, int] = ("127.0.0.1", 0),
    backend: str = "auto",
    seed: int = 0,
    *,
    congestion: str = "cubic",
    sites: Sequence[Site] = (),
    faults: Sequence[Fault] = (),
    hubs: Sequence[Profile] = (BARE,),
    nat: Collection[int] = (),
) -> Emulation:
    """Start links for members 0 … n-1; member i has `profiles[i]`. Use it as a context manager.

    `hub` is the IP address and port that the hub will bind; for port 0 the emulation chooses one.
    The backends packet and tc have a network of their own: the hub gets an address there and keeps
    its port. `backend` is auto, none, stream, packet or tc. `congestion` is set for all emulated
    links: any algorithm of this kernel with packet; cubic, reno or (without loss) none with stream.
    `sites` share an uplink (packet); `faults` count from `start_faults()` (packet, stream). `hubs`
    has the link of each hub (packet, tc; several without links everywhere); nobody can connect to
    the members of `nat` (packet).

    Raises ConfigError for arguments that contradict each other, NetworkError for links that this
    machine cannot emulate.
    """
    from edgetrain.fleet.networks.emulation.backends import Bare, Packeted, Shaped, Streamed

    if not profiles:
        raise ConfigError("an emulation needs one network profile per member", "give one or more")
    refuse_idle(faults, by_node(profiles, hubs))
    request = EmulationRequest(
        tuple(profiles), hub, seed, congestion, tuple(sites), tuple(faults), tuple(hubs),
        frozenset(nat),
    )  # fmt: skip
    made = {kind.backend: kind for kind in (Bare, Streamed, Packeted, Shaped)}
    needs_links = bool(sites or faults or nat) or not request.bare_hubs
    chosen, reason = probe.choose(backend, request.profiles, needs_links)
    if chosen not in made:
        raise ConfigError(f"no backend '{backend}'", did_you_mean(backend, [*made, "auto"]))
    if chosen == "stream":
        control.require_model(congestion, "the stream backend")
    return made[chosen](request, reason)
