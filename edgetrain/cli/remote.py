"""`edgetrain devices provision | remove | inventory`: devices over ssh."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import json
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.cli.cards import archive_folder
from edgetrain.cli.parser import AddVerb
from edgetrain.errors import ConfigError

if TYPE_CHECKING:
    from edgetrain.exchange.keys.keyring import Keyring
    from edgetrain.fleet.cluster import Cluster, DeviceEntry
    from edgetrain.fleet.ssh import SshClient, SshHost
    from edgetrain.provisioning.provision import Provisioned

ACCEPTED = "known_hosts"
"""The file, beside the keys, of SSH host keys that a person said yes to."""
_PROVISION = """\
examples:
  edgetrain devices provision cluster.toml --check     what would change; changes nothing
  edgetrain devices provision cluster.toml             all devices, 16 at a time
  edgetrain devices provision cluster.toml pi-3 --ask-sudo

For machines that run already: 64-bit Debian, Ubuntu or Raspberry Pi OS with an archive of
`edgetrain devices worker`. Looks first, then makes only what differs, by the steps of a card's
first boot; a second run changes nothing. Runs on the hub's machine: the device's key goes on its
list, without a token. The user of [ssh] needs sudo there.

exit status: 0 all are as they should be, 1 some are not (with --check: or would be changed),
2 nothing was begun.
"""

_ANSIBLE = """\
examples:
  edgetrain devices inventory cluster.toml > fleet.json
  ansible -i fleet.json all -a uptime                   a command on all of them
  ansible -i fleet.json edgetrain_member --become -a "journalctl -u edgetrain-member -n 20"
  ansible -i fleet.json pi-3 --become -m reboot         training goes on by itself

Hosts, users, ports, jump hosts and key files, as ssh's own configuration has them; a group for each
role (edgetrain_hub, edgetrain_gateway, edgetrain_member) and for each kind of board.
"""


def add_verbs(add: AddVerb) -> None:
    provision = add("provision", _provision, "make devices of machines that run", _PROVISION)
    add_devices(provision)
    provision.add_argument("--check", action="store_true", help="say what differs, change nothing")
    provision.add_argument("--worker", type=Path, metavar="FILE", help="the worker archive to use")
    remove = add("remove", _remove, "take edgetrain off devices, and their keys off the list")
    add_devices(remove)
    remove.add_argument("--yes", action="store_true", help="do not ask")
    for each in (provision, remove):
        add_ways(each)
    inventory = add("inventory", _inventory, "the devices as Ansible reads them, JSON", _ANSIBLE)
    add_devices(inventory)


def add_ways(parser: argparse.ArgumentParser) -> None:
    """Add how devices are reached, and how the answer is printed."""
    parser.add_argument("--ask-sudo", action="store_true", help="ask for the password of sudo")
    common.add_keys(parser)
    common.add_json(parser)


def add_devices(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the cluster file, and which of its devices; optional: without one, this machine."""
    times, said = ("?", " (default: this machine)") if optional else (None, "")
    parser.add_argument(
        "cluster", type=Path, nargs=times, metavar="CLUSTER", help=f"a cluster file{said}"
    )
    parser.add_argument("devices", nargs="*", metavar="DEVICE", help="which (default: all)")


@contextlib.contextmanager
def reach(
    arguments: argparse.Namespace, found: Cluster, *, keeps: bool = True
) -> Iterator[tuple[SshClient, list[tuple[DeviceEntry, SshHost]]]]:
    """The chosen devices of a cluster, and the way to them; keeps: for more than one command."""
    from edgetrain.exchange.keys.keyring import Keyring
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.fleet.ssh import SshClient
    from edgetrain.provisioning.reaching import hosts_of

    devices = found.chosen(tuple(arguments.devices))
    if not devices:
        raise ConfigError(f"{found.path} has no [[device]]")
    hosts = hosts_of(found, devices)
    ask = _is_yes if sys.stdin.isatty() else None
    password = ""
    if arguments.ask_sudo:
        if ask is None:
            raise ConfigError("--ask-sudo, and nobody can be asked", "run it on a terminal")
        password = getpass.getpass("password of sudo on the devices: ")
    keys = keys_folder(arguments.keys)
    known, accepted = Keyring(keys).hosts(), keys / ACCEPTED
    with SshClient(known, accepted=accepted, ask=ask, password=password, keeps=keeps) as remote:
        yield remote, list(zip(devices, hosts, strict=True))


def _is_yes(question: str) -> bool:
    with contextlib.suppress(EOFError):
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    return False


def _ring(arguments: argparse.Namespace) -> Keyring:
    from edgetrain.exchange.keys.keyring import Keyring
    from edgetrain.exchange.keys.pairs import keys_folder

    ring = Keyring(keys_folder(arguments.keys))
    if not ring.exists:
        raise ConfigError(
            f"the hub's keys are not on this machine (in {ring.path})",
            "run it on the hub's machine; or here: edgetrain keys init",
        )
    return ring


# -- provision, remove ---------------------------------------------------------------------------


def _provision(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import cluster
    from edgetrain.provisioning import outfit
    from edgetrain.provisioning.cards import archive, flashing
    from edgetrain.provisioning.provision import Provisioner

    found = cluster.load(arguments.cluster)
    job = outfit.job_of(found)
    if arguments.devices:  # the lists of those that they join have their keys
        joined = [found.hub_device, *map(found.joined_by, found.chosen(tuple(arguments.devices)))]
        arguments.devices += [device.name for device in joined if device]
    workers = archive.workers()
    for device in found.chosen(tuple(arguments.devices)):
        outfit.check_profile(workers, device)
    assert found.ssh
    keys = tuple(cluster.ssh_keys(found.ssh))
    settings = flashing.Settings(keys, outfit.set_of(found, job), {}, 0.0)
    archives = flashing.Archives(workers, arguments.worker, archive_folder())
    ring = _ring(arguments)

    def line(result: Provisioned) -> str:
        if not result.ok:
            return f"{result.name:16} FAILED   {result.why}"
        if not result.changed:
            return f"{result.name:16} ok       nothing to change"
        verb = "would change" if arguments.check else "changed"
        return f"{result.name:16} {'differs' if arguments.check else 'done':8} {verb}: " + (
            ", ".join(result.changed)
        )

    lock = threading.Lock()

    def tell(result: Provisioned) -> None:
        with lock:  # several threads may
            common.warn(line(result))

    with reach(arguments, found) as (remote, devices):
        work = Provisioner(found, settings, archives, ring, remote)
        results = work.provision(devices, check=arguments.check, told=tell)
    bad = [result for result in results if not result.ok]
    differ = sum(bool(result.changed) for result in results if result.ok)
    lines = [
        f"{len(results) - len(bad)} of {len(results)} devices are reached and set up, {differ} "
        + ("of them would be changed" if arguments.check else "of them were changed")
    ]
    lines += [line(result) for result in bad]
    if bad:
        lines.append("the same command goes on with these")
    common.answer(arguments, [dataclasses.asdict(result) for result in results], "\n".join(lines))
    return int(bool(bad) or (arguments.check and differ > 0))


def _remove(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import cluster
    from edgetrain.provisioning.provision import Provisioned, remove
    from edgetrain.provisioning.reaching import hosts_of, members_list, send_list

    found = cluster.load(arguments.cluster)
    ring = _ring(arguments)
    names = ", ".join(device.name for device in found.chosen(tuple(arguments.devices)))
    if not arguments.yes and not (
        sys.stdin.isatty() and _is_yes(f"take edgetrain, its keys and checkpoints off {names}?")
    ):
        raise ConfigError("nothing was removed", "--yes, or a yes on a terminal")
    with reach(arguments, found, keeps=False) as (remote, devices):
        results = remove([host for _, host in devices], ring, remote)
        gone = [device for device, _ in devices]
        for each in found.devices:
            if each not in gone and each in map(found.joined_by, gone):
                there = hosts_of(found, [each])[0]
                sent = send_list(remote, there, "/", members_list(found, ring, each))
                if not sent.ok:
                    why = f"their keys are on its list still: {sent.why}"
                    results.append(Provisioned(each.name, ok=False, why=why))
    lines = [f"{r.name:16} {'removed' if r.ok else 'FAILED   ' + r.why}" for r in results]
    common.answer(arguments, [dataclasses.asdict(r) for r in results], "\n".join(lines))
    return int(not all(r.ok for r in results))


# -- inventory -----------------------------------------------------------------------------------


def _inventory(arguments: argparse.Namespace) -> int:
    """Print what Ansible's own reader of YAML and JSON takes."""
    from edgetrain.fleet import cluster
    from edgetrain.fleet.ssh import configured
    from edgetrain.provisioning.reaching import hosts_of

    found = cluster.load(arguments.cluster)
    devices = found.chosen(tuple(arguments.devices))
    reached = hosts_of(found, devices)
    assert found.ssh
    own = [key.with_suffix("") for key in found.ssh.keys if key.suffix == ".pub"]
    private = next((str(key.absolute()) for key in own if key.exists()), "")
    hosts, groups = {}, dict[str, dict[str, Any]]()
    for device, host in zip(devices, reached, strict=True):
        said = configured(host)
        jump = said.get("proxyjump", "none")
        given = {
            "ansible_host": host.address,
            "ansible_port": int(said.get("port", 22)),
            "ansible_user": host.user,
            "ansible_ssh_private_key_file": private,
            "ansible_ssh_common_args": shlex.join(["-o", f"ProxyJump={jump}"] * (jump != "none")),
            "edgetrain_profile": device.profile,
        }
        hosts[device.name] = {key: value for key, value in given.items() if value}
        if device in found.members:
            hosts[device.name]["edgetrain_index"] = found.index(device)
        for name in (f"edgetrain_{device.role}", Path(device.profile).stem.replace("-", "_")):
            groups.setdefault(name, {"hosts": {}})["hosts"][device.name] = {}
    common.say(json.dumps({"edgetrain": {"hosts": hosts, "children": groups}}, indent=2))
    return 0
