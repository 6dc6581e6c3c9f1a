"""Who may look: checked before anything is read. Plain ASGI.

- The Host of a request is one that this server is known by: a name of somebody else's that was made
  to point here (DNS rebinding) is refused. A port says nothing: a tunnel has its own.
- An Origin, where a browser sends one, is this server's own, or one that its owner has named: a
  proxy's. What a proxy adds about a request (X-Forwarded-*) is not read: anybody can write it.
- What is not one of the page's own files needs the cookie. It is given for the token of the printed
  address, whose fragment no browser sends: the page's script hands it over and takes it out of the
  address. The cookie is HttpOnly and SameSite=Strict, and is not the token.
- A POST has an Origin, and the header X-Edgetrain, which another page cannot send without
  asking first.
- Every answer says that nothing but this server's files may run in it, and that no other page may
  frame, embed or keep it.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from edgetrain.runs.dashboard.listener import LimitedListener

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Guard:
    """Lets requests through to an application, or answers why not."""

    def __init__(
        self,
        app: Asgi,
        names: Iterable[str],
        *,
        secure: bool,
        token: str = "",
        proxied: Iterable[str] = (),
        listener: LimitedListener | None = None,
    ) -> None:
        """`names`: of this server at any port, "*": each IP address; `proxied`: HOST or HOST:PORT
        as browsers have it that come through a proxy. `secure`: it speaks TLS. `token`: "": a new
        one. `listener` is told who asks."""
        self._app, self._secure, self._listener = app, secure, listener
        self._names = frozenset(name.lower() for name in names)
        self._proxied = frozenset(name.lower() for name in proxied)
        self.token = token or secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        many = [key for key, _ in scope["headers"] if key in (b"host", b"origin")]
        if self._listener is not None:
            is_in = self._has_token(headers) or self._has_session(headers)
            (self._listener.came_in if is_in else self._listener.asked)(scope["client"])
        if why := self._why_not(scope, headers, many):
            await _answer(guarded, *why)
        elif scope["path"] == "/enter":
            await self._enter(headers, guarded)
        else:
            await self._app(scope, receive, guarded)

    def _why_not(
        self, scope: Scope, headers: dict[str, str], many: list[bytes]
    ) -> tuple[int, str] | None:
        """Status and words of a refusal; None: it may be."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if len(set(many)) < len(many) or not self._is_named(host):
            way_out = f"open the address that it printed, or, if it is yours, --name {host[:100]}"
            return 421, f"this is not a name of this server: {way_out}"
        if origin is not None and not self._is_own(origin.lower(), host.lower()):
            name = origin.partition("://")[2][:100]
            way_out = f": if {origin[:100]} is a proxy's, and yours, --name {name}" if name else ""
            return 403, f"another page may not ask{way_out}"
        if scope["method"] == "POST":
            if "x-edgetrain" not in headers or origin is None:
                return 403, "a POST needs the header X-Edgetrain and an Origin"
        elif scope["method"] not in ("GET", "HEAD"):
            return 405, "GET or POST"
        if scope["path"] == "/enter":
            return None if scope["method"] == "POST" else (405, "POST the token")
        is_open = scope["path"] == "/" or scope["path"].startswith("/page/")
        if scope["path"] == "/metrics":  # read by a program that is given the token, and no cookie
            is_open = self._has_token(headers)
        if not is_open and not self._has_session(headers):
            return 401, "open the address that `edgetrain dashboard` printed"
        return None

    def _is_own(self, origin: str, host: str) -> bool:
        scheme, _, authority = origin.partition("://")
        if authority in self._proxied:  # TLS may be the proxy's
            return scheme in ("http", "https")
        return authority == host and scheme == ("https" if self._secure else "http")

    def _is_named(self, host: str) -> bool:
        host = host.lower()
        name, _ = _split(host)
        if name in self._names or host in self._proxied:
            return True
        # A name can be made to point anywhere; an address is what it is.
        return "*" in self._names and _is_address(name.strip("[]"))

    def _has_session(self, headers: dict[str, str]) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(_cookie(headers))
        except CookieError:
            return False
        return found is not None and _same(found.value, self._session)

    def _has_token(self, headers: dict[str, str]) -> bool:
        return _same(headers.get("authorization", ""), f"Bearer {self.token}")

    async def _enter(self, headers: dict[str, str], send: Send) -> None:
        if not self._has_token(headers):
            await _answer(send, 401, "this is not the token of the server that runs now")
            return
        secure = "; Secure" if headers["origin"].lower().startswith("https:") else ""
        # Without a path it is for the folder of /enter, below which a proxy may have this server.
        cookie = f"{_cookie(headers)}={self._session}; HttpOnly; SameSite=Strict{secure}"
        await _answer(send, 200, "come in", [(b"set-cookie", cookie.encode())])


def _split(host: str) -> tuple[str, str]:
    """Name and port; the port is "" where there is none."""
    name, _, port = host.rpartition(":")
    return (name, port) if name and port.isdecimal() else (host, "")


def _cookie(headers: dict[str, str]) -> str:
    """Its name: a browser keeps one jar for all ports of a host."""
    return f"edgetrain-{_split(headers.get('host', ''))[1]}"


def _same(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(), known.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _answer(
    send: Send, status: int, words: str, more: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *(more or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words.encode() + b"\n"})
