"""What the dashboard answers: the page's files, the list of runs, and a stream for each run.

Where it may act, it hands orders on to the hub of a run.

Reading runs, and telling many readers of one run what one look has found. Who may ask: `guard`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.errors import EdgetrainError
from edgetrain.runs.dashboard import gauges
from edgetrain.runs.dashboard.follow import Following
from edgetrain.runs.dashboard.guard import Asgi
from edgetrain.runs.dashboard.hall import Hall
from edgetrain.runs.reports import units
from edgetrain.runs.reports.live.watch import RunState
from edgetrain.runs.reports.page.document import PATTERNS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LOOK_S = 0.5
"""Seconds between two looks at a run."""

SHARE_OF_A_CORE = 0.045
"""Most of one core that looking at a run takes; a longer pause follows a look that took long."""

BEAT_S = 15.0
"""Seconds until a stream without news sends a line, to notice readers that are gone."""

MOST_READERS = 64
UNENDED = ("no summary", "damaged")
MOST_PARTS = 16
"""Parts of a run's file (CHUNK_BYTES each) that are read for one answer to /metrics."""

MOST_FOLLOWED = 8
"""Runs that are kept in memory after their last reader has gone."""

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


ORDERS = {"pause": 0, "resume": 0, "stop": 0, "remove": 1}
"""Orders of a page to a hub, with their number of words: it can send no others."""

MOST_ORDER_BYTES = 4096

Tell = Callable[[Path, list[str]], dict[str, Any]]
"""Gives an order to the hub of a run folder; its answer. EdgetrainError where it cannot be."""


class Channel:
    """One run and its readers. It is looked at while there are any."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self.readers = 0
        self._task: asyncio.Task[None] | None = None
        self._fresh = asyncio.Event()

    async def messages(self) -> AsyncIterator[bytes]:
        """Server-sent events, each with the sections that are new to this reader. A slow reader
        misses versions, and costs no memory. `id` is the time at which it was sent."""
        seen: dict[str, int] = {}
        self.readers += 1
        self._task = self._task or asyncio.create_task(self._look())
        try:
            yield b"retry: 2000\n\n"
            beat = time.monotonic() + BEAT_S
            while True:
                fresh, found = self._fresh, self._following.since(seen)
                if found or time.monotonic() >= beat:
                    about = b"id: %.6f\ndata: %s" % (time.time(), found) if found else b": here"
                    yield about + b"\n\n"
                    beat = time.monotonic() + BEAT_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(fresh.wait(), BEAT_S)
        finally:
            self.readers -= 1
            if not self.readers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def state(self) -> RunState | str:
        """The run as it is now, or why not. It is looked at for this where nobody follows it: a
        part of a long file, which is gone on with when it is asked for again."""
        for _ in range(MOST_PARTS):
            if self.readers:
                break
            self._following.tick(time.time())
            if not self._following.is_behind:
                break
            await asyncio.sleep(0)
        return self._following.state()

    async def _look(self) -> None:
        while True:
            began = time.thread_time()
            self._following.tick(time.time())
            took = time.thread_time() - began
            fresh, self._fresh = self._fresh, asyncio.Event()
            fresh.set()
            # What is there already is read at half a core's speed, then as often as it may.
            behind = self._following.is_behind
            await asyncio.sleep(took if behind else max(LOOK_S, took / SHARE_OF_A_CORE))


class Desk:
    """Everything that is asked: the list, and streams of runs."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._channels: dict[str, Channel] = {}

    def rows(self) -> dict[str, Any]:
        return {"runs": self._hall.rows()}

    async def states(self) -> list[tuple[str, RunState | str]]:
        """The ids of the newest runs without an end, MOST_FOLLOWED at most, and `Channel.state`, or
        why there is none."""
        rows = await asyncio.to_thread(self._hall.rows)
        states: list[tuple[str, RunState | str]] = []
        for row in [row for row in rows if row["status"] in UNENDED][:MOST_FOLLOWED]:
            channel = None if row["why"] else self.channel(row["id"])
            gone = row["why"] or "it is gone"
            states.append((row["id"], gone if channel is None else await channel.state()))
        return states

    def channel(self, name: str) -> Channel | None:
        """The channel of the run with this id; None: there is no such run."""
        if name not in self._channels:
            folder = self._hall.find(name)
            if folder is None:
                return None
            idle = [key for key, each in self._channels.items() if not each.readers]
            for key in idle[: max(0, len(self._channels) - MOST_FOLLOWED)]:
                del self._channels[key]
            self._channels[name] = Channel(Following(folder))
        return self._channels[name]

    @property
    def readers(self) -> int:
        return sum(channel.readers for channel in self._channels.values())


def page_files(*, acts: bool = False) -> dict[str, tuple[str, bytes]]:
    """The page's own files: name -> (type, content). The style sheet of reports is one of them.
    `acts`: the page has buttons."""
    here, report = files(__package__).joinpath("page"), "edgetrain.runs.reports.page"
    found = {each.name: each.read_bytes() for each in here.iterdir()}
    found["report.css"] = files(report).joinpath("page.css").read_bytes()
    found["index.html"] = found["index.html"].replace(b"<!-- patterns -->", PATTERNS.encode())
    if acts:
        found["index.html"] = found["index.html"].replace(b"<body>", b'<body class="acts">')
    return {
        name: (TYPES[suffix], content)
        for name, content in found.items()
        if (suffix := "." + name.rpartition(".")[2]) in TYPES
    }


def words_of(body: bytes) -> list[str] | None:
    """The words of an order, ["remove", "m3"]; None: it is none that a page may give.

    >>> words_of(b'["pause"]'), words_of(b'["hubs", "add", "tcp://x:1"]')
    (['pause'], None)
    """
    try:
        words = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return words if words and ORDERS.get(words[0]) == len(words) - 1 else None


async def _body(request: Request) -> bytes:
    """b"" for one that is too long: no more of it is taken in."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_ORDER_BYTES:
            return b""
    return body


def _teller(hall: Hall, tell: Tell | None) -> Callable[[Request], Awaitable[Response]]:
    from starlette.responses import JSONResponse

    one_at_a_time = asyncio.Semaphore()

    def refused(status: int, why: str, way_out: str = "") -> Response:
        return JSONResponse(
            {"error": units.printable(why), "hint": units.printable(way_out)}, status
        )

    async def told(request: Request) -> Response:
        if tell is None:
            return refused(403, "this dashboard only looks", "start it with --control")
        words, folder = words_of(await _body(request)), hall.find(request.path_params["name"])
        if words is None:
            return refused(400, "no such order", ", ".join(ORDERS))
        if folder is None:
            return refused(404, "no such run")
        if one_at_a_time.locked():
            return refused(503, "another order waits for its answer", "try it again")
        async with one_at_a_time:
            try:
                return JSONResponse(await asyncio.to_thread(tell, folder, words))
            except EdgetrainError as error:
                return refused(409, error.message, error.hint)

    return told


def application(hall: Hall, tell: Tell | None = None) -> Asgi:
    """The application, without a guard. `tell` gives orders; None: it only looks."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    desk, own = Desk(hall), page_files(acts=tell is not None)

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in own:
            return Response("no such file\n", 404)
        kind, content = own[name]
        return Response(content, media_type=kind)

    async def runs(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(desk.rows))

    async def metrics(_: Request) -> Response:
        return Response(gauges.exposition(await desk.states()), media_type=gauges.TYPE)

    async def stream(request: Request) -> Response:
        if desk.readers >= MOST_READERS:
            return JSONResponse({"error": f"{MOST_READERS} readers are enough"}, 503)
        channel = desk.channel(request.path_params["name"])
        if channel is None:
            return JSONResponse({"error": "no such run"}, 404)
        at_once = {"X-Accel-Buffering": "no"}  # a proxy hands on each message as it comes
        return StreamingResponse(channel.messages(), 200, at_once, "text/event-stream")

    app: Asgi = Starlette(
        routes=[
            Route("/", page),
            Route("/page/{name}", page),
            Route("/runs", runs),
            Route("/metrics", metrics),
            Route("/stream/{name:path}", stream),
            Route("/control/{name:path}", _teller(hall, tell), methods=["POST"]),
        ]
    )
    return app
