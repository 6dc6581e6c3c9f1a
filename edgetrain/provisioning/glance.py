"""A glance at a device: what it has and how it is, asked by a few lines of shell.

`devices status` looks at many boards at once and again and again: a start of Python on each would
take longer than all else, on a small board a second. Needs no root, and changes nothing. What a
device answers is read like anything from the network: within limits, and nothing in it is trusted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from edgetrain.files.reading import parse_json
from edgetrain.fleet.devices.health import hottest, throttled, under_voltage
from edgetrain.fleet.ssh import Remote, SshAnswer, SshHost
from edgetrain.provisioning.cards.first_boot import HUB_UNIT, KEYS, UNIT, UNITS
from edgetrain.provisioning.keeper import MESSAGES, SHOWN, protocol_in, unit_of

_LOOK = f"""\
say() {{ x=; [ -r "$2" ] && IFS= read -r x < "$2"; printf '%s %s\\n' "$1" "$x"; }}
slots=$1opt/edgetrain
s=$(readlink "$slots/current")
echo "slot $s"
say version "$slots/$s.json"
for each in "$slots/$s"/edgetrain-*.dist-info; do echo "dist ${{each##*/}}"; done
grep -m 1 '^PROTOCOL = ' "$slots/$s/{MESSAGES}" 2> /dev/null
say set "$1etc/edgetrain/current/set.json"
say trial "$slots/trial.json"
say outcome "$slots/outcome.json"
unit={UNIT}; [ -e "$1{UNITS}/{HUB_UNIT}" ] && unit={HUB_UNIT}
echo "name $unit"
wanted=$1{UNITS}/multi-user.target.wants/$unit  # made last, once a hub has let it in
if [ -e "$1{KEYS}/hubs" ] || [ -L "$wanted" ]; then echo enrolled yes; fi
systemctl show "$unit" {" ".join(f"--property={name}" for name in SHOWN)}
for zone in "$1"sys/class/thermal/thermal_zone*; do
  kind=; [ -r "$zone/type" ] && IFS= read -r kind < "$zone/type"
  say zone "$zone/temp"; echo "kind $kind"
done
flags=
for each in "$1"sys/devices/platform/*firmware/get_throttled \\
    "$1"sys/devices/platform/*/*firmware/get_throttled; do
  [ -r "$each" ] && say flags "$each" && flags=$each
done
if [ -z "$flags" ] && command -v vcgencmd > /dev/null; then
  vcgencmd get_throttled 2> /dev/null | tr = ' '
fi
python=$(readlink -f "$(command -v python3)")
case $python in *python3.*) echo "python 3.${{python##*python3.}}";;
  *) python3 -I -S -c 'import sys; print("python %d.%d" % sys.version_info[:2])';; esac
printf 'machine '; uname -m
date '+clock %s%3N'
[ -e "$slots" ] || slots=${{1:-.}}
df -P -k "$slots"
"""


def look(remote: Remote, host: SshHost, root: str, seconds: float) -> dict[str, Any] | SshAnswer:
    """What a device says, within this many seconds, or the answer that says why it does not. root:
    the device's root, as the other side sees it."""
    answer = remote.run(host, ["sh", "-c", _LOOK, "sh", root], seconds=seconds)
    found = None if answer.trouble else _read(answer.text)
    if found is None:
        return answer if not answer.ok else SshAnswer(1, stderr="it answered something else")
    return found


def _read(text: str) -> dict[str, Any] | None:
    """The facts in an answer; None: it is none."""
    lines = text.splitlines()
    pairs = [line.partition(" ")[::2] for line in lines]
    said = dict(pairs)
    machine, disk = said.get("machine", ""), lines[-1].split() if lines else []
    free, clock = _whole(disk[3]) if len(disk) > 3 else None, _whole(said.get("clock", ""))
    if free is None or clock is None or not machine:
        return None
    zones = [value for key, value in pairs if key == "zone"]
    kinds = [value for key, value in pairs if key == "kind"]
    heat = [(k, t) for k, z in zip(kinds, zones, strict=False) if (t := _whole(z)) is not None]
    bits = _whole(said.get("flags") or said.get("throttled", ""), base=16)
    version, trial = _table(said.get("version", "")), _table(said.get("trial", ""))
    if (info := said.get("dist", "")).endswith(".dist-info") and "*" not in info:
        version.setdefault("edgetrain", info[10:-10])  # as its card was flashed
    return {
        "slot": said.get("slot", ""),
        "version": version,
        "protocol": protocol_in(text),
        "set": _table(said.get("set", "")),
        "trial": {"phase": "", "strict": False, **trial} if trial else None,
        "outcome": _table(said.get("outcome", "")),
        "is_hub": said.get("name") == HUB_UNIT,
        "unit": dataclasses.asdict(unit_of(text)),
        "enrolled": said.get("enrolled") == "yes",
        "machine": machine,
        "python": said.get("python", ""),
        "celsius": hottest(heat),
        "throttled": throttled(bits),
        "under_voltage": under_voltage(bits),
        "disk_free_bytes": free << 10,
        "clock": clock / 1000,
    }


def _table(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text.encode())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _whole(text: str, base: int = 10) -> int | None:
    try:
        return int(text[:20], base)
    except ValueError:
        return None
