"""Any commands inside emulated hosts, on the same links as edgetrain.

    python benchmarks/lab.py --hosts 4 --network 4g-bad -- sh -c 'ping -c 3 $EDGETRAIN_HUB'
    python benchmarks/lab.py --hosts 2 --network wan-200ms --shell 1

Host 0 is the hub, the others are members. A command runs in each host; environment variables give
its own number and the addresses of all hosts. benchmarks/peers.py runs other tools in one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

from edgetrain.__main__ import carry_out
from edgetrain.errors import ConfigError, NetworkError
from edgetrain.fleet import networks
from edgetrain.fleet.assignment import networks_of
from edgetrain.fleet.interpreters import PACKAGE_PARENT
from edgetrain.fleet.networks.emulation.backends import Packeted
from edgetrain.fleet.networks.emulation.emulation import Attachment, Emulation
from edgetrain.fleet.networks.emulation.fabric import address_of
from edgetrain.fleet.networks.emulation.namespaces import Namespace
from edgetrain.fleet.networks.emulation.start import emulate
from edgetrain.fleet.networks.profile import Profile

_PATIENCE_SECONDS = 5.0

# Enters the namespace, then executes the command. A new interpreter has a single thread.
_ENTER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from edgetrain.fleet.networks.emulation import linux
from edgetrain.fleet.networks.emulation.namespaces import Namespace
Namespace(*map(int, sys.argv[2:5])).enter()
linux.die_with_parent(signal.SIGKILL)
try:
    os.execvp(sys.argv[5], sys.argv[5:])
except OSError as error:
    sys.exit(f"{sys.argv[5]}: {error.strerror}")
"""


def _entering(space: Namespace, arguments: Sequence[str]) -> list[str]:
    place = [str(PACKAGE_PARENT), str(space.pid), str(space.fd), str(space.inode)]
    return [sys.executable, "-c", _ENTER, *place, *arguments]


def environment(host: int, hosts: int) -> dict[str, str]:
    """Return the variables of a command. HOST 0 is the hub; ADDRESSES are separated by spaces."""
    return {
        "EDGETRAIN_HOST": str(host),
        "EDGETRAIN_HOSTS": str(hosts),
        "EDGETRAIN_ADDRESS": address_of(host),
        "EDGETRAIN_HUB": address_of(0),
        "EDGETRAIN_ADDRESSES": " ".join(address_of(number) for number in range(hosts)),
    }


def start(
    attachment: Attachment, arguments: Sequence[str], extra: Mapping[str, str], piped: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command inside a host. The caller waits for it, and reads what it says if `piped`."""
    if not isinstance(attachment.namespace, Namespace):
        raise NetworkError("a lab needs hosts of their own", "use backend packet or tc")
    return subprocess.Popen(
        _entering(attachment.namespace, arguments),
        env={**os.environ, **extra},
        stdout=subprocess.PIPE if piped else None,
        stderr=subprocess.PIPE if piped else None,
        start_new_session=True,
    )


def run(
    profiles: Sequence[Profile],
    member_command: Sequence[str],
    hub_command: Sequence[str] = (),
    backend: str = "packet",
    seed: int = 0,
) -> int:
    """Run a command in every member's host and one in the hub's; return the worst exit status.

    The hub's command is a server: it is stopped when the last member's command has ended. Ctrl-C
    ends all commands and all processes that they have started. Where more than one command runs,
    each line that one prints begins with its host.
    """
    with emulate(profiles, backend=backend, seed=seed) as net:
        hosts = len(profiles) + 1
        piped = bool(hub_command) or len(profiles) > 1
        said = _Said()
        running: list[subprocess.Popen[bytes]] = []
        served: list[subprocess.Popen[bytes]] = []
        try:
            if hub_command:
                hub = start(net.hub_attachment(), hub_command, environment(0, hosts), piped)
                served.append(hub)
                said.follow("hub", hub)
            for member in range(len(profiles)):
                extra = environment(member + 1, hosts)
                process = start(net.attachment(member), member_command, extra, piped)
                running.append(process)
                said.follow(f"host {member + 1}", process)
            return max(process.wait() for process in running)
        finally:
            for process in (*running, *served):
                _stop(process)
            _evict(net)
            said.close()


class _Said:
    """Prints the output of commands line by line, each with the host it comes from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []

    def follow(self, host: str, process: subprocess.Popen[bytes]) -> None:
        for pipe, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                reader = threading.Thread(target=self._read, args=(host, pipe, out), daemon=True)
                reader.start()
                self._readers.append(reader)

    def _read(self, host: str, pipe: IO[bytes], out: TextIO) -> None:
        with pipe:
            for line in pipe:
                with self._lock:
                    text = line.decode(errors="replace").rstrip("\r\n")
                    print(f"{host} | {text}", file=out, flush=True)

    def close(self) -> None:
        """Wait for the last lines. All who could write have ended."""
        for reader in self._readers:
            reader.join(_PATIENCE_SECONDS)


def shell(profiles: Sequence[Profile], host: int, backend: str = "packet", seed: int = 0) -> int:
    """Run an interactive shell in one host; the other hosts are idle. Return its exit status."""
    with emulate(profiles, backend=backend, seed=seed) as net:
        attachment = net.hub_attachment() if host == 0 else net.attachment(host - 1)
        try:
            return _interactive(attachment, host, len(profiles) + 1)
        finally:
            _evict(net)


def _evict(net: Emulation) -> None:
    """End processes that the commands left behind, including those in sessions of their own."""
    if isinstance(net, Packeted):
        net.evict()


def _interactive(attachment: Attachment, host: int, hosts: int) -> int:
    if attachment.namespace is None:
        raise NetworkError("a lab needs hosts of their own", "use backend packet or tc")
    program = os.environ.get("SHELL", "/bin/sh")
    # The shell shares our terminal and handles Ctrl-C itself. Executed programs inherit "ignore",
    # but not a handler.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        command = _entering(attachment.namespace, [program])
        return subprocess.call(command, env={**os.environ, **environment(host, hosts)})
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        except PermissionError:
            process.send_signal(number)
        try:
            process.wait(_PATIENCE_SECONDS)
            if number == signal.SIGTERM:
                continue
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def chosen(arguments: argparse.Namespace) -> int:
    """What the command line asks for; its exit status. Raises ConfigError."""
    if arguments.hosts < 1:
        raise ConfigError(f"--hosts {arguments.hosts} is out of range", "allowed: 1 or more")
    names = networks_of(arguments.network, arguments.hosts)
    profiles = [networks.load(name) for name in names]
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if arguments.shell is not None:
        if not 0 <= arguments.shell <= arguments.hosts:
            raise ConfigError(
                f"--shell {arguments.shell} is out of range", f"allowed: 0 to {arguments.hosts}"
            )
        return shell(profiles, arguments.shell, arguments.backend, arguments.seed)
    if not command:
        raise ConfigError("no command to run", "put it after --, or ask for --shell 1")
    hub = shlex.split(arguments.hub)
    return run(profiles, command, hub, arguments.backend, arguments.seed)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(debug=False)
    parser.add_argument("--hosts", type=int, default=2, help="members beside the hub (default: 2)")
    parser.add_argument("--network", default="wan-200ms", help="one profile, or a mix wifi:1, 3g:1")
    parser.add_argument("--hub", default="", metavar="COMMAND", help="run this in the hub's host")
    parser.add_argument("--shell", type=int, metavar="HOST", help="a shell in a host, 0: the hub")
    parser.add_argument("--backend", choices=("packet", "tc"), default="packet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="COMMAND", help="after --: run by each member"
    )
    arguments = parser.parse_args(words)
    return carry_out(lambda: chosen(arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
