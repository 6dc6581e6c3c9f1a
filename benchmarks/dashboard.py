"""The dashboard in Debian's headless Chromium: how soon a message is painted, and what it costs.

    python benchmarks/dashboard.py                    1,000 members, two updates a second: a minute
    python benchmarks/dashboard.py --updates 10000    and the page's memory after so many: minutes
    python benchmarks/dashboard.py --readers 10       and a hub's rounds with and without readers

A fleet is made up: a thread appends a line for every other member twice a second. Two pages of a
browser read the same stream in turns: the dashboard with its fleet in view, and a bare page that
paints one number of each message. A message's time begins when the server sends it and ends after
the frame that shows it. For --updates few members change at a time, as often as the server looks.
For --readers one job trains, emulated: its rounds while nobody reads, while all do, while nobody
does, and so on; the two without readers say what the machine's noise is. Needs `chromium` (apt)
and the extra `dashboard`. Prints one JSON object, and how far it is to standard error.
With `--pictures FOLDER` also screenshots, light and dark, wide and narrow.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from edgetrain.runs.folder import metrics_path, write_job
from edgetrain.runs.metrics.lines import Follower, Record, format_line

Page = Callable[..., dict[str, Any]]
BEAT_S = 0.5
TURNS = 3

MEASURE = """
(() => {
  const Plain = window.EventSource, took = window.took = [];
  window.updates = 0;
  window.EventSource = class extends Plain {
    constructor(address) {
      super(address);
      this.addEventListener("message", message => {
        const sent = 1000 * Number(message.lastEventId);
        requestAnimationFrame(() => {
          const painted = new MessageChannel();
          painted.port1.onmessage = () => {
            took[window.updates++ % 1000] = performance.timeOrigin + performance.now() - sent;
          };
          painted.port2.postMessage(0);
        });
      });
    }
  };
  window.EventSource.CLOSED = Plain.CLOSED;
})()
"""
BARE = """
(() => {
  document.body.textContent = "";
  const number = document.body.appendChild(document.createElement("p"));
  new EventSource("/stream/%s").addEventListener("message", message => {
    const run = JSON.parse(message.data).run;
    if (run) number.textContent = run.step;
  });
})()
"""


class Chromium:
    """A headless browser, spoken to over two pipes."""

    def __init__(self, profile: str) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()

        def lay_pipes() -> None:
            # First out of the way of 3 and 4, whichever numbers the pipes have.
            ends = theirs_in, theirs_out
            one, other = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
            os.dup2(one, 3)
            os.dup2(other, 4)

        self._process = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            close_fds=False, preexec_fn=lay_pipes, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._rest = itertools.count(1), b""

    def call(self, method: str, session: str | None, **parameters: Any) -> dict[str, Any]:
        """Do it, and wait for the answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                if not (read := os.read(self._from, 1 << 20)):
                    raise SystemExit("chromium has ended")
                self._rest += read
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found

    def page(self) -> Page:
        """A new page, which measures the streams that it reads."""
        target = self.call("Target.createTarget", None, url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", None, targetId=target, flatten=True)
        session = attached["sessionId"]

        def page(method: str, **parameters: Any) -> dict[str, Any]:
            return self.call(method, session, **parameters)

        page("Page.enable")
        page("Page.addScriptToEvaluateOnNewDocument", source=MEASURE)
        return page

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def value(page: Page, expression: str) -> Any:
    """What a page says."""
    found = page("Runtime.evaluate", expression=expression, returnByValue=True)
    return found["result"].get("value")


def feed(
    folder: Path, members: int, over: threading.Event, heartbeat_s: float = BEAT_S, apart: int = 2
) -> None:
    """Append a line for every `apart`-th member every `heartbeat_s`, in turn: five steps each."""
    rnd, began = random.Random(1), time.monotonic()
    with metrics_path(folder).open("ab", buffering=0) as file:
        for beat in itertools.count(1):
            t, lines = round(time.monotonic() - began, 3), []
            for number in range(beat % apart, members, apart):
                times: dict[str, Any] = {"compute_s": 0.4, "wait_s": round(0.2 * rnd.random(), 3)}
                used: dict[str, Any] = {
                    "sent_bytes": 19_000 * beat,
                    "received_bytes": 18_000 * beat,
                }
                used |= {"cpu_s": t, "peak_bytes": 200_000_000}
                line = {"kind": "step", "t": t, "member": f"m{number}", "step": 5 * beat}
                loss = 2.3 * math.exp(-beat / 60) + 0.1 * rnd.random()
                more = {"round": beat, "steps": 5, "loss": round(loss, 4), "overhead_s": 0.01}
                lines.append(format_line(line | times | used | more))
            if beat % (apart // 2) == 0:
                figure: dict[str, Any] = {"accuracy": 0.98 - 0.8 * math.exp(-beat / 40)}
                figure |= {"eval_s": 0.1}
                lines.append(format_line({"kind": "eval", "t": t, "member": "m0"} | figure))
            if beat % 20 == 0:
                said = {"event": ("gone", "back")[beat % 40 // 20], "about": f"m{beat % 7}"}
                lines.append(format_line({"kind": "event", "t": t, "member": "hub"} | said))
            ends: dict[str, Any] = {"round": beat, "members": ["m0"], "missing": [], "close_s": 0.3}
            lines.append(format_line({"kind": "round", "t": t, "member": "hub"} | ends))
            file.write(b"".join(lines))
            if over.wait(max(0.0, beat * heartbeat_s - (time.monotonic() - began))):
                return


@contextlib.contextmanager
def fleet(base: Path, members: int, *pace: float) -> Iterator[Path]:
    """The folder of a made-up run under way. `pace`: the last two of `feed`."""
    folder = base / f"20260131-14250{1 + bool(pace)}-digits"
    folder.mkdir()
    table = {"members": members, "network": "wan-200ms"}
    train = {"steps": 100_000, "target": 0.97}
    write_job(folder, {"task": "edgetrain.tasks:digits", "fleet": table, "train": train})
    over = threading.Event()
    feeder = threading.Thread(target=feed, args=(folder, members, over, *pace), daemon=True)
    feeder.start()
    try:
        yield folder
    finally:
        over.set()
        feeder.join()


@contextlib.contextmanager
def served(folder: Path, look_s: float | None = None) -> Iterator[tuple[psutil.Process, str]]:
    """A dashboard of a folder, its process and its address. `look_s`: seconds between two looks,
    however long they take."""
    words = f"['dashboard', {str(folder)!r}, '--bind', '127.0.0.1:0', '--until-stdin-ends']"
    faster = f"app.LOOK_S = follow._DRAWN_EVERY_S = {look_s}; app.SHARE_OF_A_CORE = 1.0\n"
    faster = "" if look_s is None else faster
    code = "from edgetrain.runs.dashboard import app, follow\nfrom edgetrain.__main__ import main\n"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}{faster}main({words})"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield psutil.Process(process.pid), process.stdout.readline().split()[-1]
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def painted(page: Page, seconds: float) -> list[float]:
    """Milliseconds from sent to painted, of the messages of this many seconds."""
    value(page, "window.updates = took.length = 0")
    time.sleep(seconds)
    return list(value(page, "took"))


def spread(turns: list[list[float]]) -> dict[str, float]:
    """Of the messages of all turns."""
    took = sorted(itertools.chain(*turns))
    return {
        "messages": len(took),
        "median_ms": round(statistics.median(took), 1),
        "p95_ms": round(took[int(0.95 * len(took))], 1),
    }


def paint(page: Page, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The dashboard and the bare page in turns, and the server while the dashboard is read."""
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    spent, rows = 0.0, 0
    with served(folder) as (server, address):
        for turn in range(TURNS):
            say(f"painting: turn {turn + 1} of {TURNS}")
            page("Page.navigate", url="about:blank")
            page("Page.navigate", url=address)
            time.sleep(3)
            used = server.cpu_times()
            ours.append(painted(page, arguments.seconds))
            spent += sum(server.cpu_times()[:2]) - sum(used[:2])
            rows = value(page, "document.querySelectorAll('#fleet tr').length")
            if arguments.pictures and turn == 0:
                pictures(page, arguments.pictures)
                page("Emulation.setDeviceMetricsOverride", **VIEW)
            page("Page.navigate", url=f"{address.partition('#')[0]}nothing-here")
            time.sleep(1)
            value(page, BARE % folder.name)
            time.sleep(2)
            bare.append(painted(page, arguments.seconds))
        core = round(spent / TURNS / arguments.seconds, 4)
        found = {"server": {"core": core, "bytes": server.memory_info().rss}}
    dashboard, other = spread(ours), spread(bare)
    turns = zip(ours, bare, strict=True)
    return found | {
        "dashboard": dashboard,
        "bare": other,
        "times_bare": round(dashboard["median_ms"] / other["median_ms"], 2),
        "times_bare_by_turn": [
            round(statistics.median(one) / statistics.median(two), 2) for one, two in turns
        ],
        "rows_in_the_page": rows,
    }


def heap(page: Page) -> int:
    """Bytes of a page's heap, scripts' and documents', once what is not needed is collected."""
    page("HeapProfiler.collectGarbage")
    page("HeapProfiler.collectGarbage")
    used = page("Runtime.getHeapUsage")
    return int(used["usedSize"] + used.get("embedderHeapUsedSize", 0))


def heaps(page: Page, base: Path, members: int, updates: int) -> dict[str, Any]:
    """The heap after 1,000 messages since the page was opened, and after `updates`."""
    found: dict[str, int] = {}
    with (
        fleet(base, members, 0.005, max(2, members // 20)) as folder,
        served(folder, look_s=0.005) as (_, address),
    ):
        page("Page.navigate", url="about:blank")
        page("Page.navigate", url=address)
        began = time.monotonic()
        for goal in (min(1000, updates), updates):
            told = time.monotonic()
            while (count := value(page, "window.updates")) < goal:
                time.sleep(0.2)
                if time.monotonic() > told + 5:
                    told = time.monotonic()
                    rate = (count or 0) / (told - began)
                    say(f"heap: {count} of {updates} updates, {rate:.0f} a second")
            found[str(goal)] = heap(page)
    few, *_, many = [*found.values()] * 2
    return found | {"grown": round(many / few - 1, 4)}


VIEW = {"width": 1280, "height": 1300, "deviceScaleFactor": 1, "mobile": False}
SIZES = {"wide": (1280, 1900), "narrow": (390, 1900)}


def pictures(page: Page, folder: Path) -> None:
    """Screenshots of a page."""
    folder.mkdir(parents=True, exist_ok=True)
    for (name, (width, height)), scheme in itertools.product(SIZES.items(), ("light", "dark")):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page("Emulation.setEmulatedMedia", features=[feature])
        time.sleep(2)
        shot = page("Page.captureScreenshot", captureBeyondViewport=True)
        (folder / f"{name}-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))


JOB = (
    "members=2", "steps=1000000", "network=wan-200ms", "device=raspberry-pi-4b", "strategy=dga",
    "delay=20",
)  # fmt: skip
WINDOW_S = 3.0


def rounds_beside_readers(base: Path, readers: int, triples: int) -> dict[str, Any]:
    """Seconds per round of one job while nobody reads its stream, while all readers do, and while
    nobody does; again and again."""
    words = [sys.executable, "-m", "edgetrain", "run", *JOB, "--json", "--dashboard"]
    process = subprocess.Popen(
        [*words, "--runs", str(base / "runs")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"dashboard: (\S+)", line):
                break
        else:
            raise SystemExit(f"the job did not begin: {said[-3:]}")
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        [folder] = (base / "runs").iterdir()
        follower, seen = Follower(metrics_path(folder)), 0
        while seen < 30:  # rounds, until they are even
            seen += sum(record["kind"] == "round" for record in follower.read())
            time.sleep(0.2)
        before: list[tuple[float, float]] = []
        beside: list[tuple[float, float]] = []
        after: list[tuple[float, float]] = []
        for place in range(triples):
            say(f"rounds: {place + 1} of {triples}, {before[-1:]}")
            for rows, count in ((before, 0), (beside, readers), (after, 0)):
                with streams_read(found[1], count):
                    rows.append(window(follower))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    alone = [(one + two) / 2 for (one, _), (two, _) in zip(before, after, strict=True)]
    cpu_s = [one for _, one in before + after], [one for _, one in beside]
    return {
        "alone_s": round(statistics.median(alone), 5),
        "beside_s": round(statistics.median(one for one, _ in beside), 5),
        "slower": ratios(alone, [one for one, _ in beside]),
        "alone_again": ratios([one for one, _ in before], [one for one, _ in after]),
        "hub_cpu_s": [round(statistics.median(each), 6) for each in cpu_s],
    }


def ratios(one: list[float], other: list[float]) -> dict[str, float]:
    """How much longer the other takes: median, lowest and highest of pairs."""
    each = sorted(two / first - 1 for first, two in zip(one, other, strict=True))
    return {
        "median": round(statistics.median(each), 4),
        "from": round(each[0], 4),
        "to": round(each[-1], 4),
    }


def window(follower: Follower) -> tuple[float, float]:
    """Seconds per round, and CPU seconds of the hub, of the next WINDOW_S, or ten rounds."""
    time.sleep(0.5)
    follower.read()
    rounds: list[Record] = []
    began = time.monotonic()
    while (passed := time.monotonic() - began) < WINDOW_S or len(rounds) < 10:
        if passed > 20 * WINDOW_S:
            raise SystemExit("the job has ended")
        time.sleep(0.2)
        rounds += [record for record in follower.read() if record["kind"] == "round"]
    first, last, count = rounds[0], rounds[-1], len(rounds) - 1
    return (last["t"] - first["t"]) / count, (last["cpu_s"] - first["cpu_s"]) / count


@contextlib.contextmanager
def streams_read(address: str, readers: int) -> Iterator[None]:
    """Readers of the stream of a run."""
    over = threading.Event()
    threads = [threading.Thread(target=read_stream, args=(address, over)) for _ in range(readers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def read_stream(address: str, over: threading.Event) -> None:
    """Read a run's stream until it is over; a line comes twice a second."""
    base, _, words = address.partition("/#token=")
    token, _, run = words.partition("&run=")
    known = {"Origin": base, "X-Edgetrain": "1", "Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(f"{base}/enter", method="POST", headers=known)
    with urllib.request.urlopen(asked) as answer:
        cookie = answer.headers["set-cookie"].split(";")[0]
    asked = urllib.request.Request(f"{base}/stream/{run}", headers={"Cookie": cookie})
    with contextlib.suppress(OSError), urllib.request.urlopen(asked) as answer:
        while answer.readline() and not over.is_set():
            pass


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def measure(arguments: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Everything that was asked for."""
    found: dict[str, Any] = {"members": arguments.members}
    browser = Chromium(str(base / "profile"))
    try:
        page = browser.page()
        page("Emulation.setDeviceMetricsOverride", **VIEW)
        with fleet(base, arguments.members) as folder:
            found |= paint(page, folder, arguments)
        if arguments.updates:
            found["heap_bytes"] = heaps(page, base, arguments.members, arguments.updates)
    finally:
        browser.close()
    if arguments.readers:
        found["rounds"] = rounds_beside_readers(base, arguments.readers, arguments.triples)
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a page's turn, of three")
    parser.add_argument("--updates", type=int, default=0, help="and the heap after this many")
    parser.add_argument(
        "--readers", type=int, default=0, help="and a job's rounds beside this many"
    )
    parser.add_argument("--triples", type=int, default=8, help="without, with and without readers")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits what is ignored
    with tempfile.TemporaryDirectory() as base:
        print(json.dumps(measure(parser.parse_args(), Path(base)), indent=2))


if __name__ == "__main__":
    main()
