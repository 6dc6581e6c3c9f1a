"""Shape a real interface, with a dead man's switch that restores it in any case.

Order: check that the interface may be changed, start the detached reverter, then change. The
reverter restores the interface when its time is over, when renewals stop, when its owner ends, and
on `clear`. It is in a session of its own, so that it survives the loss of an SSH connection.

    python -m edgetrain.fleet.networks.emulation.guard STATE_FILE   (started by `apply`)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, NetworkError
from edgetrain.fleet import interpreters
from edgetrain.fleet.networks import profile as profiles
from edgetrain.fleet.networks.emulation.tc import Shaping

#: Kinds of interfaces whose TCP is seen in the frames of the interface that they are on.
_PLAIN_KINDS = ("vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "veth")
#: The kernel's default qdiscs of an interface.
_DEFAULT_QDISCS = ("noqueue", "pfifo_fast", "pfifo", "fq_codel", "fq", "mq", "cake", "noop")
_SSH_PORT = 22
_LOOK_SECONDS = 0.2
_READY_SECONDS = 10.0

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(list(command), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NetworkError(f"no program '{command[0]}'", "install iproute2") from None


@dataclass(frozen=True, slots=True)
class ShapingLimits:
    """Limits on the time that a shaping lasts.

    At most `seconds`; if `renew_seconds` is not 0, at most this long after the last renewal; if
    `owner` is not 0, at most as long as this process runs.
    """

    seconds: float
    renew_seconds: float = 0.0
    owner: int = 0


def folder() -> Path:
    return Path(os.environ.get("EDGETRAIN_STATE", "/run/edgetrain"))


def state_file(device: str) -> Path:
    return folder() / f"shaped-{device}.json"


def ports_allowed(ports: Sequence[int]) -> tuple[int, ...]:
    """Return the ports, if they may be shaped.

    Raises ConfigError for a port out of range, for SSH's port, and if there is no port.
    """
    for port in ports:
        if not 0 < port < 65536:
            raise ConfigError(f"port {port} is out of range", "allowed: 1 to 65535")
        if port == _SSH_PORT:
            raise ConfigError("port 22 is SSH's and is never shaped", "give the job's own port")
    if not ports:
        raise ConfigError("no port to shape", "--port 5555, the hub's port")
    return tuple(ports)


def refuse_foreign(device: str, run: Run = run_command) -> None:
    """Raise NetworkError if the interface is missing or has a qdisc that is not a default."""
    shown = run(["tc", "-j", "qdisc", "show", "dev", device])
    if shown.returncode:
        raise NetworkError(
            f"no interface '{device}': {shown.stderr.strip()}", "`ip -brief link` lists them"
        )
    for entry in json.loads(shown.stdout or "[]"):
        kind = str(entry.get("kind"))
        # An ingress qdisc is never a default; a root qdisc is foreign unless it is a default.
        if kind in ("ingress", "clsact") or (entry.get("root") and kind not in _DEFAULT_QDISCS):
            raise NetworkError(
                f"{device} already has the qdisc '{kind}', which this run did not set",
                f"`edgetrain networks clear --dev {device}` if an earlier run left it",
            )


def refuse_hidden(device: str, run: Run = run_command) -> None:
    """Raise NetworkError if an interface carries others in whose frames `tc` sees no TCP ports.

    One VLAN tag is seen; two, 802.1ad, MACsec, tunnels and a switch's ports are not.
    """
    links = json.loads(run(["ip", "-j", "-d", "link", "show"]).stdout or "[]")
    tagged: list[str] = []
    for link in sorted(links, key=lambda each: each.get("link") != device):
        info = link.get("linkinfo", {})
        kind, below = info.get("info_kind"), link.get("link")
        is_tag = kind == "vlan"
        plain = kind in _PLAIN_KINDS and info.get("info_data", {}).get("protocol") != "802.1ad"
        if (below == device and not plain) or (below in tagged and (is_tag or not plain)):
            raise NetworkError(
                f"{device} carries {link['ifname']} ({kind}), whose TCP ports are not seen there",
                f"--dev {link['ifname']}",
            )
        tagged += [link["ifname"]] if below == device and is_tag else []


def apply(shaping: Shaping, terms: ShapingLimits, run: Run = run_command) -> int:
    """Shape an interface under guard; return the reverter's process id.

    Changes nothing before the reverter is ready. If a command fails, the interface is restored and
    NetworkError contains the message of `tc`.
    """
    ports_allowed(shaping.ports)
    refuse_foreign(shaping.device, run)
    refuse_hidden(shaping.device, run)
    file = state_file(shaping.device)
    if file.exists():
        raise NetworkError(
            f"{shaping.device} is shaped already", f"edgetrain networks clear --dev {file.stem[7:]}"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, {"undo": shaping.undo(), "renewed": _clock(), **_terms(terms)})
    pid = start_reverter(file)
    for command in shaping.commands():
        renew(shaping.device)
        done = run(command)
        if done.returncode:
            clear(shaping.device)
            said = done.stderr.strip() or f"exit status {done.returncode}"
            raise NetworkError(
                f"`{' '.join(command)}` failed: {said}; the interface is restored",
                "shaping needs root and a kernel with sch_netem, sch_prio, cls_flower and ifb",
            )
    renew(shaping.device)
    return pid


def _terms(terms: ShapingLimits) -> dict[str, float]:
    return {
        "until": _clock() + terms.seconds,
        "renew_seconds": terms.renew_seconds,
        "owner": terms.owner,
    }


def renew(device: str) -> None:
    """Keep the shaping for another `renew_seconds`. Raises NetworkError if it has ended."""
    file = state_file(device)
    state = _read(file)
    if state is None:
        raise NetworkError(f"{device} is not shaped", "its reverter has restored it")
    _write(file, {**state, "renewed": _clock()})


def clear(device: str, run: Run = run_command) -> bool:
    """Restore an interface now. Returns False if edgetrain did not shape it."""
    file = state_file(device)
    state = _read(file)
    if state is None:
        return False
    for command in state["undo"]:
        run(command)
    file.unlink(missing_ok=True)
    return True


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _write(file: Path, state: dict[str, Any]) -> None:
    """Write the state atomically: the reverter may read it at any time."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(state), "utf-8")
    fresh.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return state


def start_reverter(file: Path) -> int:
    """Start the reverter detached, and wait until it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "edgetrain.fleet.networks.emulation.guard", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=interpreters.environment(),
    )
    assert process.stdout is not None
    with process.stdout as output:
        said = output.readline().split()
    process.wait(_READY_SECONDS)  # it forks once more, to become a child of init
    if len(said) != 2 or said[0] != b"ready":
        file.unlink(missing_ok=True)
        raise NetworkError("the reverter did not start, so nothing was changed")
    return int(said[1])


def why_over(state: dict[str, Any], now: float, owner_alive: Callable[[int], bool]) -> str:
    """Return why the shaping must end now, or "" if it may stay."""
    if now > state["until"]:
        return "its time is over"
    if state["renew_seconds"] and now > state["renewed"] + state["renew_seconds"]:
        return "it was not renewed"
    if state["owner"] and not owner_alive(state["owner"]):
        return "its owner has ended"
    return ""


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def main() -> None:
    file = Path(sys.argv[1])
    device = file.stem.removeprefix("shaped-")
    if os.fork():
        os._exit(0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, f"ready {os.getpid()}\n".encode())
    with contextlib.suppress(OSError):
        os.close(1)
    while (state := _read(file)) is not None:
        if why_over(state, _clock(), _alive):
            clear(device)
            return
        time.sleep(_LOOK_SECONDS)


def shaping(device: str, name: str, ports: Sequence[int]) -> Shaping:
    """Build a shaping for profile `name`. Raises ConfigError for a bad name or port."""
    profile = profiles.load(name)
    return Shaping(device, profile, ports_allowed(ports))


if __name__ == "__main__":
    main()
