"""Checks of the values of a device: country, user, hub's and own address, SSH public key.

A value that only looks right makes a card that boots and is never seen. Each function raises
ConfigError that begins with `where`, such as "cluster.toml: wifi.country".
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import zoneinfo

from edgetrain.errors import ConfigError, refuse_first

COUNTRIES = frozenset(
    """
    AD AE AF AG AI AL AM AO AQ AR AS AT AU AW AX AZ BA BB BD BE BF BG BH BI BJ BL BM BN BO BQ BR
    BS BT BV BW BY BZ CA CC CD CF CG CH CI CK CL CM CN CO CR CU CV CW CX CY CZ DE DJ DK DM DO DZ
    EC EE EG EH ER ES ET FI FJ FK FM FO FR GA GB GD GE GF GG GH GI GL GM GN GP GQ GR GS GT GU GW
    GY HK HM HN HR HT HU ID IE IL IM IN IO IQ IR IS IT JE JM JO JP KE KG KH KI KM KN KP KR KW KY
    KZ LA LB LC LI LK LR LS LT LU LV LY MA MC MD ME MF MG MH MK ML MM MN MO MP MQ MR MS MT MU MV
    MW MX MY MZ NA NC NE NF NG NI NL NO NP NR NU NZ OM PA PE PF PG PH PK PL PM PN PR PS PT PW PY
    QA RE RO RS RU RW SA SB SC SD SE SG SH SI SJ SK SL SM SN SO SR SS ST SV SX SY SZ TC TD TF TG
    TH TJ TK TL TM TN TO TR TT TV TW TZ UA UG UM US UY UZ VA VC VE VG VI VN VU WF WS YE YT ZA ZM
    ZW
    """.split()  # noqa: SIM905
)
"""ISO 3166-1, as in the file iso3166.tab of the time zone database."""
TAKEN = frozenset(
    """
    _apt adm audio avahi backup bin bluetooth cdrom crontab daemon dialout dip disk dnsmasq fax
    floppy games gnats gpio i2c input irc kmem kvm landscape list lp lpadmin lxd mail man
    messagebus netdev news nobody nogroup ntp operator plugdev polkitd pollinate proxy pulse rdma
    render root rpi-first-boot-wizard rtkit sasl sgx shadow spi src ssh sshd staff statd sudo sync
    sys syslog systemd-journal systemd-network systemd-resolve systemd-timesync tape tcpdump tss
    tty usbmux users utmp uucp uuidd video voice www-data
    """.split()  # noqa: SIM905
)
"""Users and groups that the images have: no user of these names can be made."""
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")
TIMEZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,2}\Z")
LOCALE = re.compile(r"(C|[a-z]{2,3}_[A-Z]{2})\.UTF-8\Z")
HUB_ADDRESS = re.compile(
    r"tcp://(\[[0-9a-fA-F:.]+(?:%[A-Za-z0-9_.-]{1,15})?\]|[A-Za-z0-9.-]+):([0-9]{1,5})\Z"
)
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
"""A part of a host's name (RFC 1123), in small letters."""
NUMERIC = re.compile(r"([0-9]+|0x[0-9a-f]*)\Z")
"""The last part of what is taken for an IPv4 address, in one of its spellings."""
ITSELF = {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
"""Names that each machine has for itself."""
PUBLIC_KEY = re.compile(
    r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521)|sk-(?:ssh-ed25519|ecdsa-sha2-nistp256)"
    r"@openssh\.com) ([A-Za-z0-9+/]+={0,3})( .*)?\Z"
)
_FIELDS = {
    "ssh-ed25519": 2, "ssh-rsa": 3, "ecdsa-sha2-nistp256": 3, "ecdsa-sha2-nistp384": 3,
    "ecdsa-sha2-nistp521": 3, "sk-ssh-ed25519@openssh.com": 3,
    "sk-ecdsa-sha2-nistp256@openssh.com": 4,
}  # fmt: skip
"""Parts of a public key of each kind, its name included (RFC 4253, PROTOCOL.u2f of OpenSSH)."""


def check_country(country: str, where: str) -> None:
    if country not in COUNTRIES:
        raise ConfigError(
            f"{where} = '{country}' is not a country",
            "the United Kingdom is GB" if country == "UK" else
            "two capital letters of ISO 3166, as in DE: a Pi's radio stays off without it",
        )  # fmt: skip


def check_ssid(ssid: str, where: str) -> None:
    """The name of a wireless network: 1 to 32 bytes, no control characters."""
    if not 1 <= len(ssid.encode()) <= 32:
        raise ConfigError(f"{where} has {len(ssid.encode())} bytes", "allowed: 1 to 32")
    if any(not character.isprintable() for character in ssid):
        raise ConfigError(
            f"{where} = {ssid!r} has characters that cannot be printed", "letters and blanks"
        )


def check_timezone(timezone: str, where: str) -> None:
    """A time zone of the IANA's list, as far as this machine has it; "": none."""
    known = zoneinfo.available_timezones()
    if timezone and (not TIMEZONE.match(timezone) or (known and timezone not in known)):
        raise ConfigError(f"{where} = '{timezone}' is not a time zone", "as in Europe/Berlin")


def check_locale(locale: str, where: str) -> None:
    """A locale that Debian can generate; "": none."""
    if locale and not LOCALE.match(locale):
        raise ConfigError(f"{where} = '{locale}' is not a locale", "as in en_GB.UTF-8 or C.UTF-8")


def check_name_server(address: str, where: str) -> None:
    """The address of a name server: IPv4, as static addresses are."""
    try:
        ip = ipaddress.IPv4Address(address)
    except ValueError:
        ip = None
    if ip is None or not _is_a_machine(ip):
        raise ConfigError(
            f"{where} has '{address}', no IPv4 address of a machine", 'as in ["192.168.1.1"]'
        )


def check_user(user: str, where: str) -> None:
    refuse_first(
        (not USER_NAME.match(user), f"{where} = '{user}' cannot be a user of the devices",
         "small letters, digits, '_' and '-', at most 32, and not root"),
        (user in TAKEN, f"{where} = '{user}' cannot be a user of the devices",
         "their operating system has a user or group of this name; another one, as in fleet"),
    )  # fmt: skip


def check_hub(address: str, where: str) -> None:
    """An address at which devices can find the hub."""
    match = HUB_ADDRESS.match(address)
    if not match or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(
            f"{where} has '{address}', which is not an address with a port",
            "write tcp://HOST:PORT, as in tcp://hub.local:5555",
        )
    host = plain_host(match[1])
    if host in ITSELF or host.endswith(".localhost"):
        raise ConfigError(*_not_the_hub(where, address, "which means the device itself"))
    labels = host.split(".")
    if ":" not in host and not NUMERIC.match(labels[-1]):
        if len(host) > 253 or not all(map(LABEL.match, labels)):
            raise ConfigError(
                f"{where} has '{address}', whose name no machine can have",
                "its parts have 1 to 63 letters, digits and '-' inside; as in tcp://hub.local:5555",
            )
        return
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"{where} has '{address}', which is not an IP address",
            "four numbers of 0 to 255, as in tcp://192.168.1.5:5555",
        ) from None
    if ip.is_loopback:
        raise ConfigError(*_not_the_hub(where, address, "which means the device itself"))
    if ip.is_unspecified or ip.is_multicast or (ip.is_reserved and not ip.is_link_local):
        raise ConfigError(*_not_the_hub(where, address, "which is no machine's address"))
    if ip.version == 6 and ip.is_link_local != bool(ip.scope_id):
        raise ConfigError(
            f"{where} has '{address}': a zone belongs to a link-local address, and to no other",
            "the device's own interface, as in tcp://[fe80::1%wlan0]:5555",
        )


def plain_host(host: str) -> str:
    """A host's name or IP address in the spelling that is compared: small letters, no brackets."""
    host = host.strip("[]").removesuffix(".")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.lower()
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def _not_the_hub(where: str, address: str, why: str) -> tuple[str, str]:
    return (
        f"{where} has '{address}', {why}",
        "the hub's own address in the devices' network, as `ip address` prints it there",
    )


def static_address(address: str, where: str) -> str:
    """A device's own IPv4 address with the length of its network, in the usual spelling."""
    try:
        interface = ipaddress.ip_interface(address)
    except ValueError:
        interface = None
    if interface is None or "/" not in address or interface.network.num_addresses == 1:
        raise ConfigError(
            f"{where} = '{address}' is not an address with the length of its network",
            'allowed: "dhcp", or as in "192.168.1.20/24"',
        )
    if interface.version != 4:
        raise ConfigError(
            f"{where} = '{address}' is an IPv6 address", 'IPv4 only, as in "192.168.1.20/24"'
        )
    if interface.ip in (interface.network.network_address, interface.network.broadcast_address):
        raise ConfigError(f"{where} = '{address}' is the network itself, not a machine")
    if not _is_a_machine(interface.ip):
        raise ConfigError(
            f"{where} = '{address}' is no address of a machine", 'as in "192.168.1.20/24"'
        )
    return str(interface)


def check_gateway(gateway: str, address: str, where: str) -> None:
    """A gateway in the network of a static address, and not the device itself."""
    own = ipaddress.ip_interface(address)
    try:
        parsed = ipaddress.ip_address(gateway)
    except ValueError:
        parsed = None
    if parsed is None or parsed not in own.network:
        raise ConfigError(f"{where} = '{gateway}' is not an address in {own.network}")
    if parsed in (own.ip, own.network.network_address, own.network.broadcast_address):
        raise ConfigError(f"{where} = '{gateway}' is not another machine in {own.network}")


def _is_a_machine(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    first = int(str(ip).partition(".")[0])
    return first != 0 and not (ip.is_loopback or ip.is_multicast or ip.is_reserved)


def is_public_key(line: str) -> bool:
    """Whether a line is a whole SSH public key: its parts have the lengths that it states."""
    match = PUBLIC_KEY.match(line)
    if not match:
        return False
    try:
        left = base64.b64decode(match[2], validate=True)
    except binascii.Error:
        return False
    parts = []
    while left:
        length = int.from_bytes(left[:4], "big")
        parts.append(left[4 : 4 + length])
        if len(left) < 4 + length:
            return False
        left = left[4 + length :]
    whole = len(parts) == _FIELDS[match[1]] and parts[0] == match[1].encode() and all(parts)
    return whole and ("ed25519" not in match[1] or len(parts[1]) == 32)
