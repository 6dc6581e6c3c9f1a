"""Listen, say where, serve until Ctrl-C. One process, one thread, the lowest priority but ten.

Loopback alone, unless an address is asked for; then TLS, or the word that it may be without.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from edgetrain.errors import ConfigError, explain_os_errors, require
from edgetrain.files.reading import OTHERS_READ, read_guarded
from edgetrain.runs.dashboard.app import Tell, application
from edgetrain.runs.dashboard.guard import Guard
from edgetrain.runs.dashboard.hall import Hall
from edgetrain.runs.dashboard.listener import MOST_STRANGERS, LimitedListener
from edgetrain.runs.looking import NICE, when_stdin_ends

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class ListensAt:
    """A listening address and its options."""

    bind: str
    """HOST:PORT; port 0: any free one."""
    tls: tuple[Path, Path] | None = None
    """Files of a certificate and its key."""
    insecure: bool = False
    """Whether other machines may come without TLS."""
    token: Path | None = None
    """File with the token; None: a new one at each start."""
    proxied: tuple[str, ...] = ()
    """HOST or HOST:PORT as browsers have it that come through a proxy."""


def serve(
    root: Path,
    place: ListensAt,
    say: Callable[[str], None],
    *,
    until_stdin_ends: bool = False,
    tell: Tell | None = None,
) -> None:
    """Serve the runs below `root`; `say` is given the address, once it is open. `tell` gives the
    orders of a page to the hub of a run; None: the page only looks. ConfigError for what cannot
    be."""
    require("the dashboard", "dashboard", "starlette", "uvicorn")
    import uvicorn

    for name in place.proxied:
        if not re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?", name, re.ASCII):
            raise ConfigError(f"--name {name}: no HOST or HOST:PORT", "as in a browser's address")
    hall = Hall(root)
    host, listener = _listen(place)
    with listener:
        port = listener.getsockname()[1]
        _check_tls(place)
        if tell is not None and place.tls is None and not _is_loopback(listener):
            raise ConfigError(
                f"--control at {host} without --tls: whoever is on the way could end the job",
                "--tls CERT KEY; or take 127.0.0.1 and `ssh -L`",
            )
        names = LOOPBACK if _is_loopback(listener) else (*LOOPBACK, host, "*")
        guard = Guard(
            application(hall, tell), names, secure=place.tls is not None,
            token=_token(place.token), proxied=place.proxied, listener=listener,
        )  # fmt: skip
        only = hall.only()
        shown = f"[{host}]" if ":" in host else host
        scheme = "https" if place.tls else "http"
        say(f"{scheme}://{shown}:{port}/#token={guard.token}" + (f"&run={only}" if only else ""))
        os.nice(NICE)
        cert, key = place.tls or (None, None)
        config = uvicorn.Config(
            guard, log_config=None, log_level="critical", lifespan="off", ws="none", http="h11",
            loop="asyncio", server_header=False, proxy_headers=False, backlog=MOST_STRANGERS,
            timeout_graceful_shutdown=1,
            ssl_certfile=cert, ssl_keyfile=key, ssl_keyfile_password="" if key else None,
        )  # fmt: skip
        server = uvicorn.Server(config)
        if until_stdin_ends:

            def end() -> None:
                server.should_exit = True

            when_stdin_ends(end)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def _listen(place: ListensAt) -> tuple[str, LimitedListener]:
    """The name of the host as it was given, and a socket that is bound."""
    try:
        parts = urlsplit(f"//{place.bind}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host or port is None:
        raise ConfigError(f"--bind {place.bind} is no address", "HOST:PORT, as in 127.0.0.1:8750")
    with explain_os_errors(f"--bind {place.bind}", "name this machine"):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_local = ipaddress.ip_address(str(address[0])).is_loopback
    if not is_local and place.tls is None and not place.insecure:
        raise ConfigError(
            f"{host} can be reached by other machines, which could read what the browser is sent",
            "--tls CERT KEY encrypts it; --insecure does without; or take 127.0.0.1 and `ssh -L`",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(MOST_STRANGERS)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {place.bind}: {error.strerror}",
            f"another port, as in --bind {host}:0 for any free one",
        ) from None
    return host, LimitedListener(listener)


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        token = read_guarded(path, 4096, OTHERS_READ).strip()
    except FileNotFoundError:
        raise ConfigError(f"--token {path}: there is no such file", "it has the token") from None
    if not re.fullmatch(r"[\w.~-]{20,}", token, re.ASCII):
        raise ConfigError(
            f"--token {path}: a token has 20 or more letters, digits, '.', '_', '~' and '-'",
            "python -c 'import secrets; print(secrets.token_urlsafe())' prints one",
        )
    return token


def _check_tls(place: ListensAt) -> None:
    if place.tls is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(*place.tls, password="")
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        if isinstance(error, ssl.SSLError):  # its words are OpenSSL's
            mixed = error.reason == "KEY_VALUES_MISMATCH"
            said = "this key is of another certificate" if mixed else "cannot be read"
        raise ConfigError(
            f"--tls {place.tls[0]} {place.tls[1]}: {said}",
            "a certificate and its key, both PEM, the key without a password",
        ) from None
