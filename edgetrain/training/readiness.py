"""What this machine has for each thing that edgetrain does, and the way out where it has not.

Each check looks and changes nothing. torch is tried in a process of its own: on a CPU that a build
of it does not fit it dies of an illegal instruction.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from edgetrain.errors import EdgetrainError
from edgetrain.extras import install_command

Verdict = Literal["yes", "limited", "no"]

PURPOSES = ("run", "simulate", "hub", "member", "private", "report")

_MEMBER_BYTES = 400 << 20
"""A process with torch and a small model takes about this much."""
_HUB_BYTES = 100 << 20
_DISK_BYTES = 200 << 20
PORT = 5555
"""The port that a hub listens on, if none is named."""
_TRY_TORCH = """
import torch
(torch.ones(64, 64) @ torch.ones(64, 64)).sum().item()
print(torch.__version__, "idle" if torch.version.cuda and not torch.cuda.is_available() else "")
"""
_CPU_BUILD = "its build for CPUs, with the line of https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    said: str
    way_out: str = ""
    """The way out, unless the verdict is "yes"."""
    purposes: tuple[str, ...] = PURPOSES


def checks(runs: Path, keys: Path, purpose: str = "") -> Iterator[Check]:
    """Look at everything, or at what one of PURPOSES needs. `runs` is where run folders will be,
    `keys` the folder of this machine's keys."""
    looks: tuple[tuple[tuple[str, ...], Callable[[], Check]], ...] = (
        (("run", "simulate", "member"), _torch),
        (("run", "simulate", "hub", "member"), _kernels),
        (("run",), _namespaces),
        (("simulate",), lambda: _extra("greenlet", "the simulator", "lab")),
        (("run", "simulate"), lambda: _extra("matplotlib", "pictures", "lab", "limited")),
        (("private",), lambda: _extra("cryptography", "masks", "private")),
        (("private",), lambda: _extra("dp_accounting", "epsilon", "private")),
        (("run", "simulate", "member"), lambda: _memory(_MEMBER_BYTES, "a member")),
        (("hub",), lambda: _memory(_HUB_BYTES, "a hub")),
        (("run", "simulate", "hub", "member", "report"), lambda: _disk(runs)),
        (("hub", "member"), _clock),
        (("hub", "member"), lambda: _keys(keys)),
        (("hub", "member"), _interfaces),
        (("hub", "member"), _windows),
        (("hub",), _port),
        (("member",), _energy),
    )
    for purposes, look in looks:
        if not purpose or purpose in purposes:
            found = look()
            yield Check(found.name, found.verdict, found.said, found.way_out, purposes)


def _torch() -> Check:
    if find_spec("torch") is None:
        return Check("torch", "no", "not installed", _CPU_BUILD)
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRY_TORCH],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check("torch", "limited", "took more than two minutes to load", "a slow disk?")
    if tried.returncode == -signal.SIGILL:
        return Check(
            "torch", "no", "this build needs instructions that this CPU does not have",
            "another version: docs/how-to/flashing.md says which runs on which board",
        )  # fmt: skip
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Check("torch", "no", f"does not load: {last}", "pip install --force-reinstall torch")
    version, _, idle = tried.stdout.strip().partition(" ")
    if idle:
        said = f"{version} runs on this CPU: a build for CUDA, of gigabytes, and no GPU is found"
        return Check("torch", "limited", said, _CPU_BUILD)
    return Check("torch", "yes", f"{version} runs on this CPU")


def _kernels() -> Check:
    from edgetrain.codecs.kernels.chosen import backend

    found = backend()
    if found.name == "numpy":
        return Check("codecs", "limited", found.sentence, "install a C compiler (gcc)")
    return Check("codecs", "yes", found.sentence)


def _namespaces() -> Check:
    from edgetrain.fleet.networks.emulation import probe

    possible, why = probe.packets_possible()
    if possible:
        return Check("networks", "yes", f"emulated packet by packet: {why}")
    return Check(
        "networks", "limited", f"emulated approximately, by a proxy: {why}",
        "allow user namespaces, or run as root",
    )  # fmt: skip


def _extra(module: str, what: str, extra: str, without: Verdict = "no") -> Check:
    if find_spec(module) is not None:
        return Check(module, "yes", f"installed, for {what}")
    return Check(module, without, f"not installed; {what} need it", install_command(extra))


def _memory(needed: int, whom: str) -> Check:
    from edgetrain.runs.environment import free_memory

    free = free_memory()
    said = (
        f"{free / 1e6:,.0f} MB free; {whom} takes about {needed / 1e6:,.0f} MB with a small model"
    )
    if free < needed:
        return Check(
            f"memory, {whom.split()[1]}",
            "no",
            said,
            "end something else, or add swap on a fast disk",
        )
    return Check(f"memory, {whom.split()[1]}", "yes", said)


def _disk(runs: Path) -> Check:
    there = runs.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    said = f"{free / 1e6:,.0f} MB free for run folders in {there}"
    if free < _DISK_BYTES:
        return Check(
            "disk", "limited", said, "free some space, or choose another place with --runs"
        )
    return Check("disk", "yes", said)


def _clock() -> Check:
    """A board without a battery begins in 1970; tokens expire by the clock."""
    built = Path(__file__).stat().st_mtime
    now = time.time()
    said = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    if now < built - 86_400:
        return Check(
            "clock", "limited", f"says {said}, before edgetrain was installed",
            "set the time (timedatectl set-ntp true): tokens expire by it",
        )  # fmt: skip
    return Check("clock", "yes", said)


def _keys(folder: Path) -> Check:
    from edgetrain.exchange.keys.keyring import Keyring

    ring = Keyring(folder)
    if not ring.exists:
        return Check(
            "keys", "limited", f"none in {folder}: nothing would be encrypted",
            "`edgetrain keys init` makes them",
        )  # fmt: skip
    try:
        ring.pair()
    except EdgetrainError as error:
        return Check(
            "keys", "no", str(error), error.hint or "make new ones: `edgetrain keys init --replace`"
        )
    return Check("keys", "yes", f"in {folder}, and only its owner can read them")


def _interfaces() -> Check:
    from edgetrain.exchange.addresses import interface_states, interfaces

    found = [
        f"{each.name} {each.address}" for each in interfaces() if each.up and not each.loopback
    ]
    if found:
        return Check("interfaces", "yes", ", ".join(found[:4]))
    down = sorted(name for name, up in interface_states().items() if not up and name != "lo")
    said = "none is up with an address" + (f"; down: {', '.join(down[:4])}" if down else "")
    said += ": only this machine can be reached"
    return Check("interfaces", "limited", said, "connect a cable, or join a Wi-Fi network")


def _windows() -> Check:
    from edgetrain.exchange.zeromq.tcp_counters import restarts_after_idle

    if restarts_after_idle():
        return Check(
            "TCP windows", "limited",
            "TCP slow start restarts after idle: after each pause, messages over 14.6 kB need "
            "extra round trips",
            "sysctl -w net.ipv4.tcp_slow_start_after_idle=0, on the hub and on members",
        )  # fmt: skip
    return Check("TCP windows", "yes", "kept over pauses")


def _port() -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", PORT))  # noqa: S104  only to see whether it is free
        except OSError as error:
            return Check(
                "port", "limited", f"{PORT} cannot be listened on: {error.strerror}",
                "choose another: hub --bind tcp://HOST:PORT",
            )  # fmt: skip
    return Check("port", "yes", f"{PORT} is free")


def _energy() -> Check:
    from edgetrain.fleet import devices
    from edgetrain.fleet.devices.energy import joules_source

    source = joules_source("host")
    board = devices.here() or "this machine"
    if source is None:
        return Check("energy", "limited", f"{board}: no sensor", "joules are left out of the run")
    return Check("energy", "yes", f"{board}: {source}")
