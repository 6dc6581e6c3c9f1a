"""`edgetrain keys`: this machine's key pair, and the devices that may join a hub here."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.cli import common
from edgetrain.cli.parser import add_verbs
from edgetrain.errors import ConfigError, explain_os_errors

if TYPE_CHECKING:
    from edgetrain.exchange.keys.keyring import Keyring

HELP = "who may join: init, enroll, list, known-hosts, revoke"
ABOUT = "Key pairs of this machine, and the list of devices that a hub here lets in."
EXAMPLES = """\
on the hub's machine:
  edgetrain keys init
  edgetrain keys enroll pi-3                       prints a token that lets one device in
  edgetrain hub job.toml --bind tcp://eth0:5555    encrypted; enrols whoever has a token
on the device:
  edgetrain keys enroll --hub tcp://192.168.1.5:5555 --token -          asks for it
  edgetrain keys enroll --hub tcp://192.168.1.5:5555 --token @FILE      reads it
  edgetrain member job.toml --hub tcp://192.168.1.5:5555 --index 3
at any time, also while the hub runs:
  edgetrain keys list
  edgetrain keys revoke pi-3
  edgetrain keys known-hosts                        SSH host keys: append them to ~/.ssh/known_hosts

A token on the command line is seen by all users of the machine (ps): prefer '-' or @FILE. If the
power or the network fails, enrol again with the same token, until it expires.

exit status: 0 done; 2 it will not get better by itself (a wrong file, an unknown or used token);
75 try again later (nobody answers, no route, the name cannot be resolved).
"""

LONGEST_TOKEN_FILE = 4096
"""Characters that are read of a file with a token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_verbs(parser)
    init = add("init", _init, "make this machine's key pair")
    init.add_argument("--replace", action="store_true", help="make a new pair in place of the old")
    enroll = add(
        "enroll",
        _enroll,
        "let a device in: at the hub NAME prints a token, at the device --hub --token uses it",
    )
    enroll.add_argument("name", nargs="?", default="", help="at the hub: what the device is called")
    enroll.add_argument("--minutes", type=float, default=60.0, help="the token holds (default: 60)")
    enroll.add_argument("--key", help="at the hub: the device's public key, in place of a token")
    enroll.add_argument(
        "--hub", action="append", metavar="tcp://HOST:PORT",
        help="at the device: a running hub; several times for its other addresses, the first that "
        "answers is used",
    )  # fmt: skip
    enroll.add_argument(
        "--token", metavar="TOKEN",
        help="at the device: what the hub's owner was given; @FILE: in this file; '-': ask for it",
    )  # fmt: skip
    enroll.add_argument(
        "--ssh-host-key", type=Path, metavar="FILE",
        help="at the device: its public SSH host key, for the hub to keep",
    )  # fmt: skip
    enroll.add_argument(
        "--cluster", type=Path, metavar="FILE", help="at the hub: a token for each device of a file"
    )
    enroll.add_argument(
        "--out", type=Path, metavar="FILE", help="with --cluster: where they go; keep it secret"
    )
    listing = add("list", _list, "this machine's public key, devices, open tokens, hubs")
    known = add(
        "known-hosts",
        _known_hosts,
        "the SSH host keys of enrolled devices, as ~/.ssh/known_hosts wants them",
    )
    known.add_argument(
        "--cluster", type=Path, metavar="FILE", help="also by the static addresses of this file"
    )
    revoke = add(
        "revoke",
        _revoke,
        "let a device in no longer, close its tokens (of a lost card); a running hub drops it",
    )
    revoke.add_argument("who", metavar="NAME", help="its name, or its public key")
    for each in (init, enroll, listing, known, revoke):
        common.add_keys(each)
        common.try_again(each)
        common.add_json(each)


def _ring(arguments: argparse.Namespace) -> Keyring:
    from edgetrain.exchange.keys.keyring import Keyring
    from edgetrain.exchange.keys.pairs import keys_folder

    return Keyring(keys_folder(arguments.keys))


def _init(arguments: argparse.Namespace) -> int:
    from edgetrain.exchange.keys.pairs import spell
    from edgetrain.exchange.zeromq.curve import new_pair

    ring = _ring(arguments)
    pair = ring.init(new_pair, replace=arguments.replace)
    return common.answer(
        arguments,
        {"public": spell(pair.public), "folder": str(ring.path)},
        f"made a key pair in {ring.path}; public key:\n{spell(pair.public)}",
    )


def _enroll(arguments: argparse.Namespace) -> int:
    """At the hub: print a token for a device, or put its public key on the list. With --hub, at the
    device: use one."""
    if arguments.hub:
        return _enroll_here(arguments)
    if arguments.cluster:
        return _let_cluster_in(arguments)
    if not arguments.name or arguments.token:
        raise ConfigError(
            "who is to be enrolled?",
            "at the hub: edgetrain keys enroll NAME; "
            "at the device: edgetrain keys enroll --hub tcp://HOST:PORT --token TOKEN",
        )
    from edgetrain.exchange.keys.pairs import public_key, short, spell
    from edgetrain.exchange.zeromq.curve import new_pair

    ring, now = _ring(arguments), time.time()
    if arguments.key:
        key = public_key(arguments.key)
        ring.allow(key, arguments.name)
        said = f"{arguments.name} may join with key {short(key)}…"
        return common.answer(arguments, {"name": arguments.name, "key": spell(key)}, said)
    _check_minutes(arguments)
    older = any(name == arguments.name for name, _ in ring.open_tokens(now))
    token = ring.issue_token(arguments.name, new_pair, now, arguments.minutes)
    return common.answer(
        arguments,
        {"name": arguments.name, "token": token, "minutes": arguments.minutes},
        f"{token}\n(lets one device in as {arguments.name}, once, within {arguments.minutes:g} "
        "minutes, at a hub that runs here; keep it secret until then)"
        + ("\n(the older token for this name is closed)" if older else ""),
    )


def _check_minutes(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.minutes <= 60 * 24 * 30:
        raise ConfigError(f"--minutes {arguments.minutes:g}: allowed are more than 0 to 43200")


def _let_cluster_in(arguments: argparse.Namespace) -> int:
    """At the hub: write a token for each device of a cluster file, for another machine's cards."""
    from edgetrain.exchange.zeromq.curve import new_pair
    from edgetrain.fleet import cluster

    if arguments.name or arguments.key or not arguments.out:
        raise ConfigError("--cluster wants --out FILE, and neither a name nor a key")
    _check_minutes(arguments)
    ring = _ring(arguments)
    names = [device.name for device in cluster.load(arguments.cluster).devices]
    listed = set(ring.members().values())
    new = [name for name in names if name not in listed]
    tokens = {n: ring.issue_token(n, new_pair, time.time(), arguments.minutes) for n in new}
    with explain_os_errors(f"cannot write {arguments.out}"):
        handle = os.open(arguments.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.fchmod(handle, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(tokens, file, indent=1)
    known = [name for name in names if name in listed]
    said = f"{len(tokens)} tokens in {arguments.out}; keep it secret, and remove it after use"
    if known:
        said += f"\nno token for {', '.join(known)}: on the list already (keys revoke NAME)"
    found = {"out": str(arguments.out), "devices": new, "listed": known}
    return common.answer(arguments, found | {"minutes": arguments.minutes}, said)


def _enroll_here(arguments: argparse.Namespace) -> int:
    """At the device: use a token at the hub, and remember the hub's key."""
    from edgetrain.exchange.keys.pairs import short, spell
    from edgetrain.exchange.zeromq.enrolment import enrol

    token, host_key = _token(arguments.token), _host_key(arguments.ssh_host_key)
    ring = _ring(arguments)
    found = enrol(ring, arguments.hub, token, host_key=host_key)
    said = f"enrolled as {found.name}; {found.hub} is known by its key {short(found.key)}…"
    return common.answer(
        arguments, {"name": found.name, "hub": found.hub, "key": spell(found.key)}, said
    )


def _host_key(path: Path | None) -> str:
    """The public SSH host key in a file; "" if none is given."""
    from edgetrain.exchange.keys.host_keys import LONGEST, read_host_key
    from edgetrain.files.reading import read_bytes

    if path is None:
        return ""
    try:
        return read_host_key(read_bytes(path, LONGEST).decode("ascii", "replace"), str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read the host key in {path}: {error.strerror}") from None


def _known_hosts(arguments: argparse.Namespace) -> int:
    """At the hub: print a line for each device that sent a host key with its enrolment."""
    from edgetrain.exchange.keys.host_keys import known_hosts_line
    from edgetrain.fleet import cluster

    static = {}
    if arguments.cluster:
        devices = cluster.load(arguments.cluster).devices
        static = {d.name: d.address.split("/")[0] for d in devices if d.address != cluster.DHCP}
    hosts = {
        name: {
            "names": [name, f"{name}.local", *([static[name]] if name in static else [])],
            "key": key,
        }
        for name, key in _ring(arguments).hosts().items()
    }
    lines = [known_hosts_line(host["names"], str(host["key"])) for host in hosts.values()]
    if not lines:
        common.warn("no device has sent a host key with its enrolment")
    if lines or arguments.json:
        common.answer(arguments, hosts, "".join(lines).rstrip("\n"))
    return 0


def _token(given: str | None) -> str:
    """The token that is meant by the option's value: itself, in a file, or to be asked for."""
    if not given:
        raise ConfigError("--token is missing", "the hub's owner prints one; '-' asks for it")
    if given == "-":
        import getpass

        return getpass.getpass("token: ")
    if not given.startswith("@"):
        return given
    path = Path(given[1:])
    try:
        with path.open(encoding="utf-8") as file:
            words = file.read(LONGEST_TOKEN_FILE).split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the token in {path}: {reason}") from None
    if not words:
        raise ConfigError(f"there is no token in {path}", "it is empty")
    return words[0]


def _list(arguments: argparse.Namespace) -> int:
    from edgetrain.exchange.keys.host_keys import fingerprint
    from edgetrain.exchange.keys.pairs import spell

    ring = _ring(arguments)
    hosts = {name: fingerprint(key) for name, key in ring.hosts().items()}
    own = spell(ring.pair().public) if ring.exists else ""
    members = {name: spell(key) for key, name in ring.members().items()}
    tokens = [
        {"name": name, "seconds": round(left)} for name, left in ring.open_tokens(time.time())
    ]
    hubs = {address: spell(key) for address, key in ring.hubs().items()}
    lines = [f"this machine  {own or 'has no keys: edgetrain keys init'}"]
    lines += [f"may join      {key}  {name}" for name, key in sorted(members.items())]
    lines += [f"ssh host key  {shown}  {name}" for name, shown in sorted(hosts.items())]
    lines += [f"open token    {t['name']}, {t['seconds']} s left" for t in tokens]
    lines += [f"known hub     {key}  {address}" for address, key in hubs.items()]
    found = {"public": own, "members": members, "tokens": tokens, "hubs": hubs, "hosts": hosts}
    return common.answer(arguments, found | {"folder": str(ring.path)}, "\n".join(lines))


def _revoke(arguments: argparse.Namespace) -> int:
    from edgetrain.exchange.keys.pairs import short, spell

    revoked = _ring(arguments).revoke(arguments.who)
    lines = [f"{revoked.name} with key {short(key)}… may join no longer" for key in revoked.keys]
    if revoked.tokens:
        lines.append(f"the open enrolment token for {revoked.name} is closed")
    found = {"name": revoked.name, "tokens": revoked.tokens}
    key = spell(revoked.keys[0]) if revoked.keys else None
    return common.answer(arguments, found | {"key": key}, "\n".join(lines))
