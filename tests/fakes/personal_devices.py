"""One device on each kind of network that a card can be written for."""

from __future__ import annotations

from edgetrain.provisioning.cards import personal

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@host"
NETWORKS = {
    "dhcp": personal.DeviceNetwork(),
    "static": personal.DeviceNetwork("192.168.1.20/24", "192.168.1.1"),
    "wifi": personal.DeviceNetwork(ssid="lab & 'co'", country="DE", passphrase="correct horse"),
    "wifi-hidden": personal.DeviceNetwork(
        "192.168.1.20/24", "", "lab", "DE", "correct horse", hidden=True, dns=("192.168.1.1",)
    ),
    "wifi-open": personal.DeviceNetwork(ssid="lab", country="DE", security="open"),
    "wifi-wpa3": personal.DeviceNetwork(
        ssid="lab", country="DE", passphrase="a \\ b $c 'd", security="wpa3"
    ),
    "wifi-static": personal.DeviceNetwork("192.168.1.20/24", "", "lab", "DE", "correct horse"),
}


def device(network: str = "wifi", nonce: bytes = b"\1\2\3\4") -> personal.Personal:
    instance = personal.instance_id("pi-0", nonce)
    place = ("Europe/Berlin", "en_GB.UTF-8") if network == "wifi-open" else ()
    return personal.Personal("pi-0", "fleet", (KEY,), NETWORKS[network], instance, *place)
