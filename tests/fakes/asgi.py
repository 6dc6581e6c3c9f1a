"""Ask an ASGI application, without a server: a request and its answer, or a stream of messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def scope_of(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        "headers": [(key.lower().encode(), value.encode()) for key, value in headers.items()],
    }  # fmt: skip


async def ask(
    app, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", **scope: Any
) -> Answer:
    """One request, to the end of its answer."""
    sent: list[dict[str, Any]] = []
    told = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return told.pop() if told else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope_of(method, path, headers) | scope, receive, send)
    start = sent[0]
    found = {key.decode(): value.decode() for key, value in start["headers"]}
    return Answer(start["status"], found, b"".join(each.get("body", b"") for each in sent[1:]))


async def stream(app, path: str, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The parts of an answer that does not end, until the reader stops."""
    parts: asyncio.Queue[bytes] = asyncio.Queue(1)
    left = asyncio.Event()

    async def receive():
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            await parts.put(message["body"])

    task = asyncio.create_task(app(scope_of("GET", path, headers), receive, send))
    try:
        while True:
            yield await parts.get()
    finally:
        left.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
