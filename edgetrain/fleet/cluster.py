"""`cluster.toml`: the user's machines. One format and one reader, for cards and for servers.

Reads and checks what the file says, and nothing else: no file that it names is opened here, except
SSH public keys and secrets, by `ssh_keys` and `secret`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean, refuse_first
from edgetrain.files.reading import OTHERS_READ, read_bytes, read_guarded
from edgetrain.files.toml import read_toml
from edgetrain.fleet import values
from edgetrain.fleet.checks import known, number, text
from edgetrain.fleet.devices.health import HEAT_CAPS, LEAST_CAP
from edgetrain.fleet.networks.profile import RANGES

HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
"""One label of a host name (RFC 1123), in small letters."""
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
DHCP = "dhcp"
LARGEST = 64 << 10
"""Bytes of a file with a passphrase or public keys."""
SECURITY = ("wpa2", "wpa3", "open")
"""Kinds of wireless networks."""
ROLES = ("hub", "gateway", "member")
"""What runs on a device: those that others join come before them."""
HUB_PORT = 5555
"""Of a gateway; of a hub on a device, where the file has no [hub]."""
LOCAL_HOSTS = ("local", "localhost", "127.0.0.1")
"""Hosts of servers that are this machine."""


@dataclass(frozen=True)
class HubPlace:
    addresses: tuple[str, ...]
    """tcp://HOST:PORT; devices take the first that answers."""


@dataclass(frozen=True)
class ImageChoice:
    """The operating system's image. Empty texts: not given."""

    file: Path
    sha256: str = ""
    bmap: Path | None = None


@dataclass(frozen=True)
class Wifi:
    """A wireless network; `secret` says where its passphrase is ("file:…", "env:…", "ask")."""

    ssid: str
    country: str
    secret: str = field(default="", repr=False)
    """"": an open network, which has none."""
    security: str = "wpa2"
    """One of SECURITY."""
    hidden: bool = False
    """Whether it does not send its name, so that devices have to ask for it."""


@dataclass(frozen=True)
class SystemSettings:
    """What all devices' systems have. Empty: as the image has it."""

    timezone: str = ""
    locale: str = ""
    dns: tuple[str, ...] = ()
    """Name servers of devices with a static address; DHCP brings its own."""
    first_window: int = 0
    """Segments that a device's TCP begins with; 0: as its kernel does (ten)."""
    receive_kb: int = 0
    """A device's first receive buffer of TCP; 0: as its kernel has it (131)."""


@dataclass(frozen=True)
class Ssh:
    """The user that every device has, and the files of its public keys."""

    user: str
    keys: tuple[Path, ...]


@dataclass(frozen=True)
class JobFiles:
    """The job that devices train, and what it needs on them."""

    file: Path
    data: Path | None = None
    bundle: Path | None = None


@dataclass(frozen=True)
class DeviceEntry:
    """One device. Its place among the members in the list is the index of its member."""

    name: str
    profile: str
    address: str = DHCP
    """"dhcp", or an IPv4 address with the length of its network, "192.168.1.20/24"."""
    gateway: str = ""
    max_celsius: float = 0.0
    """Temperature that its member keeps below, by lengthening its steps; 0: none."""
    role: str = "member"
    """One of ROLES."""
    site: str = ""
    """Of a gateway, and of the members that join it; "": it joins the hub."""

    @property
    def host(self) -> str:
        """What others reach it by."""
        return f"{self.name}.local" if self.address == DHCP else self.address.split("/")[0]


@dataclass(frozen=True)
class ServerEntry:
    """One GPU server. Who starts what there is not decided by this file."""

    name: str
    host: str
    """Name in the network, or "local": the machine that reads this."""
    profile: str = ""
    """A profile of the catalog; "": this machine's own speed."""
    interface: str = ""
    accelerators: int = 0
    """Processes that it runs; 0: as many as its profile has accelerators, or cores."""
    python: str = ""
    """The interpreter that has edgetrain there; "": python3, on this machine the one that runs."""


@dataclass(frozen=True)
class Between:
    """The network between servers."""

    rate_mbit: float = 10_000.0
    rtt_ms: float = 0.2


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
    devices: tuple[DeviceEntry, ...] = ()
    servers: tuple[ServerEntry, ...] = ()
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
        """Where a device finds the hub, or gateway, that it joins."""
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


TABLES = {
    name: {each.name: each.default is MISSING for each in fields(entry)}
    for name, entry in {
        "hub": HubPlace, "image": ImageChoice, "wifi": Wifi, "system": SystemSettings,
        "ssh": Ssh, "job": JobFiles, "device": DeviceEntry, "server": ServerEntry,
        "between": Between,
    }.items()
}  # fmt: skip
"""Every table's keys, and whether one is required."""
_LISTS = ("device", "server")
_LOOSE = ("trusted",)


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
    _check_keys(table, path)
    devices = tuple(_device(t, f"{path}: device[{i}]") for i, t in _each(table, "device"))
    servers = tuple(_server(t, f"{path}: server[{i}]") for i, t in _each(table, "server"))
    _check_unique([d.name for d in devices], f"{path}: two devices are called")
    _check_unique([s.name for s in servers], f"{path}: two servers are called")
    static = [d.address.split("/")[0] for d in devices if d.address != DHCP]
    _check_unique(static, f"{path}: two devices have the address")
    _check_unique(
        [d.role for d in devices if d.role == "hub"], f"{path}: two devices have the role"
    )
    _check_sites(devices, path)
    trusted = table.get("trusted", False)
    if not isinstance(trusted, bool):
        raise ConfigError(f"{path}: trusted = {trusted!r}", "allowed: true or false")
    read = {"hub": _hub, "image": _image, "wifi": _wifi, "system": _system, "ssh": _ssh,
            "job": _job, "between": _between}  # fmt: skip
    given: dict[str, Any] = {
        name: make(table[name], path) for name, make in read.items() if name in table
    }
    if table.get("system", {}).get("dns") and not static:
        raise ConfigError(
            f"{path}: system.dns, and no device has a static address", "DHCP has its own"
        )
    hub = next((d for d in devices if d.role == "hub"), None)
    if hub and "hub" not in given:
        given["hub"] = HubPlace((f"tcp://{hub.host}:{HUB_PORT}",))
    cluster = Cluster(path, devices=devices, servers=servers, trusted=trusted, **given)
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


def _check_keys(table: Mapping[str, Any], path: Path) -> None:
    known(table, [*TABLES, *_LOOSE], f"{path}: ")
    for key, value in table.items():
        if key in _LOOSE:
            continue
        shape = isinstance(value, list) if key in _LISTS else isinstance(value, Mapping)
        tables = value if isinstance(value, list) else [value]
        if not shape or not all(isinstance(item, Mapping) for item in tables):
            how = f"[[{key}]]" if key in _LISTS else f"[{key}]"
            raise ConfigError(f"{path}: {key} is not written as {how}")
        for at, item in enumerate(tables):
            where = f"{key}[{at}]" if key in _LISTS else key
            known(item, TABLES[key], f"{path}: ", f"{where}.")
            for name, required in TABLES[key].items():
                if required and name not in item:
                    raise ConfigError(
                        f"{path}: {where}.{name} is missing", "`edgetrain devices init` explains it"
                    )


def _each(table: Mapping[str, Any], key: str) -> list[tuple[int, Mapping[str, Any]]]:
    return list(enumerate(table.get(key, ())))


def _hub(table: Mapping[str, Any], path: Path) -> HubPlace:
    value = table["addresses"]
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{path}: hub.addresses = {value!r} is not a list of addresses",
            '["tcp://192.168.1.5:5555"]',
        )
    for address in value:
        where = f"{path}: hub.addresses"
        values.check_hub(text(address, where), where)
    return HubPlace(tuple(value))


def _image(table: Mapping[str, Any], path: Path) -> ImageChoice:
    digest = text(table.get("sha256", ""), f"{path}: image.sha256").lower()
    if digest and not SHA256.match(digest):
        raise ConfigError(f"{path}: image.sha256 is not 64 hexadecimal digits")
    bmap = _path(table, "image", "bmap", path) if "bmap" in table else None
    return ImageChoice(_path(table, "image", "file", path), digest, bmap)


def _wifi(table: Mapping[str, Any], path: Path) -> Wifi:
    ssid = text(table["ssid"], f"{path}: wifi.ssid")
    values.check_ssid(ssid, f"{path}: wifi.ssid")
    country = text(table["country"], f"{path}: wifi.country")
    values.check_country(country, f"{path}: wifi.country")
    security, hidden = table.get("security", "wpa2"), table.get("hidden", False)
    if security not in SECURITY:
        raise ConfigError(
            f"{path}: wifi.security = {security!r}", f"allowed: {', '.join(SECURITY)}"
        )
    if not isinstance(hidden, bool):
        raise ConfigError(f"{path}: wifi.hidden = {hidden!r}", "allowed: true or false")
    where = text(table.get("secret", ""), f"{path}: wifi.secret")
    if (security == "open") != (not where):
        raise ConfigError(
            f"{path}: wifi.security = '{security}' "
            + ("and wifi.secret" if where else "without wifi.secret"),
            'an open network has no passphrase; all others have: "file:NAME", "env:NAME" or "ask"',
        )
    kind, colon, rest = where.partition(":")
    if where and where != "ask" and not (kind in ("file", "env") and colon and rest):
        raise ConfigError(
            f"{path}: wifi.secret holds something else than where the passphrase is",
            "a passphrase never stands in this file: write file:NAME, env:NAME or ask",
        )
    return Wifi(ssid, country, where, security, hidden)


def _system(table: Mapping[str, Any], path: Path) -> SystemSettings:
    timezone = text(table.get("timezone", ""), f"{path}: system.timezone")
    values.check_timezone(timezone, f"{path}: system.timezone")
    locale = text(table.get("locale", ""), f"{path}: system.locale")
    values.check_locale(locale, f"{path}: system.locale")
    dns = table.get("dns", [])
    if not isinstance(dns, list):
        raise ConfigError(f"{path}: system.dns = {dns!r} is not a list", '["192.168.1.1"]')
    for server in dns:
        values.check_name_server(text(server, f"{path}: system.dns"), f"{path}: system.dns")
    windows = {
        key: int(number(table[key], RANGES[key], f"{path}: system.{key}", whole=True))
        for key in ("first_window", "receive_kb")
        if key in table
    }
    return SystemSettings(timezone, locale, tuple(dns), **windows)


def _ssh(table: Mapping[str, Any], path: Path) -> Ssh:
    user = text(table["user"], f"{path}: ssh.user")
    values.check_user(user, f"{path}: ssh.user")
    keys = table["keys"]
    if not isinstance(keys, list) or not keys:
        raise ConfigError(
            f"{path}: ssh.keys = {keys!r} is not a list of files", '["~/.ssh/id_ed25519.pub"]'
        )
    return Ssh(user, tuple(_path({"keys": key}, "ssh", "keys", path) for key in keys))


def _job(table: Mapping[str, Any], path: Path) -> JobFiles:
    rest = {k: _path(table, "job", k, path) for k in ("data", "bundle") if k in table}
    return JobFiles(_path(table, "job", "file", path), **rest)


def _device(table: Mapping[str, Any], where: str) -> DeviceEntry:
    name = text(table["name"], f"{where}.name")
    if not HOST_NAME.match(name):
        raise ConfigError(
            f"{where}.name = '{name}' is not a host name",
            "small letters, digits and '-' inside, at most 63, as in pi-0",
        )
    address = text(table.get("address", DHCP), f"{where}.address")
    gateway = text(table.get("gateway", ""), f"{where}.gateway")
    if address != DHCP:
        address = values.static_address(address, f"{where}.address")
    if gateway and address == DHCP:
        raise ConfigError(f"{where}.gateway needs a static address", "DHCP brings its own")
    if gateway:
        values.check_gateway(gateway, address, f"{where}.gateway")
    cap = number(table.get("max_celsius", 0.0), HEAT_CAPS, f"{where}.max_celsius")
    if 0 < cap < LEAST_CAP:
        raise ConfigError(f"{where}.max_celsius = {cap:g}", f"allowed: {LEAST_CAP:g} to 110, or 0")
    role = text(table.get("role", "member"), f"{where}.role")
    if role not in ROLES:
        raise ConfigError(f"{where}.role = '{role}'", did_you_mean(role, ROLES))
    site = text(table.get("site", ""), f"{where}.site")
    refuse_first(
        (cap and role != "member", f"{where}.max_celsius = {cap:g}",
         f"a {role} has no steps to lengthen"),
        (site and not HOST_NAME.match(site), f"{where}.site = '{site}' is not a name",
         "small letters, digits and '-' inside, at most 63, as in barn"),
        (site and role == "hub", f"{where}.site = '{site}'", "the hub is the hub of all sites"),
        (role == "gateway" and not site, f"{where} is a gateway, and site is missing",
         'site = "NAME", here and for the members that join it'),
    )  # fmt: skip
    profile = text(table["profile"], f"{where}.profile")
    return DeviceEntry(name, profile, address, gateway, cap, role, site)


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


def _server(table: Mapping[str, Any], where: str) -> ServerEntry:
    words = {key: value for key, value in table.items() if key != "accelerators"}
    values = {key: text(value, f"{where}.{key}") for key, value in words.items()}
    for key in ("name", "host"):
        if not values[key]:
            raise ConfigError(f"{where}.{key} is empty")
    limits = (1, 1024, "")
    count = number(table.get("accelerators", 1), limits, f"{where}.accelerators", whole=True)
    return ServerEntry(**values, accelerators=int(count) if "accelerators" in table else 0)


def _between(table: Mapping[str, Any], path: Path) -> Between:
    limits = {"rate_mbit": (1e-3, 1e7, "Mbit/s"), "rtt_ms": (0, 1e5, "ms")}
    given = {
        key: number(value, limits[key], f"{path}: between.{key}") for key, value in table.items()
    }
    return Between(**given)


def _path(table: Mapping[str, Any], name: str, key: str, path: Path) -> Path:
    value = text(table[key], f"{path}: {name}.{key}")
    if not value:
        raise ConfigError(f"{path}: {name}.{key} is empty", "the name of a file")
    return path.parent / Path(value).expanduser()


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
