"""SSH host keys of devices: read, shown, and written as OpenSSH's known_hosts wants them.

A device makes its host key at its first boot and sends the public half with its enrolment, so that
nobody has to trust whatever answers the first `ssh`. No private half is ever read here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable

from edgetrain.errors import ConfigError

LONGEST = 1024
"""Characters of a public key: RSA with 4096 bits has 724."""

_KINDS = "ssh-ed25519|ecdsa-sha2-nistp256|ecdsa-sha2-nistp384|ecdsa-sha2-nistp521|ssh-rsa"
_LINE = re.compile(rf"({_KINDS}) ([A-Za-z0-9+/]+={{0,2}})( [^\n]*)?\n?\Z")


def read_host_key(text: str, what: str = "this text") -> str:
    """A public host key without its comment. ConfigError says `what` is wrong, not the text."""
    if "PRIVATE KEY" in text[:LONGEST]:
        raise ConfigError(f"{what} is a private key", "the public half is in the file …_key.pub")
    found = _LINE.match(text) if len(text) <= LONGEST else None
    blob = _decode(found[2]) if found else b""
    if found is None or not blob.startswith(_name(found[1])):
        raise ConfigError(
            f"{what} is not an SSH public key",
            f"one line of at most {LONGEST} characters, as in /etc/ssh/ssh_host_ed25519_key.pub",
        )
    return f"{found[1]} {found[2]}"


def fingerprint(host_key: str) -> str:
    """As `ssh-keygen -l` shows it: "SHA256:…"."""
    digest = hashlib.sha256(_decode(host_key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def known_hosts_line(names: Iterable[str], host_key: str) -> str:
    """A line of known_hosts: all these names have this key."""
    return f"{','.join(names)} {host_key}\n"


def _name(kind: str) -> bytes:
    return len(kind).to_bytes(4, "big") + kind.encode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""
