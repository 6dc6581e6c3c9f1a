"""The dashboard in Debian's headless Chromium: how soon a message is painted, and what it costs.

    python benchmarks/dashboard.py                    1,000 members, two updates a second: a minute
    python benchmarks/dashboard.py --updates 10000    and the page's memory after so many: minutes
    python benchmarks/dashboard.py --readers 10       and a hub's rounds with and without readers

A fleet is made up: a thread appends a line for every other member twice a second. Two pages of a
browser read the same stream, one after the other: the dashboard, and a bare page that paints one
number of each message. A message's time begins when the server sends it and ends after the frame
that shows it. Needs `chromium` (apt) and the extra `dashboard`. Prints one JSON object.
With `--pictures FOLDER` also screenshots, light and dark, wide and narrow.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import math
import os
import random
import re
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
from edgetrain.runs.metrics.lines import format_line

Page = Callable[..., dict[str, Any]]
BEATS_S = 0.5
EACH_S = 30.0

MEASURE = """
(() => {
  const Plain = window.EventSource, took = window.took = [];
  window.EventSource = class extends Plain {
    constructor(address) {
      super(address);
      this.addEventListener("message", message => {
        const sent = 1000 * Number(message.lastEventId);
        requestAnimationFrame(() => {
          const painted = new MessageChannel();
          painted.port1.onmessage = () =>
            took.push(performance.timeOrigin + performance.now() - sent);
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
            one, other = os.dup(theirs_in), os.dup(theirs_out)
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


def feed(folder: Path, members: int, over: threading.Event) -> None:
    """Append a line for every other member every BEATS_S: five steps a second of each."""
    rnd, began = random.Random(1), time.monotonic()
    with metrics_path(folder).open("ab", buffering=0) as file:
        for beat in itertools.count(1):
            t, lines = round(time.monotonic() - began, 3), []
            for number in range(beat % 2, members, 2):
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
            figure: dict[str, Any] = {"accuracy": 0.98 - 0.8 * math.exp(-beat / 40), "eval_s": 0.1}
            lines.append(format_line({"kind": "eval", "t": t, "member": "m0"} | figure))
            ends: dict[str, Any] = {"round": beat, "members": ["m0"], "missing": [], "close_s": 0.3}
            lines.append(format_line({"kind": "round", "t": t, "member": "hub"} | ends))
            file.write(b"".join(lines))
            if over.wait(max(0.0, beat * BEATS_S - (time.monotonic() - began))):
                return


@contextlib.contextmanager
def served(folder: Path, look_s: float | None = None) -> Iterator[tuple[psutil.Process, str]]:
    """A dashboard of a folder, its process and its address. `look_s`: seconds between two looks,
    however long they take."""
    words = f"['dashboard', {str(folder)!r}, '--bind', '127.0.0.1:0', '--until-stdin-ends']"
    faster = "" if look_s is None else f"app.LOOK_S = {look_s}; app.SHARE_OF_A_CORE = 1.0\n"
    code = "from edgetrain.runs.dashboard import app\nfrom edgetrain.__main__ import main\n"
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


def painted(page: Page, seconds: float) -> dict[str, float]:
    """Milliseconds from sent to painted, of the messages of so many seconds."""
    time.sleep(3)
    value(page, "took.length = 0")
    time.sleep(seconds)
    took = sorted(value(page, "took"))
    return {
        "messages": len(took),
        "median_ms": round(statistics.median(took), 1),
        "p95_ms": round(took[int(0.95 * len(took))], 1),
    }


def heap(page: Page) -> int:
    """Bytes of a page's heap, once what is not needed has been collected."""
    page("HeapProfiler.collectGarbage")
    return int(page("Runtime.getHeapUsage")["usedSize"])


def after_updates(page: Page, updates: int) -> int:
    """The heap after so many messages since the page was opened."""
    while value(page, "took.length") < updates:
        time.sleep(0.5)
    return heap(page)


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


def rounds_beside_readers(readers: int, pairs: int) -> dict[str, Any]:
    """Seconds per step of a job on this machine, alone and with readers of its stream, in turn."""
    job = "members=2", "steps=150", "network=wan-200ms", "device=host", "strategy=dga", "delay=20"
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(pairs):
        for rows, count in ((alone, 0), (beside, readers)):
            with tempfile.TemporaryDirectory() as runs:
                rows.append(seconds_per_step(Path(runs), job, count))
    middle, other = statistics.median(alone), statistics.median(beside)
    return {"alone_s": alone, "beside_s": beside, "slower": round(other / middle - 1, 4)}


def seconds_per_step(runs: Path, job: tuple[str, ...], readers: int) -> float:
    """Of one run."""
    words = [sys.executable, "-m", "edgetrain", "run", *job, "--json", "--runs", str(runs)]
    words += ["--dashboard"] if readers else []
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE if readers else subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    if readers:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"dashboard: (\S+)", line):
                for _ in range(readers):
                    threading.Thread(target=read_stream, args=(found[1],), daemon=True).start()
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
    answer, _ = process.communicate()
    found_s: float = json.loads(answer.splitlines()[-1])["seconds_per_step"]
    return found_s


def read_stream(address: str) -> None:
    """Read a run's stream until it ends."""
    base, _, words = address.partition("/#token=")
    token, _, run = words.partition("&run=")
    known = {"Origin": base, "X-Edgetrain": "1", "Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(f"{base}/enter", method="POST", headers=known)
    with urllib.request.urlopen(asked) as answer:
        cookie = answer.headers["set-cookie"].split(";")[0]
    asked = urllib.request.Request(f"{base}/stream/{run}", headers={"Cookie": cookie})
    with contextlib.suppress(OSError), urllib.request.urlopen(asked) as answer:
        while answer.readline():
            pass


def measure(arguments: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Everything that was asked for."""
    folder = base / "20260131-142501-digits"
    folder.mkdir()
    table = {"members": arguments.members, "network": "wan-200ms"}
    train = {"steps": 100_000, "target": 0.97}
    write_job(folder, {"task": "edgetrain.tasks:digits", "fleet": table, "train": train})
    over, found = threading.Event(), {"members": arguments.members}
    feeder = threading.Thread(target=feed, args=(folder, arguments.members, over), daemon=True)
    feeder.start()
    browser = Chromium(str(base / "profile"))
    try:
        page = browser.page()
        with served(folder) as (server, address):
            page("Page.navigate", url=address)
            found["dashboard"] = painted(page, arguments.seconds)
            began, used = time.monotonic(), server.cpu_times()
            time.sleep(arguments.seconds)
            spent = sum(server.cpu_times()[:2]) - sum(used[:2])
            found["server"] = {
                "core": round(spent / (time.monotonic() - began), 4),
                "bytes": server.memory_info().rss,
            }
            found["rows_in_the_page"] = value(page, "document.querySelectorAll('#fleet tr').length")
            if arguments.pictures:
                pictures(page, arguments.pictures)
            page("Page.navigate", url=f"{address.partition('#')[0]}nothing-here")
            time.sleep(1)
            value(page, BARE % folder.name)
            found["bare"] = painted(page, arguments.seconds)
        if arguments.updates:
            with served(folder, look_s=0.01) as (_, address):
                page("Page.navigate", url="about:blank")
                page("Page.navigate", url=address)
                few = after_updates(page, min(1000, arguments.updates))
                found["heap_bytes"] = {"1000": few}
                found["heap_bytes"][str(arguments.updates)] = after_updates(page, arguments.updates)
    finally:
        browser.close()
        over.set()
        feeder.join()
    if arguments.readers:
        found["rounds"] = rounds_beside_readers(arguments.readers, arguments.pairs)
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=EACH_S, help="of each page")
    parser.add_argument("--updates", type=int, default=0, help="and the heap after so many")
    parser.add_argument("--readers", type=int, default=0, help="and a job's steps beside so many")
    parser.add_argument("--pairs", type=int, default=5, help="of runs, for --readers")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    with tempfile.TemporaryDirectory() as base:
        print(json.dumps(measure(parser.parse_args(), Path(base)), indent=2))


if __name__ == "__main__":
    main()
