"""The settings of one device: the files of its boot partition, for each first-boot format.

Pure: nothing is read or written here. All formats do the same: host name, user with SSH keys and
sudo, sshd with keys only, network, country, Wi-Fi power saving off; and start one unit, which runs
first_boot.py (see there).
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgetrain.fleet.cluster import DHCP
from edgetrain.provisioning.cards.looking import CLOUD_INIT, FIRSTRUN, PRESEED

BOOT = "/boot/firmware"
"""Folder where devices mount the boot partition."""
FOLDER = "edgetrain"
"""Folder of our files on the boot partition."""
SETUP = f"{FOLDER}/setup.sh"
"""Script that rpi-preseed runs there; it holds the key of the wireless network."""
UNIT = "edgetrain-first-boot.service"

_NO_POWERSAVE = "[connection]\nwifi.powersave = 2\n"
_SSHD = "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin no\n"
_UNIT_TEXT = f"""\
[Unit]
Description=edgetrain first boot: unpack the worker, make keys, enrol
RequiresMountsFor={BOOT}
ConditionPathExists={BOOT}/{FOLDER}/config.json
ConditionPathExists=!/var/lib/edgetrain-setup/done
# It sends the SSH host key: not the one that the image makes anew at its first boot.
After=regenerate_ssh_host_keys.service sshd-keygen.service
# It unpacks once the root file system has its size, whatever enlarges it.
After=systemd-growfs-root.service rpi-resize.service resize2fs_once.service
After=cloud-init.service cloud-init-network.service
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=/usr/bin/python3 {BOOT}/{FOLDER}/first_boot.py
Restart=on-failure
RestartSec=30
RestartPreventExitStatus=2

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class DeviceNetwork:
    """The device's way to the hub. Texts that do not apply are empty."""

    address: str = DHCP
    gateway: str = ""
    ssid: str = ""
    country: str = ""
    passphrase: str = field(default="", repr=False)
    security: str = "wpa2"
    hidden: bool = False
    dns: tuple[str, ...] = ()
    """Name servers that a static address uses."""

    @property
    def psk(self) -> str:
        """The key that the passphrase stands for: 64 hexadecimal digits, of this network alone."""
        if re.fullmatch(r"[0-9a-fA-F]{64}", self.passphrase):
            return self.passphrase.lower()
        word, salt = self.passphrase.encode(), self.ssid.encode()
        return hashlib.pbkdf2_hmac("sha1", word, salt, 4096, 32).hex()


@dataclass(frozen=True)
class Personal:
    name: str
    user: str
    ssh_keys: tuple[str, ...]
    network: DeviceNetwork
    instance: str
    """Another one each time that a card is written: else its first-boot settings are ignored."""
    timezone: str = ""
    locale: str = ""


def instance_id(name: str, nonce: bytes) -> str:
    """The instance of a device's card; `nonce` is drawn for each writing."""
    return f"edgetrain-{name}-{nonce.hex()}"


def files(device: Personal, first_boot: str) -> dict[str, bytes]:
    """The files that the operating system reads at its first boot, by their names."""
    if first_boot == CLOUD_INIT:
        return {
            "user-data": b"#cloud-config\n" + _json(_user_data(device)),
            "network-config": _json(_network_config(device.network)),
            "meta-data": f"instance-id: {device.instance}\n".encode(),
        }
    if first_boot == PRESEED:
        return {
            "rpi-preseed.toml": _preseed(device).encode(),
            SETUP: _preseed_setup(device).encode(),
        }
    return {"firstrun.sh": _firstrun(device).encode()}


def command_line(before: str, device: Personal, first_boot: str) -> str:
    """cmdline.txt, from what is in it: one line, without comments. Words of an earlier writing are
    replaced.

    The memory cgroup is switched on: without it a unit's MemoryMax is ignored. The kernels of
    Raspberry Pi OS switch it off, and the last word of this line wins.
    """
    ours = re.compile(
        r"ds=nocloud|cgroup_(enable|disable)=memory|systemd\.(run|unit)|cfg80211\.ieee80211_regdom"
    )
    lines = [line for line in before.splitlines() if not line.lstrip().startswith("#")]
    words = [word for word in " ".join(lines).split() if not ours.match(word)]
    words.append("cgroup_enable=memory")
    if device.network.country:
        words.append(f"cfg80211.ieee80211_regdom={device.network.country}")
    if first_boot == CLOUD_INIT:
        words.append(f"ds=nocloud;i={device.instance}")
    elif first_boot == FIRSTRUN:
        words += [
            f"systemd.run={BOOT}/firstrun.sh",
            "systemd.run_success_action=reboot",
            "systemd.unit=kernel-command-line.target",
        ]
    return " ".join(words) + "\n"


# -- cloud-init ----------------------------------------------------------------------------------


def _user_data(device: Personal) -> dict[str, Any]:
    return {
        "hostname": device.name,
        "manage_etc_hosts": True,
        "ssh_pwauth": False,
        "disable_root": True,
        "ssh_deletekeys": True,
        "ssh_genkeytypes": ["ed25519"],
        "users": [
            {
                "name": device.user,
                "groups": "users,sudo,video",
                "shell": "/bin/bash",
                "lock_passwd": True,
                "sudo": "ALL=(ALL) NOPASSWD:ALL",
                "ssh_authorized_keys": list(device.ssh_keys),
            }
        ],
        "write_files": [
            {"path": path, "permissions": mode, "content": content}
            for path, (mode, content) in _system_files(device).items()
        ],
        "runcmd": [
            ["sh", "-c", "rfkill unblock wifi || true"],
            ["sh", "-c", "systemctl enable --now ssh || systemctl enable --now sshd"],
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", "--now", "--no-block", UNIT],
        ],
        **({"timezone": device.timezone} if device.timezone else {}),
        **({"locale": device.locale} if device.locale else {}),
    }


def _system_files(device: Personal) -> dict[str, tuple[str, str]]:
    """Files of the operating system: their modes and contents."""
    return {
        f"/etc/sudoers.d/010_{device.user}": (
            "0440",
            f"{device.user} ALL=(ALL) NOPASSWD: ALL\n",
        ),
        "/etc/ssh/sshd_config.d/10-edgetrain.conf": ("0644", _SSHD),
        "/etc/NetworkManager/conf.d/10-edgetrain.conf": ("0644", _NO_POWERSAVE),
        f"/etc/systemd/system/{UNIT}": ("0644", _UNIT_TEXT),
    }


def _network_config(network: DeviceNetwork) -> dict[str, Any]:
    addressing: dict[str, Any] = {"dhcp4": True}
    if network.address != DHCP:
        addressing = {"dhcp4": False, "addresses": [network.address]}
        if network.gateway:
            addressing["routes"] = [{"to": "default", "via": network.gateway}]
        if network.dns:
            addressing["nameservers"] = {"addresses": list(network.dns)}
    on_a_cable = network.address != DHCP and not network.ssid
    cable = addressing if on_a_cable or network.address == DHCP else {"dhcp4": True}
    # The boot waits for what is not optional. If everything is, systemd-networkd waits two minutes
    # for nothing.
    optional = {"optional": True} if network.ssid else {}
    config: dict[str, Any] = {
        "version": 2,
        "ethernets": {"cable": {"match": {"name": "e*"}, **optional, **cable}},
    }
    if network.ssid:
        point: dict[str, Any] = {"hidden": True} if network.hidden else {}
        # WPA3 needs the passphrase itself. Beside a key without a kind netplan 1 permits WPA3.
        if network.security == "wpa3":
            point["auth"] = {"key-management": "sae", "password": network.passphrase}
        elif network.security == "wpa2":
            point["auth"] = {"key-management": "psk", "password": network.psk}
        config["wifis"] = {
            "wlan0": {
                **addressing,
                "regulatory-domain": network.country,
                "access-points": {network.ssid: point},
            }
        }
    return config


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


# -- firstrun.sh ---------------------------------------------------------------------------------


def _firstrun(device: Personal) -> str:
    """A script that runs once, as root, before the first proper boot of Raspberry Pi OS 12.

    It ends by overwriting itself: the file holds the key of the wireless network, and removing its
    name would leave that in free clusters. Bash reads a script while it runs it, so everything is
    one group, which is read whole before its first command. cmdline.txt is changed before: if the
    power fails between the two, the device boots as always, and first_boot.py overwrites the file.
    """
    script = f"{BOOT}/firstrun.sh"
    parts = [
        "#!/bin/bash\nset +e\n{\n",
        *_script(device),
        *_country(device.network),
        f"ln -sf /etc/systemd/system/{UNIT} /etc/systemd/system/multi-user.target.wants/{UNIT}\n",
        f"sed -i 's| systemd\\.[^ ]*||g' {BOOT}/cmdline.txt\n"
        "sync\n"
        f"shred --iterations=0 --zero --remove=unlink {script}\n"
        "sync\nexit 0\n}\n",
    ]
    return "".join(parts)


def _script(device: Personal) -> list[str]:
    """Shell lines that set up everything but the country."""
    user, name = shlex.quote(device.user), shlex.quote(device.name)
    keys = "\n".join(device.ssh_keys)
    home = f"/home/{device.user}"
    return [
        f"echo {name} > /etc/hostname\n"
        f"sed -i 's/127\\.0\\.1\\.1.*/127.0.1.1\\t{device.name}/' /etc/hosts\n",
        # The image's own first user would ask for a name and a password on the screen.
        "systemctl disable userconfig 2> /dev/null\n"
        f"id {user} 2> /dev/null || useradd -m -s /bin/bash {user}\n"
        f"passwd -l {user} > /dev/null\n"
        f"for group in users sudo video; do usermod -aG $group {user}; done\n",
        f"install -d -m 0700 -o {user} -g {user} {home}/.ssh\n",
        _here(f"{home}/.ssh/authorized_keys", "0600", keys + "\n"),
        f"chown {user}:{user} {home}/.ssh/authorized_keys\n",
        *(_here(path, mode, text) for path, (mode, text) in _system_files(device).items()),
        "systemctl enable ssh\n",
        *_network_files(device.network),
        *_place(device),
    ]


def _place(device: Personal) -> list[str]:
    """Shell lines for time zone and locale. Generating a locale takes longer than a first boot's
    script may: it is not waited for, where systemd runs."""
    lines = []
    if zone := device.timezone:
        lines.append(
            f"ln -sf /usr/share/zoneinfo/{zone} /etc/localtime\necho {zone} > /etc/timezone\n"
        )
    if locale := device.locale:
        lines.append(
            f"sed -i 's/^# *{locale} /{locale} /' /etc/locale.gen\n"
            f"echo LANG={locale} > /etc/default/locale\n"
            "systemd-run --no-block locale-gen 2> /dev/null || locale-gen\n"
        )
    return lines


def _country(network: DeviceNetwork) -> list[str]:
    if not network.ssid:
        return []
    words = f"[ -x /usr/bin/raspi-config ] && raspi-config nonint do_wifi_country {network.country}"
    return [f"rfkill unblock wifi\n{words}\n"]


def _network_files(network: DeviceNetwork) -> list[str]:
    """NetworkManager's files for a static address and for a wireless network."""
    shell = []
    manual = f"method=manual\naddress1={network.address}"
    if network.gateway:
        manual += f",{network.gateway}"
    if network.dns:
        manual += f"\ndns={''.join(f'{server};' for server in network.dns)}"
    address = manual if network.address != DHCP else "method=auto"
    if network.ssid:
        hidden = "hidden=true\n" if network.hidden else ""
        # Key files lose blanks at the ends of a name, "83;83;73;" in them are bytes, and a
        # backslash begins an escape: anything but plain words stands there as such bytes.
        ssid, kind, key = network.ssid, "wpa-psk", ""
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", ssid):
            ssid = "".join(f"{byte};" for byte in ssid.encode())
        if network.security == "wpa3":
            kind, key = "sae", network.passphrase.replace("\\", "\\\\").replace(" ", "\\s")
        elif network.security != "open":
            key = network.psk
        secret = f"[wifi-security]\nkey-mgmt={kind}\npsk={key}\n\n" if key else ""
        lines = (
            "[connection]\nid=edgetrain-wifi\ntype=wifi\n\n[wifi]\nmode=infrastructure\n"
            f"ssid={ssid}\n{hidden}\n{secret}[ipv4]\n{address}\n"
        )
        shell.append(_nm("edgetrain-wifi", lines))
    elif network.address != DHCP:
        lines = f"[connection]\nid=edgetrain-cable\ntype=ethernet\n\n[ipv4]\n{address}\n"
        shell.append(_nm("edgetrain-cable", lines))
    return shell


def _nm(name: str, text: str) -> str:
    return _here(f"/etc/NetworkManager/system-connections/{name}.nmconnection", "0600", text)


def _here(path: str, mode: str, text: str) -> str:
    return f"install -D -m {mode} /dev/stdin {shlex.quote(path)} << 'EDGETRAIN'\n{text}EDGETRAIN\n"


# -- rpi-preseed ---------------------------------------------------------------------------------


def _preseed(device: Personal) -> str:
    """The file for rpi-preseed, in version 1.1 of its format. No secret: the program rewrites the
    file, and what it cuts out would stay in free clusters.

    Only the early commands run for certain: those of the late phase wait for a clock, which
    devices without a route to the Internet never have. They get 30 s in all; no brackets in them,
    the first versions' parser ended an array there.
    """
    return f"""\
config_version = "1.1"

[system]
hostname = "{device.name}"

[user]
name = "{device.user}"
passwordless_sudo = true

[runcmd]
early = ["bash {BOOT}/{SETUP}"]
early_cmd_timeout = 25
"""


def _preseed_setup(device: Personal) -> str:
    """The early command: before the network is up, in a system that is booting."""
    parts = [
        "#!/bin/bash\nset +e\n",
        *_script(device),
        "systemctl daemon-reload\n"
        f"systemctl enable {UNIT}\n"
        f"systemctl start --no-block ssh {UNIT}\n",
        *_country(device.network),  # last: it is the slowest
        "sync\nexit 0\n",
    ]
    return "".join(parts)
