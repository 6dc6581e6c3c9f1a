"""`cluster.toml`: the user's machines. One format and one reader, for cards and for servers.

Reads and checks what the file says, and nothing else: no file that it names is opened here, except
SSH public keys and secrets, by `ssh_keys` and `secret`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean, refuse_first
from edgetrain.files.reading import OTHERS_READ, read_bytes, read_guarded
from edgetrain.files.tables import key, ranged, read
from edgetrain.files.toml import read_toml
from edgetrain.fleet import values
from edgetrain.fleet.devices.health import HEAT_CAPS, LEAST_CAP

SHA256 = re.compile(r"[0-9a-f]{64}\Z")
DHCP = "dhcp"
LARGEST = 64 << 10
"""Bytes of a file with a passphrase or public keys."""
SECURITY = ("wpa2", "wpa3", "open")
"""Kinds of wireless networks."""
ROLES = ("hub", "gateway", "member")
"""Roles of a device: those joined by others come first."""
HUB_PORT = 5555
"""Port of a gateway, or of a hub on a device, without a [hub] in the file."""
LOCAL_HOSTS = ("local", "localhost", "127.0.0.1")
"""Hosts of servers that are this machine."""


_NEEDED = "`edgetrain devices init` explains it"


def _check_said(value: str, where: str) -> None:
    if not value:
        raise ConfigError(f"{where} is empty")


def _check_name(name: str, where: str) -> None:
    if not values.LABEL.match(name):
        raise ConfigError(
            f"{where} = '{name}' is not a host name",
            "small letters, digits and '-' inside, at most 63, as in pi-0",
        )


def _address(address: str, where: str) -> str:
    return address if address == DHCP else values.static_address(address, where)


def _digest(digest: str, where: str) -> str:
    if digest and not SHA256.match(digest.lower()):
        raise ConfigError(f"{where} is not 64 hexadecimal digits")
    return digest.lower()


def _check_secret(place: str, where: str) -> None:
    kind, colon, rest = place.partition(":")
    if place and place != "ask" and not (kind in ("file", "env") and colon and rest):
        raise ConfigError(
            f"{where} holds something else than where the passphrase is",
            "a passphrase never stands in this file: write file:NAME, env:NAME or ask",
        )


@dataclass(frozen=True)
class HubPlace:
    addresses: tuple[str, ...] = key(doc=_NEEDED, check=values.check_hub)
    """tcp://HOST:PORT; devices take the first that answers."""


@dataclass(frozen=True)
class ImageChoice:
    """The operating system's image. Empty texts: not given."""

    file: Path = key(doc=_NEEDED)
    sha256: str = key("", check=_digest)
    bmap: Path | None = None


@dataclass(frozen=True)
class Wifi:
    """A wireless network; `secret` says where its passphrase is ("file:…", "env:…", "ask")."""

    ssid: str = key(doc=_NEEDED, check=values.check_ssid)
    country: str = key(doc=_NEEDED, check=values.check_country)
    secret: str = field(default="", repr=False, metadata={"check": _check_secret})
    """"": an open network, which has none."""
    security: str = key("wpa2", choices=SECURITY)
    hidden: bool = False
    """Whether it does not send its name, so that devices have to ask for it."""


@dataclass(frozen=True)
class SystemSettings:
    """Settings of all devices' systems. Empty: as in the image."""

    timezone: str = key("", check=values.check_timezone)
    locale: str = key("", check=values.check_locale)
    dns: tuple[str, ...] = key((), check=values.check_name_server)
    """Name servers of devices with a static address; DHCP brings its own."""
    first_window: int = ranged(0, 1, 1000, unit="segments")
    """Segments that a device's TCP begins with; 0: as its kernel does (ten)."""
    receive_kb: int = ranged(0, 131, 6000, unit="kB")
    """A device's first receive buffer of TCP; 0: as its kernel has it (131)."""


@dataclass(frozen=True)
class Ssh:
    """The user that every device has, and the files of its public keys."""

    user: str = key(doc=_NEEDED, check=values.check_user)
    keys: tuple[Path, ...] = key(doc=_NEEDED)


@dataclass(frozen=True)
class JobFiles:
    """The job that devices train, and what it needs on them."""

    file: Path = key(doc=_NEEDED)
    data: Path | None = None
    bundle: Path | None = None


@dataclass(frozen=True)
class DeviceEntry:
    """One device. Its place among the members in the list is the index of its member."""

    name: str = key(doc=_NEEDED, check=_check_name)
    profile: str = key(doc=_NEEDED)
    address: str = key(DHCP, check=_address)
    """"dhcp", or an IPv4 address with the length of its network, "192.168.1.20/24"."""
    gateway: str = ""
    max_celsius: float = ranged(0.0, *HEAT_CAPS[:2], unit="C")
    """Temperature that its member keeps below, by lengthening its steps; 0: none."""
    role: str = key("member", choices=ROLES)
    site: str = ""
    """Site of a gateway and of its members; "": it joins the hub."""

    @property
    def host(self) -> str:
        """Its name or address for others."""
        return f"{self.name}.local" if self.address == DHCP else self.address.split("/")[0]


@dataclass(frozen=True)
class ServerEntry:
    """One GPU server. Who starts what there is not decided by this file."""

    name: str = key(doc=_NEEDED, check=_check_said)
    host: str = key(doc=_NEEDED, check=_check_said)
    """Name in the network, or "local": the machine that reads this."""
    profile: str = ""
    """A profile of the catalog; "": this machine's own speed."""
    interface: str = ""
    accelerators: int = ranged(0, 1, 1024)
    """Processes that it runs; 0: as many as its profile has accelerators, or cores."""
    python: str = ""
    """The interpreter that has edgetrain there; "": python3, on this machine the one that runs."""


@dataclass(frozen=True)
class Between:
    """The network between servers."""

    rate_mbit: float = ranged(10_000.0, 1e-3, 1e7, unit="Mbit/s")
    rtt_ms: float = ranged(0.2, 0, 1e5, unit="ms")


@dataclass(frozen=True)
class Cluster:
    """A whole `cluster.toml`. Tables that the file lacks are None or empty."""

    path: Path
    hub: HubPlace | None = None
    image: ImageChoice | None = None
    wifi: Wifi | None = None
    system: SystemSettings = SystemSettings()
    ssh: Ssh | None = None
    job: JobFiles | None = None
    devices: tuple[DeviceEntry, ...] = key((), name="device")
    servers: tuple[ServerEntry, ...] = key((), name="server")
    between: Between = Between()
    trusted: bool = False
    """Whether the network between the servers is one that strangers cannot reach."""

    @property
    def members(self) -> tuple[DeviceEntry, ...]:
        """The devices that train."""
        return tuple(device for device in self.devices if device.role == "member")

    @property
    def hub_device(self) -> DeviceEntry | None:
        """The device that has the hub; None: the hub is where jobs are started."""
        return self._joined_at.get("")

    @cached_property
    def _joined_at(self) -> dict[str, DeviceEntry]:
        """The device that has the gateway of each site; of no site: the hub."""
        return {device.site: device for device in self.devices if device.role != "member"}

    def joined_by(self, device: DeviceEntry) -> DeviceEntry | None:
        """The device that this one joins: the gateway of its site, or the one that has the hub;
        None: no device of this cluster."""
        if device.role == "hub":
            return None
        return self._joined_at.get(device.site if device.role == "member" else "")

    def addresses(self, device: DeviceEntry) -> tuple[str, ...]:
        """Addresses of the hub or gateway joined by a device."""
        joined = self.joined_by(device)
        if joined and joined.role == "gateway":
            return (f"tcp://{joined.host}:{HUB_PORT}",)
        return self.hub.addresses if self.hub else ()

    def chosen(self, names: tuple[str, ...] = ()) -> tuple[DeviceEntry, ...]:
        """The devices with these names, in the order of the file; all, if there are no names.

        Raises ConfigError for a name that is not in the file.
        """
        known = [device.name for device in self.devices]
        for name in names:
            if name not in known:
                raise ConfigError(f"{self.path}: no device '{name}'", did_you_mean(name, known))
        return tuple(d for d in self.devices if not names or d.name in names)

    def index(self, device: DeviceEntry) -> int:
        return self.members.index(device)


def load(path: str | Path) -> Cluster:
    """Read a cluster file. Raises ConfigError, which names the file, the key and what is allowed.

    Relative paths in it are relative to the folder of the file.
    """
    path = Path(path)
    try:
        table = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(
            f"no cluster file '{path}'", "write one with `edgetrain devices init`"
        ) from None
    return parse(table, path)


def parse(table: Mapping[str, Any], path: Path) -> Cluster:
    """Build a cluster from TOML tables; `path` is named in errors, its folder is where paths begin.

    Raises ConfigError for an unknown key (with the closest known one) and for a bad value.
    """
    cluster = read(Cluster, table, str(path), path=path)
    devices = cluster.devices
    static = [d.address.split("/")[0] for d in devices if d.address != DHCP]
    _check_unique([d.name for d in devices], f"{path}: two devices are called")
    _check_unique([s.name for s in cluster.servers], f"{path}: two servers are called")
    _check_unique(static, f"{path}: two devices have the address")
    hubs = [d.role for d in devices if d.role == "hub"]
    _check_unique(hubs, f"{path}: two devices have the role")
    for i, device in enumerate(devices):
        _check_device(device, f"{path}: device[{i}]")
    _check_sites(devices, path)
    wifi = cluster.wifi
    if wifi and (wifi.security == "open") != (not wifi.secret):
        raise ConfigError(
            f"{path}: wifi.security = '{wifi.security}' "
            + ("and wifi.secret" if wifi.secret else "without wifi.secret"),
            'an open network has no passphrase; all others have: "file:NAME", "env:NAME" or "ask"',
        )
    refuse_first(
        (cluster.hub and not cluster.hub.addresses, f"{path}: hub.addresses is empty",
         '["tcp://192.168.1.5:5555"]'),
        (cluster.ssh and not cluster.ssh.keys, f"{path}: ssh.keys is empty",
         '["~/.ssh/id_ed25519.pub"]'),
        (cluster.system.dns and not static,
         f"{path}: system.dns, and no device has a static address", "DHCP has its own"),
    )  # fmt: skip
    hub = next((d for d in devices if d.role == "hub"), None)
    if hub and not cluster.hub:
        cluster = replace(cluster, hub=HubPlace((f"tcp://{hub.host}:{HUB_PORT}",)))
    hubs = [_host_of(address) for address in (cluster.hub.addresses if cluster.hub else ())]
    for device in devices:
        own = [device.host, device.name, f"{device.name}.local"] if device.role != "hub" else []
        network = ipaddress.ip_interface(device.address).network if device.address != DHCP else None
        for at in hubs:
            if at in own:
                raise ConfigError(
                    f"{path}: a device has the hub's address, {at}",
                    f"the hub runs on a device that has no {device.role}, or on no device",
                )
            if network and at in map(str, (network.network_address, network.broadcast_address)):
                raise ConfigError(
                    f"{path}: hub.addresses has {at}, which is {network} itself, {device.name}'s "
                    "network, and no machine in it"
                )
    return cluster


def warnings(cluster: Cluster) -> list[str]:
    """Likely mistakes that may be meant, one line each."""
    lines = []
    for device in cluster.devices:
        hubs = [h for h in map(_ip_of, cluster.addresses(device)) if h]
        if device.address == DHCP or not hubs or device.gateway:
            continue
        network = ipaddress.ip_interface(device.address).network
        if not any(hub in network for hub in hubs if hub.version == network.version):
            lines.append(
                f"{device.name} has the address {device.address}, and the hub at {hubs[0]} is not "
                f"in {network}: without a gateway they cannot reach each other"
            )
    return lines


def check_fleet(cluster: Cluster, members: int, profile: str, *, gateways: bool) -> None:
    """Check a job against the devices: `members`, `profile` and `gateways` are fleet.members,
    .device and .gateways.

    Raises ConfigError with both values if they disagree.
    """
    there, besides = len(cluster.members), " besides its hub" if cluster.hub_device else ""
    names = [device.name for device in cluster.devices if device.role == "gateway"]
    besides += f" besides {', '.join(names)}" if names else ""
    refuse_first(
        (names and not gateways, f"{cluster.path} has gateways ({', '.join(names)}), and the job's "
         "fleet.gateways is false", "set gateways = true in [fleet]"),
        (there != members, f"{cluster.path} has {there} devices{besides}, and the job's "
         f"fleet.members is {members}", f"set fleet.members = {there}, or list {members} devices"),
        (profile != "host",
         f"the job's fleet.device is '{profile}': it would slow real devices down",
         'for a job on real devices set fleet.device = "host"'),
    )  # fmt: skip


# -- secrets and keys ----------------------------------------------------------------------------


def secret(wifi: Wifi, folder: Path, environment: Mapping[str, str], ask: Callable[[], str]) -> str:
    """The passphrase of a wireless network, from where the file says; "" of an open one. `ask()`
    asks the user.

    Raises ConfigError if it is missing or has a wrong length; it is not repeated.
    """
    kind, _, rest = wifi.secret.partition(":")
    if wifi.security == "open":
        return ""
    if kind == "file":
        path = folder / Path(rest).expanduser()
        try:
            passphrase = read_guarded(path, LARGEST, OTHERS_READ).rstrip("\r\n")
        except FileNotFoundError:
            raise ConfigError(f"wifi.secret: there is no file {path}") from None
        except ConfigError as error:
            raise ConfigError(f"wifi.secret: {error.message}", error.hint) from None
    elif kind == "env":
        if rest not in environment:
            raise ConfigError(f"wifi.secret: the environment has no {rest}", f"export {rest}=…")
        passphrase = environment[rest]
    else:
        passphrase = ask()
    hexadecimal = re.fullmatch(r"[0-9a-fA-F]{64}", passphrase)
    refuse_first(
        (hexadecimal and wifi.security == "wpa3",
         f"the passphrase of '{wifi.ssid}' is 64 hexadecimal digits, a key of WPA2",
         "WPA3 needs the passphrase itself"),
        (not hexadecimal and not (8 <= len(passphrase.encode()) <= 63 and passphrase.isprintable()),
         f"the passphrase of '{wifi.ssid}' has {len(passphrase.encode())} characters",
         "WPA wants 8 to 63, or 64 hexadecimal digits"),
    )  # fmt: skip
    return passphrase


def ssh_keys(ssh: Ssh) -> list[str]:
    """The public keys, one a line of their files. Raises ConfigError for anything else."""
    listed = []
    for path in ssh.keys:
        try:
            lines = read_bytes(path, LARGEST).decode(errors="replace").splitlines()
        except FileNotFoundError:
            raise ConfigError(
                f"ssh.keys: there is no file {path}", "ssh-keygen -t ed25519 makes a pair"
            ) from None
        except ConfigError as error:
            raise ConfigError(f"ssh.keys: {error.message}", error.hint) from None
        if any("PRIVATE KEY" in line for line in lines):
            public = f"{path}.pub" if path.suffix != ".pub" else "what `ssh-keygen -y` makes of it"
            raise ConfigError(
                f"ssh.keys: {path} is a private key, which belongs on no card", f"give {public}"
            )
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys or not all(map(values.is_public_key, keys)):
            raise ConfigError(
                f"ssh.keys: {path} is not a whole SSH public key", "one line: ssh-ed25519 AAAA…"
            )
        listed += keys
    return listed


# -- tables --------------------------------------------------------------------------------------


def _check_device(device: DeviceEntry, where: str) -> None:
    cap, role, site, dhcp = device.max_celsius, device.role, device.site, device.address == DHCP
    refuse_first(
        (device.gateway and dhcp, f"{where}.gateway needs a static address", "DHCP brings its own"),
        (0 < cap < LEAST_CAP, f"{where}.max_celsius = {cap:g}",
         f"allowed: {LEAST_CAP:g} to 110, or 0"),
        (cap and role != "member", f"{where}.max_celsius = {cap:g}",
         f"a {role} has no steps to lengthen"),
        (site and not values.LABEL.match(site), f"{where}.site = '{site}' is not a name",
         "small letters, digits and '-' inside, at most 63, as in barn"),
        (site and role == "hub", f"{where}.site = '{site}'", "the hub is the hub of all sites"),
        (role == "gateway" and not site, f"{where} is a gateway, and site is missing",
         'site = "NAME", here and for the members that join it'),
    )  # fmt: skip
    if device.gateway:
        values.check_gateway(device.gateway, device.address, f"{where}.gateway")


def _check_sites(devices: Sequence[DeviceEntry], path: Path) -> None:
    """Each site has one gateway, and members."""
    of = {
        role: [d.site for d in devices if d.role == role and d.site]
        for role in ("gateway", "member")
    }
    _check_unique(of["gateway"], f"{path}: two devices are the gateway of the site")
    for d in devices:
        refuse_first(
            (d.role == "member" and d.site and d.site not in of["gateway"],
             f"{path}: {d.name} is at the site '{d.site}', which has no gateway",
             did_you_mean(d.site, of["gateway"]) if of["gateway"] else
             'role = "gateway" for a [[device]] there, or no site: it joins the hub'),
            (d.role == "gateway" and d.site not in of["member"],
             f"{path}: no member is at the site '{d.site}' of the gateway {d.name}",
             f'site = "{d.site}" for those that join it'),
        )  # fmt: skip


def _check_unique(values: list[str], error: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{error} {value}", "each has its own")


def _host_of(address: str) -> str:
    return values.plain_host(address.removeprefix("tcp://").rpartition(":")[0])


def _ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(_host_of(address))
    except ValueError:
        return None
