"""The backends that this machine can run, and why. Does not change the machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from edgetrain.fleet import interpreters
from edgetrain.fleet.networks.profile import Profile

# A child tries what the emulator will do, so that this process stays in its namespaces.
_TRIAL = """
import sys
from edgetrain.errors import EdgetrainError
from edgetrain.fleet.networks.emulation import fabric, ring
try:
    how = fabric.become_able()
    hosts = fabric.build(1, "reno")
    ring.Port(hosts[0].port, 8).close()
    print(how)
except EdgetrainError as error:
    sys.exit(str(error))
except OSError as error:
    sys.exit(f"no emulated hosts here: {error}")
"""


@cache
def packets_possible() -> tuple[bool, str]:
    """Return whether this process can make network namespaces and see packets; how, or why not."""
    if not sys.platform.startswith("linux"):
        return False, f"{sys.platform} has no network namespaces"
    trial = subprocess.run(
        [sys.executable, "-c", _TRIAL],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=interpreters.environment(),
    )
    if trial.returncode == 0:
        return True, trial.stdout.strip()
    lines = trial.stderr.strip().splitlines()
    return False, lines[-1] if lines else f"the trial ended with {trial.returncode}"


def choose(backend: str, profiles: Sequence[Profile], needs_links: bool = False) -> tuple[str, str]:
    """The requested backend, or for "auto" the best that works here, and why it is that one.

    `packet` comes before `tc`: it keeps order under jitter without bias, measures its own lateness
    and supports faults; both carry real TCP. `needs_links`: sites or faults need an emulator even
    if no profile does.
    """
    if backend != "auto":
        return backend, "asked for"
    if all(p.up.is_plain and p.down.is_plain for p in profiles) and not needs_links:
        return "none", "no member's network changes traffic"
    possible, how = packets_possible()
    if possible:
        return "packet", f"real TCP over emulated packets, {how}"
    return "stream", f"approximate: {how}"
