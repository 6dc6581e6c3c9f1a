"""`cluster.toml`: what it means, and one clear line for everything it must not say."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.fleet import cluster, values
from edgetrain.provisioning.cards import example, flashing, personal

GOOD = """
[hub]
addresses = ["tcp://192.168.1.5:5555", "tcp://hub.local:5555", "tcp://[fd00::1]:5555"]
[image]
file = "raspios.img.xz"
[wifi]
ssid = "lab"
country = "DE"
secret = "file:lab.psk"
[ssh]
user = "fleet"
keys = ["id.pub"]
[job]
file = "job.toml"
data = "digits"
[[device]]
name = "pi-0"
profile = "raspberry-pi-4b"
address = "dhcp"
[[device]]
name = "pi-1"
profile = "raspberry-pi-4b"
address = "192.168.1.20/24"
[[server]]
name = "big"
host = "gpu.local"
"""


def read(text: str, folder: Path = Path("/cluster")) -> cluster.Cluster:
    return cluster.parse(tomllib.loads(text), folder / "cluster.toml")


def test_a_whole_file():
    found = read(GOOD)
    assert found.hub == cluster.HubPlace(
        ("tcp://192.168.1.5:5555", "tcp://hub.local:5555", "tcp://[fd00::1]:5555")
    )
    assert found.image == cluster.ImageChoice(Path("/cluster/raspios.img.xz"))
    assert found.job == cluster.JobFiles(Path("/cluster/job.toml"), Path("/cluster/digits"))
    assert [found.index(d) for d in found.devices] == [0, 1]
    assert found.devices[1].address == "192.168.1.20/24"
    assert found.servers == (cluster.ServerEntry("big", "gpu.local"),)
    assert not cluster.warnings(found)
    assert [d.name for d in found.chosen(("pi-1",))] == ["pi-1"]
    assert found.chosen() == found.devices
    with pytest.raises(ConfigError, match=r"no device 'pi-2' \(did you mean 'pi-"):
        found.chosen(("pi-2",))


def test_a_device_with_the_hub_is_no_member_and_gives_the_hub_its_address():
    both = GOOD.replace('"192.168.1.20/24"', '"192.168.1.20/24"\nrole = "hub"')
    found = read(both)
    assert found.hub_device == found.devices[1]
    assert (found.members, found.index(found.devices[0])) == (found.devices[:1], 0)
    assert found.hub.addresses[0] == "tcp://192.168.1.5:5555", "[hub] says otherwise"
    cluster.check_fleet(found, 1, "host", gateways=False)
    with pytest.raises(ConfigError, match="1 devices besides its hub"):
        cluster.check_fleet(found, 2, "host", gateways=False)
    own = both.partition("[image]")[1] + both.partition("[image]")[2]
    assert read(own).hub == cluster.HubPlace(("tcp://192.168.1.20:5555",))
    assert read(own.replace('"192.168.1.20/24"', '"dhcp"')).hub.addresses == (
        "tcp://pi-1.local:5555",
    )
    moved = both.replace("192.168.1.5:", "192.168.1.20:")
    assert read(moved).hub.addresses[0] == "tcp://192.168.1.20:5555"


def test_members_of_a_site_join_its_gateway_and_that_the_hub():
    text = GOOD.replace('"192.168.1.20/24"', '"192.168.1.20/24"\nsite = "barn"')
    gateway = '[[device]]\nname = "gate"\nprofile = "raspberry-pi-4b"\nrole = "gateway"\n'
    found = read(f'{text}{gateway}site = "barn"\naddress = "10.0.0.7/24"')
    alone, member, gate = found.devices
    assert found.members == (alone, member)
    assert [found.joined_by(device) for device in found.devices] == [None, gate, None]
    assert found.addresses(member) == ("tcp://10.0.0.7:5555",)
    assert found.addresses(alone) == found.addresses(gate) == found.hub.addresses
    (line,) = [line for line in cluster.warnings(found) if line.startswith("pi-1")]
    assert "the hub at 10.0.0.7 is not in 192.168.1.0/24" in line
    cluster.check_fleet(found, 2, "host", gateways=True)
    with pytest.raises(ConfigError, match=r"has gateways \(gate\), .* fleet.gateways is false"):
        cluster.check_fleet(found, 2, "host", gateways=False)
    with pytest.raises(ConfigError, match="2 devices besides gate, and the job's"):
        cluster.check_fleet(found, 3, "host", gateways=True)
    hub = '[[device]]\nname = "top"\nprofile = "raspberry-pi-4b"\nrole = "hub"\n'
    found = read(f'{text}{gateway}site = "barn"\n{hub}')
    assert [d and d.name for d in map(found.joined_by, found.devices)] == [
        "top", "gate", "top", None
    ]  # fmt: skip


TABLES = {
    "hub": cluster.HubPlace, "image": cluster.ImageChoice, "wifi": cluster.Wifi,
    "system": cluster.SystemSettings, "ssh": cluster.Ssh, "job": cluster.JobFiles,
    "device": cluster.DeviceEntry,
}  # fmt: skip


def test_the_example_can_be_read_and_names_every_key(tmp_path):
    text = example.example("cluster.toml", 3, "raspberry-pi-5")
    (tmp_path / "cluster.toml").write_text(text)
    found = cluster.load(tmp_path / "cluster.toml")
    assert [d.name for d in found.devices] == ["pi-0", "pi-1", "pi-2"]
    whole = "\n".join(
        line.removeprefix("# ") if " = " in line or line.startswith("# [") else line
        for line in text.splitlines()
    )
    keys = tomllib.loads(whole.replace('sha256 = "…"', "").replace('bmap = "…"', ""))
    for table, entry in TABLES.items():
        given_keys = keys[table][0] if table == "device" else keys[table]
        known = {each.name for each in dataclasses.fields(entry)}
        assert given_keys.keys() >= known - {"sha256", "bmap", "role"}, table


BAD = [
    ('[[device]]\nname = "pi-0"\nprofile = "x"\n', "two devices are called pi-0"),
    ("[hubb]\n", r"no key 'hubb' \(did you mean 'hub'"),
    ('[[device]]\nname = "a"\nprofil = "x"', r"device\[2\].profil' \(did you mean 'profile'"),
    ('[[device]]\nname = "a"', r"device\[2\].profile is missing"),
    (
        '[[device]]\nname = "a"\nprofile = "x"\naddress = "192.168.1.20/16"',
        "the address 192.168.1.",
    ),
]


@pytest.mark.parametrize(("more", "said"), BAD, ids=lambda v: v[:20])
def test_bad_tables(more, said):
    with pytest.raises(ConfigError, match=said):
        read(GOOD + more)


HUBS = [
    ("[fe80::1]", "a zone belongs to a link-local address"),
    ("[fd00::1%eth0]", "a zone belongs to a link-local address"),
    ("[fe80::1%]", "not an address with a port"),
    ("[fe80::1%a b]", "not an address with a port"),
    ("192.168.1.0", "which is 192.168.1.0/24 itself, pi-1's network"),
    ("192.168.1.255", "which is 192.168.1.0/24 itself"),
    ("[::ffff:192.168.1.255]", "which is 192.168.1.0/24 itself"),
    ("[::ffff:192.168.1.20]", "has the hub's address, 192.168.1.20"),
    ("PI-0", "has the hub's address, pi-0"),
    ("Pi-1.LOCAL", "has the hub's address, pi-1.local"),
    ("pi-0.local.", "has the hub's address, pi-0.local"),
    ("LocalHost", "means the device itself"),
    ("localhost.", "means the device itself"),
    ("ip6-localhost", "means the device itself"),
    ("ip6-loopback", "means the device itself"),
    ("localhost.localdomain", "means the device itself"),
    ("hub.LOCALHOST", "means the device itself"),
    ("[::ffff:127.0.0.1]", "means the device itself"),
    ("0x7f000001", "is not an IP address"),
    ("127.1", "is not an IP address"),
    ("hub.0x7f.1", "is not an IP address"),
    ("a" * 64, "whose name no machine can have"),
    ("hub." + "a" * 64 + ".lan", "whose name no machine can have"),
    (".".join(["a" * 60] * 5), "whose name no machine can have"),
    ("-hub", "whose name no machine can have"),
    ("hub..lan", "whose name no machine can have"),
]
CHANGES = [
    ('"tcp://192.168.1.5:5555"', '"tcp://127.0.0.1:5555"', "which means the device itself"),
    ('"tcp://192.168.1.5:5555"', '"tcp://localhost:5555"', "which means the device itself"),
    ('"tcp://[fd00::1]:5555"', '"tcp://[::1]:5555"', "which means the device itself"),
    ('"tcp://192.168.1.5:5555"', '"tcp://0.0.0.0:5555"', "which is no machine's address"),
    ('"tcp://192.168.1.5:5555"', '"tcp://224.0.0.1:5555"', "which is no machine's address"),
    ('"tcp://192.168.1.5:5555"', '"tcp://300.1.1.1:5555"', "which is not an IP address"),
    ('"tcp://192.168.1.5:5555"', '"tcp://192.168.1:5555"', "which is not an IP address"),
    ('"tcp://[fd00::1]:5555"', '"tcp://[fd00:::1]:5555"', "which is not an IP address"),
    ('"tcp://192.168.1.5:5555"', '"tcp://192.168.1.20:5555"', "a device has the hub's address"),
    ('"192.168.1.20/24"', '"fd00::2/64"', "is an IPv6 address"),
    ('"192.168.1.20/24"', '"239.1.2.3/24"', "is no address of a machine"),
    ('"192.168.1.20/24"', '"127.0.0.2/8"', "is no address of a machine"),
    ('"192.168.1.20/24"', '"0.1.2.3/8"', "is no address of a machine"),
    ("/24\"", "/24\"\ngateway = \"192.168.1.20\"", "is not another machine in 192.168.1.0/24"),
    ("/24\"", "/24\"\nmax_celsius = 20", "allowed: 40 to 110, or 0"),
    ("/24\"", "/24\"\nrole = \"gatewai\"", r"did you mean 'gateway'"),
    ("/24\"", "/24\"\nrole = \"boss\"", "known: gateway, hub, member"),
    ("/24\"", "/24\"\nrole = \"gateway\"", r"device\[1\] is a gateway, and site is missing"),
    ("/24\"", "/24\"\nrole = \"hub\"\nsite = \"a\"", "the hub is the hub of all sites"),
    ("/24\"", "/24\"\nsite = \"the barn\"", "site = 'the barn' is not a name"),
    ("/24\"", "/24\"\nsite = \"barn\"", "pi-1 is at the site 'barn', which has no gateway"),
    ("/24\"", "/24\"\nrole = \"gateway\"\nsite = \"barn\"",
     "no member is at the site 'barn' of the gateway pi-1"),
    ('"dhcp"', '"dhcp"\nsite = "bran"\n[[device]]\nname = "g"\nprofile = "raspberry-pi-4b"\n'
     'role = "gateway"\nsite = "barn"', r"which has no gateway \(did you mean 'barn'"),
    ('"dhcp"', '"dhcp"\nsite = "a"\n[[device]]\nname = "g"\nprofile = "raspberry-pi-4b"\n'
     'role = "gateway"\nsite = "a"\n[[device]]\nname = "h"\nprofile = "raspberry-pi-4b"\n'
     'role = "gateway"\nsite = "a"', "two devices are the gateway of the site a"),
    ('"dhcp"', '"192.168.1.5/24"\nsite = "a"\nrole = "gateway"\n[[device]]\nname = "g"\n'
     'profile = "raspberry-pi-4b"\nsite = "a"', r"the hub's address, 192.168.1.5 .*no gateway"),
    ('"dhcp"', '"dhcp"\nsite = "a"\nrole = "gateway"\nmax_celsius = 70',
     "a gateway has no steps to lengthen"),
    ('"tcp://hub.local:5555"', '"tcp://pi-0.local:5555"', "has the hub's address, pi-0.local"),
    ("/24\"", "/24\"\nrole = \"hub\"\nmax_celsius = 70", "a hub has no steps to lengthen"),
    ("/24\"", "/24\"\nrole = \"hub\"\n[[device]]\nname = \"pi-2\"\nrole = \"hub\"\n"
     "profile = \"raspberry-pi-4b\"", "two devices have the role hub"),
    ("/24\"", "/24\"\ngateway = \"192.168.1.255\"", "is not another machine in 192.168.1.0/24"),
    ('country = "DE"', 'country = "XX"', "is not a country"),
    ('country = "DE"', 'country = "UK"', "the United Kingdom is GB"),
    ('ssid = "lab"', 'ssid = "lab\\nx"', "cannot be printed"),
    ('ssid = "lab"', 'ssid = "lab\\u2028x"', "cannot be printed"),
    ('user = "fleet"', 'user = "daemon"', "their operating system has a user or group"),
    ('user = "fleet"', 'user = "video"', "their operating system has a user or group"),
    ('"tcp://192.168.1.5:5555"', '"tcp://192.168.1.5"', "not an address with a port"),
    ('"tcp://192.168.1.5:5555"', '"192.168.1.5:5555"', "not an address with a port"),
    ('"tcp://192.168.1.5:5555"', '"tcp://hub:70000"', "not an address with a port"),
    *(('"tcp://192.168.1.5:5555"', f'"tcp://{host}:5555"', said) for host, said in HUBS),
    ('name = "pi-0"', 'name = "Pi 0"', "is not a host name"),
    ('name = "pi-0"', 'name = "-pi"', "is not a host name"),
    ('name = "pi-0"', f'name = "{"a" * 64}"', "is not a host name"),
    ('name = "pi-0"', "name = 0", "name = 0 .*is text"),
    ('country = "DE"\n', "", r"wifi.country is missing"),
    ('country = "DE"', 'country = "Germany"', "is not a country"),
    ('secret = "file:lab.psk"', 'secret = "hunter2hunter2"', "never stands in this file"),
    ('secret = "file:lab.psk"\n', "", r"without wifi.secret"),
    ('ssid = "lab"', 'ssid = ""', "has 0 bytes"),
    ('user = "fleet"', 'user = "root"', "cannot be a user"),
    ('user = "fleet"', 'user = "a b"', "cannot be a user"),
    ('keys = ["id.pub"]', "keys = []", "ssh.keys is empty"),
    ('"192.168.1.20/24"', '"192.168.1.20"', "with the length of its network"),
    ('"192.168.1.20/24"', '"192.168.1.0/24"', "is the network itself"),
    ('"192.168.1.20/24"', '"192.168.1.255/24"', "is the network itself"),
    ('"192.168.1.20/24"', '"wlan0"', "with the length of its network"),
    ('file = "raspios.img.xz"', 'file = ""', "image.file = '' .*the name of a file"),
    ('file = "raspios.img.xz"', 'file = "x"\nsha256 = "123"', "not 64 hexadecimal digits"),
    ('address = "dhcp"', 'address = "dhcp"\ngateway = "10.0.0.1"', "needs a static address"),
    ("/24\"", "/24\"\ngateway = \"10.0.0.1\"", "not an address in 192.168.1.0/24"),
    ("[hub]", "trusted = 1\n[hub]", "allowed is true or false"),
    ('host = "gpu.local"', 'host = ""', "host is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), CHANGES, ids=lambda v: v[:30])
def test_bad_values_cost_one_clear_line(old, new, said):
    assert old in GOOD
    with pytest.raises(ConfigError, match=said) as caught:
        read(GOOD.replace(old, new, 1))
    assert "cluster.toml" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value), "a secret is not repeated"


@pytest.mark.parametrize(
    "host", ["[fe80::1%eth0]", "169.254.1.5", "HUB.local.", "a" * 63, "10.0.0.0", "192.168.0.255"]
)
def test_what_may_be_a_hub_is_taken(host):
    address = f"tcp://{host}:5555"
    found = read(GOOD.replace("tcp://192.168.1.5:5555", address))
    assert found.hub.addresses[0] == address
    unit = flashing.unit(found, found.devices[0])
    assert f"--hub {address.replace('%', '%%')} " in unit


def test_the_same_address_twice():
    more = '[[device]]\nname = "pi-2"\nprofile = "x"\naddress = "192.168.1.20/24"\n'
    with pytest.raises(ConfigError, match=r"two devices have the address 192\.168\.1\.20"):
        read(GOOD + more)


def test_an_address_outside_the_hubs_network_is_a_warning():
    outside = read(GOOD.replace("192.168.1.20/24", "10.0.0.20/24").replace("hub.local", "10.9.9.9"))
    (line,) = cluster.warnings(outside)
    assert "pi-1" in line
    assert "10.0.0.0/24" in line
    with_gateway = GOOD.replace(
        '"192.168.1.20/24"', '"10.0.0.20/24"\ngateway = "10.0.0.1"'
    )  # fmt: skip
    assert not cluster.warnings(read(with_gateway))


def test_a_file_that_is_missing_or_not_toml(tmp_path):
    with pytest.raises(ConfigError, match="no cluster file"):
        cluster.load(tmp_path / "cluster.toml")
    (tmp_path / "cluster.toml").write_text("[hub")
    with pytest.raises(ConfigError, match="is not TOML"):
        cluster.load(tmp_path / "cluster.toml")


def test_more_or_fewer_devices_than_members_and_a_job_that_slows_them_down():
    found = read(GOOD)
    cluster.check_fleet(found, 2, "host", gateways=False)
    cluster.check_fleet(found, 2, "host", gateways=True)
    for members in (1, 3):
        with pytest.raises(ConfigError, match=f"has 2 devices, .* is {members}"):
            cluster.check_fleet(found, members, "host", gateways=False)
    with pytest.raises(ConfigError, match="would slow real devices down"):
        cluster.check_fleet(found, 2, "raspberry-pi-4b", gateways=False)


# -- secrets and keys -----------------------------------------------------------------------------


def test_a_secret_comes_from_a_file_the_environment_or_the_user(tmp_path):
    (tmp_path / "lab.psk").write_text("correct horse\n")
    (tmp_path / "lab.psk").chmod(0o600)

    def ask() -> str:
        return "battery staple"

    def found(where: str) -> str:
        wifi = cluster.Wifi("lab", "DE", where)
        assert "horse" not in repr(wifi)
        return cluster.secret(wifi, tmp_path, {"PSK": "from the environment"}, ask)

    assert found("file:lab.psk") == "correct horse"
    assert found("env:PSK") == "from the environment"
    assert found("ask") == "battery staple"
    with pytest.raises(ConfigError, match=r"wifi\.secret: there is no file .*none"):
        found("file:none")
    for mode in (0o666, 0o644, 0o640):
        (tmp_path / "lab.psk").chmod(mode)
        with pytest.raises(ConfigError, match=r"lab\.psk can be (read|written) by others"):
            found("file:lab.psk")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match=r"is not a regular file"):
            found(f"file:{name}")
    with pytest.raises(ConfigError, match="the environment has no NONE"):
        found("env:NONE")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"secret": "ask", "security": "open"}, "'open' and wifi.secret"),
        ({}, "'wpa2' without wifi.secret"),
        ({"security": "wpa3"}, "'wpa3' without wifi.secret"),
        (
            {"secret": "ask", "security": "wep"},
            "known: open, wpa2, wpa3",
        ),
        ({"secret": "ask", "hidden": 1}, "wifi.hidden = 1"),
    ],
)
def test_kinds_of_wireless_networks(table, message):
    with pytest.raises(ConfigError, match=message):
        cluster.parse({"wifi": {"ssid": "lab", "country": "DE", **table}}, Path("c.toml"))


def test_an_open_network_has_no_passphrase_and_wpa3_needs_it_itself():
    table = {"ssid": "lab", "country": "DE", "security": "open", "hidden": True}
    found = cluster.parse({"wifi": table}, Path("c.toml")).wifi
    assert (found.security, found.hidden) == ("open", True)
    assert cluster.secret(found, Path(), {}, pytest.fail) == ""
    wpa3 = cluster.Wifi("lab", "DE", "env:X", "wpa3")
    assert cluster.secret(wpa3, Path(), {"X": "correct horse"}, str) == "correct horse"
    with pytest.raises(ConfigError, match="WPA3 needs the passphrase itself"):
        cluster.secret(wpa3, Path(), {"X": "a" * 64}, str)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"timezone": "Mars/Base"}, "'Mars/Base' is not a time zone"),
        ({"timezone": "../passwd"}, "is not a time zone"),
        ({"locale": "de"}, "'de' is not a locale"),
        ({"dns": "1.1.1.1"}, "is a list of texts"),
        ({"dns": ["::1"]}, "no IPv4 address of a machine"),
        ({"dns": ["1.1.1.1"]}, "no device has a static address"),
        ({"first_window": 3000}, "system.first_window = 3000 .*1 to 1000 segments"),
        ({"receive_kb": 5}, "system.receive_kb = 5 .*131 to 6000 kB"),
    ],
)
def test_settings_of_the_system(table, message):
    with pytest.raises(ConfigError, match=message):
        cluster.parse({"system": table}, Path("c.toml"))
    device = {"name": "pi-0", "profile": "x", "address": "192.168.1.20/24"}
    good = {"timezone": "Europe/Berlin", "locale": "C.UTF-8", "dns": ["192.168.1.1"]}
    found = cluster.parse({"system": good, "device": [device]}, Path("c.toml")).system
    assert found == cluster.SystemSettings("Europe/Berlin", "C.UTF-8", ("192.168.1.1",))


@given(st.text("abc ", max_size=70))
def test_a_passphrase_has_8_to_63_characters(text):
    wifi = cluster.Wifi("lab", "DE", "env:X")
    if 8 <= len(text) <= 63 or (len(text) == 64 and " " not in text):
        assert cluster.secret(wifi, Path(), {"X": text}, str) == text
    else:
        with pytest.raises(ConfigError, match=f"has {len(text)} characters") as caught:
            cluster.secret(wifi, Path(), {"X": text}, str)
        assert len(text) < 4 or text not in str(caught.value)


def test_ssh_keys_are_public_ones(tmp_path):
    path = tmp_path / "id"
    ssh = cluster.Ssh("fleet", (path,))
    with pytest.raises(ConfigError, match=r"ssh-keygen"):
        cluster.ssh_keys(ssh)
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@host"
    path.write_text(f"# mine\n{key}\n\n")
    assert cluster.ssh_keys(ssh) == [key]
    path.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\n")
    with pytest.raises(ConfigError, match=r"is a private key.*give .*id\.pub"):
        cluster.ssh_keys(ssh)
    misnamed = path.rename(tmp_path / "id.pub")
    with pytest.raises(ConfigError, match=r"private key.*give what `ssh-keygen -y` makes of it"):
        cluster.ssh_keys(cluster.Ssh("fleet", (misnamed,)))
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match="not a whole SSH public key"):
        cluster.ssh_keys(ssh)
    whole = key.split()[1]
    for cut in range(1, len(whole)):
        path.write_text(f"ssh-ed25519 {whole[:cut]} me@host\n")
        with pytest.raises(ConfigError, match="not a whole SSH public key"):
            cluster.ssh_keys(ssh)
    path.write_text(f"ssh-rsa {whole} me@host\n")
    with pytest.raises(ConfigError, match="not a whole SSH public key"):
        cluster.ssh_keys(ssh)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="package openssh-client is missing")
@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_keys_of_ssh_keygen_are_whole(tmp_path, kind):
    words = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(tmp_path / "id")]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    assert len(cluster.ssh_keys(cluster.Ssh("fleet", (tmp_path / "id.pub",)))) == 1


@given(st.text(min_size=1, max_size=32))
def test_a_network_is_called_in_networkmanagers_file_what_it_is_called(ssid):
    """As GLib reads a key file: blanks before a value are lost; a list of numbers is bytes."""
    try:
        values.check_ssid(ssid, "wifi.ssid")
    except ConfigError:
        return
    network = personal.DeviceNetwork(ssid=ssid, country="DE", passphrase="correct horse")
    device = personal.Personal("pi-0", "fleet", (), network, "1")
    script = personal.files(device, "firstrun.sh")["firstrun.sh"].decode()
    (value,) = re.findall(r"^ssid=(.*)$", script, re.MULTILINE)
    read = value.lstrip(" ")
    if re.fullmatch(r"([0-9]{1,3};)+", read):
        assert bytes(map(int, read[:-1].split(";"))) == ssid.encode()
    else:
        assert read == ssid
        assert not set(read) & set("\\; ")
