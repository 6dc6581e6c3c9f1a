#!/usr/bin/env bash
# netplan 1.1.2 of Debian 13: a wireless network given by its 64-digit key (what WPA2 makes of name
# and passphrase) and not by the passphrase. SAE, which is WPA3, computes with the passphrase: none
# can be had from the key. The supplicant's file permits SAE all the same, in the words that it has
# for a passphrase: an access point that offers WPA2 and WPA3 and a radio that knows SAE may agree
# on what the device cannot do. With `key-management: psk` beside the key it permits WPA2 alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir -p apt/lists/partial apt/cache/archives/partial plan/etc/netplan
if [ -s /etc/apt/sources.list.d/debian.sources ]; then
  sed 's/bookworm/trixie/g' /etc/apt/sources.list.d/debian.sources > apt/debian.sources
else
  sed 's/bookworm/trixie/g' /etc/apt/sources.list > apt/debian.list
fi
: > apt/status
options=(-qq -o Dir::Etc::sourcelist=- -o Dir::Etc::sourceparts="$folder/apt" -o APT::Sandbox::User=root
  -o Dir::State::lists="$folder/apt/lists" -o Dir::Cache="$folder/apt/cache"
  -o Dir::State::status="$folder/apt/status" -o Debug::NoLocking=1)
apt-get "${options[@]}" update 2> said || { cat said; exit 1; }
apt-get "${options[@]}" install -y --download-only --no-install-recommends \
  netplan-generator=1.1.2-7 libnetplan1=1.1.2-7 > said 2>&1 || { cat said; exit 1; }
for package in apt/cache/archives/*.deb; do dpkg -x "$package" tree; done
libraries=tree/usr/lib/$(uname -m)-linux-gnu
cat > plan/etc/netplan/50.yaml <<'YAML'
network:
  version: 2
  wifis:
    wlan0:
      access-points:
        passphrase: {password: "correct horse"}
        key: {password: "ef19363fdf4ffa913a3226df0867dcc1860fa14abb490c6ff6a86c441b2d7b1e"}
        psk: {auth: {key-management: psk,
          password: "ef19363fdf4ffa913a3226df0867dcc1860fa14abb490c6ff6a86c441b2d7b1e"}}
YAML
chmod 600 plan/etc/netplan/50.yaml
"$(echo "$libraries"/ld-linux-*.so.*)" --library-path "$libraries:$libraries/systemd" \
  tree/usr/libexec/netplan/generate --root-dir "$folder/plan"
python3 - <<'PYTHON'
from pathlib import Path

networks = Path("plan/run/netplan/wpa-wlan0.conf").read_text().split("network={")[1:]
assert len(networks) == 3
for network in networks:
    lines = dict(line.strip().split("=", 1) for line in network.splitlines() if "=" in line)
    print(f"{lines['ssid']}: key_mgmt={lines['key_mgmt']} psk={lines['psk'][:12]}…")
    expected = "WPA-PSK" if "psk" in lines["ssid"] else "WPA-PSK WPA-PSK-SHA256 SAE"
    assert lines["key_mgmt"] == expected, lines
PYTHON
