"""The cluster file that `edgetrain devices init` writes: every key, explained."""

from __future__ import annotations

_HEAD = """\
# The machines of a fleet. `edgetrain devices flash {name}` writes a card for each device.
# Paths are relative to this file. docs/how-to/flashing.md

[hub]
# Where devices look for the hub; they take the first that answers.
addresses = ["tcp://192.168.1.5:5555"]

[image]
# A stock image: .img, or packed as .xz, .gz or .zst.
file = "2025-12-04-raspios-trixie-arm64-lite.img.xz"
# sha256 = "…"                # of the file, or of what is in it; default: FILE.sha256 beside it
# bmap = "…"                  # its block map; default: FILE.bmap beside it, if there is one

# [wifi]                      # left out: devices are on a cable
# ssid = "lab"
# country = "DE"              # two capital letters: a Pi's radio stays off without it
# secret = "file:lab.psk"     # (chmod 600), "env:NAME" or "ask". The passphrase never stands here.
# security = "wpa2"           # or "wpa3", or "open", which has no secret
# hidden = false              # true: the network does not send its name

# [system]                    # left out: as the image has it
# timezone = "Europe/Berlin"
# locale = "en_GB.UTF-8"
# first_window = 30             # segments that TCP begins with, not ten: docs/reference/networks.md
# receive_kb = 1000             # first receive buffer of TCP, not 131
# dns = ["192.168.1.1"]       # for devices with an address of their own

[ssh]
user = "fleet"                # every device has this user, who may use sudo without a password
keys = ["~/.ssh/id_ed25519.pub"]

[job]
file = "job.toml"             # with fleet.members = {count} and fleet.device = "host"
# data = "folder"             # copied to every device; the job's data.folder then points there:
#                             # digits needs one with digits.csv.gz, char_lm needs none
# bundle = "my.bundle"        # the job's own code (`edgetrain bundle make`); allowed on the devices
"""

_DEVICE = """
[[device]]
name = "{name}"                 # its host name; its place in this list is its --index
profile = "{profile}"   # see `edgetrain devices list`
address = "dhcp"              # or with the length of the network: "192.168.1.20/24"
# gateway = "192.168.1.1"     # only with an address of its own
# max_celsius = 75            # its member lengthens its steps to stay below
# role = "hub"                # or "gateway", without a member (docs/how-to/devices-at-work.md)
# site = "barn"               # of a gateway, and of the members that join it
"""


def example(name: str, count: int, profile: str) -> str:
    """A cluster file called `name`, for `count` devices of one kind."""
    devices = (_DEVICE.format(name=f"pi-{i}", profile=profile) for i in range(count))
    return _HEAD.format(name=name, count=count) + "".join(devices)
