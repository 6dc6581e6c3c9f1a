"""The dashboard: who may look, what is told, what it costs. No network, but for one real child."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import queue
import re
import shutil
import socket
import statistics
import subprocess
import threading
import time
from importlib.resources import files
from pathlib import Path

import pytest
from asgi import ask, stream
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import DGA, replace, write_comparison, write_run

from edgetrain import errors
from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.hub.steering import NEWS
from edgetrain.runs.dashboard import app as dashboard
from edgetrain.runs.dashboard import follow, listener, serve
from edgetrain.runs.dashboard.app import application, page_files
from edgetrain.runs.dashboard.follow import COLUMNS, MOST_POINTS, BoundedCurve, Following
from edgetrain.runs.dashboard.gauges import exposition
from edgetrain.runs.dashboard.guard import POLICY, Guard
from edgetrain.runs.dashboard.hall import Hall
from edgetrain.runs.dashboard.serve import LOOPBACK, ListensAt
from edgetrain.runs.folder import ORDERS, SUMMARY, metrics_path, write_job
from edgetrain.runs.kept import MOST_ROUNDS
from edgetrain.runs.looking import beside
from edgetrain.runs.metrics.lines import Follower, format_line
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.runs.summary import summarise

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

PORT = 8750
HOST = f"127.0.0.1:{PORT}"
ORIGIN = f"http://{HOST}"
PROXIED = ["lab.example", "Lab.example:8443"]
SCRIPT = "<script>alert(1)</script>"
ROOT = Path(__file__).parents[2]
SMALL = replace(DGA, members=3, steps=60)


# -- who may -----------------------------------------------------------------------------------


class Inside:
    """What the guard guards: notes each request that reaches it."""

    def __init__(self):
        self.asked = []

    async def __call__(self, scope, receive, send):
        self.asked.append((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})


def guarded(names=LOOPBACK, *, secure=False):
    inside = Inside()
    return Guard(inside, names, secure=secure, proxied=PROXIED), inside


def enter(guard, **headers):
    known = {"Host": HOST, "Origin": ORIGIN, "X-Edgetrain": "1"}
    known |= {"Authorization": f"Bearer {guard.token}"} | headers
    return asyncio.run(ask(guard, "POST", "/enter", known))


def cookie_of(guard):
    return enter(guard).headers["set-cookie"].split(";")[0]


GOOD = {"Host": HOST, "Origin": ORIGIN, "X-Edgetrain": "1"}


@pytest.mark.parametrize(
    ("method", "path", "change", "status"),
    [
        ("GET", "/runs", {"Origin": "http://evil.example"}, 403),  # a foreign page
        ("GET", "/runs", {"Origin": "null"}, 403),  # one in a sandbox
        ("GET", "/runs", {"Origin": f"https://{HOST}"}, 403),
        ("GET", "/runs", {"Origin": "http://127.0.0.1:9999"}, 403),  # another port
        ("GET", "/runs", {"Host": "evil.example"}, 421),
        ("GET", "/runs", {"Host": f"evil.example:{PORT}"}, 421),  # a rebinding name
        ("GET", "/runs", {"Host": f"127.0.0.1.evil.example:{PORT}"}, 421),
        ("GET", "/runs", {"Host": f"{HOST}@evil.example"}, 421),
        ("GET", "/runs", {"Host": "127.0.0.1:80:80"}, 421),
        ("GET", "/runs", {"Host": "lab.example:80"}, 421),  # named without a port
        ("GET", "/runs", {"X-Forwarded-Host": HOST, "Host": "evil.example"}, 421),
        ("GET", "/runs", {"X-Forwarded-Proto": "https", "Origin": f"https://{HOST}"}, 403),
        ("GET", "/runs", {"Host": "lab.example", "Origin": "https://lab.example:444"}, 403),
        ("GET", "/runs", {"Origin": "file://lab.example"}, 403),
        ("GET", "/runs", {"Host": ""}, 421),
        ("GET", "/runs", {"Cookie": ""}, 401),
        ("GET", "/runs", {"Cookie": "edgetrain-8750=wrong"}, 401),
        ("GET", "/runs", {"Cookie": "\"\x00;;=,é"}, 401),
        ("GET", "/stream/a", {"Cookie": ""}, 401),
        ("GET", "/control/a", {"Cookie": ""}, 401),
        ("POST", "/control/a", {"X-Edgetrain": None}, 403),
        ("POST", "/control/a", {"Origin": None}, 403),
        ("POST", "/control/a", {"Origin": "http://evil.example"}, 403),
        ("POST", "/control/a", {"Cookie": ""}, 401),
        ("PUT", "/control/a", {}, 405),
        ("OPTIONS", "/control/a", {}, 405),  # what a foreign page would have to ask first
        ("GET", "/page/../runs", {"Cookie": "", "Host": "x"}, 421),
        ("GET", "/enter", {}, 405),
    ],
)  # fmt: skip
def test_what_is_refused_reaches_nothing(method, path, change, status):
    guard, inside = guarded()
    headers = GOOD | {"Cookie": cookie_of(guard)} | change
    sent = {key: value for key, value in headers.items() if value is not None}
    answer = asyncio.run(ask(guard, method, path, sent))
    assert (answer.status, inside.asked) == (status, [])
    assert b"secret" not in answer.body
    assert answer.headers["content-security-policy"] == POLICY
    assert not any(key.startswith("access-control") for key in answer.headers)


@pytest.mark.parametrize(
    ("given_host", "origin", "is_secret"),
    [
        (HOST, ORIGIN, False),
        ("localhost:9000", "http://localhost:9000", False),  # the other end of a tunnel
        ("[::1]", "http://[::1]", False),
        (f"LOCALHOST:{PORT}", f"http://localhost:{PORT}", False),
        ("lab.example", "https://lab.example", True),  # a proxy that keeps the name
        ("lab.example:8443", "https://lab.example:8443", True),
        (HOST, "https://LAB.example:8443", True),  # and one that does not
        (HOST, "http://lab.example", False),
    ],
)
def test_who_has_the_token_is_let_in_under_each_name(given_host, origin, is_secret):
    guard, inside = guarded()
    cookie = enter(guard, Host=given_host, Origin=origin).headers["set-cookie"]
    assert ("; Secure" in cookie) == is_secret
    headers = {"Host": given_host, "Origin": origin, "Cookie": cookie.split(";")[0]}
    answer = asyncio.run(ask(guard, "GET", "/runs", headers))
    assert (answer.status, inside.asked) == (200, [("GET", "/runs")])
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["cache-control"] == "no-store"


def test_the_page_itself_needs_no_cookie():
    guard, inside = guarded()
    assert asyncio.run(ask(guard, "GET", "/", {"Host": HOST})).status == 200
    assert inside.asked == [("GET", "/")]


def test_the_token_becomes_a_strict_cookie_that_is_not_the_token():
    guard, _ = guarded()
    given = enter(guard).headers["set-cookie"]
    assert given.startswith(f"edgetrain-{PORT}=")
    assert {"HttpOnly", "SameSite=Strict"} <= set(given.split("; "))
    assert "Path" not in given  # for the folder of /enter, wherever a proxy has it
    assert "Secure" not in given
    assert guard.token not in given
    secure, _ = guarded(secure=True)
    assert "; Secure" in enter(secure, Origin=f"https://{HOST}").headers["set-cookie"]


@pytest.mark.parametrize(
    "change",
    [{"Authorization": "Bearer x"}, {"Authorization": ""}, {"Origin": "http://evil.example"}],
)
def test_a_wrong_token_gets_no_cookie(change):
    answer = enter(guarded()[0], **change)
    assert answer.status in (401, 403)
    assert "set-cookie" not in answer.headers


def test_beyond_loopback_addresses_are_names_and_foreign_names_are_not():
    guard, _ = guarded((*LOOPBACK, "lab", "*"))
    hosts = {"10.0.0.5:9000": 200, "[fe80::1]": 200, f"lab:{PORT}": 200, "evil.example:80": 421}
    for host, status in hosts.items():
        assert enter(guard, Host=host, Origin=f"http://{host}").status == status, host


def test_a_program_reads_metrics_with_the_token_and_nothing_else():
    guard, inside = guarded()
    token = {"Host": HOST, "Authorization": f"Bearer {guard.token}"}
    wrong = {"Host": HOST, "Authorization": "Bearer x"}
    asked = [
        ("/metrics", token),
        ("/metrics", wrong),
        ("/metrics", {"Host": HOST}),
        ("/runs", token),
    ]
    assert [asyncio.run(ask(guard, "GET", *each)).status for each in asked] == [200, 401, 401, 401]
    assert inside.asked == [("GET", "/metrics")]


def test_a_name_that_is_not_known_is_told_the_option():
    answer = asyncio.run(ask(guarded()[0], "GET", "/", {"Host": "lab.example:81"}))
    assert (answer.status, b"--name lab.example:81" in answer.body) == (421, True)


def test_an_origin_that_is_not_known_is_told_the_option():
    answer = enter(guarded()[0], Origin="https://lab.example:81")
    assert (answer.status, b"--name lab.example:81" in answer.body) == (403, True)
    assert b"--name" not in enter(guarded()[0], Origin="null").body


def test_two_hosts_in_a_request_are_refused():
    guard, inside = guarded()
    cookie = cookie_of(guard)

    async def twice(scope, receive, send):
        scope["headers"].append((b"host", b"evil.example"))
        await guard(scope, receive, send)

    assert asyncio.run(ask(twice, "GET", "/runs", {"Host": HOST, "Cookie": cookie})).status == 421
    assert inside.asked == []


# -- the page ----------------------------------------------------------------------------------


def test_uplot_is_the_one_that_was_released_with_its_licence():
    """Of the npm package uplot 1.6.32."""
    sums = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    for name, known in sums.items():
        assert hashlib.sha256(page_files()[name][1]).hexdigest() == known
    folder = files("edgetrain.runs.dashboard").joinpath("page")
    assert "MIT" in folder.joinpath("uPlot-LICENSE.txt").read_text("utf-8")


def test_the_page_loads_its_own_files_and_writes_no_markup_from_names():
    own = {name: content.decode() for name, (_, content) in page_files().items()}
    page, script = own["index.html"], own["dashboard.js"]
    used = re.findall(r'(?:href|src)="([^"#]+)"', page)
    assert used
    assert all(each.removeprefix("page/") in own for each in used)
    asked = re.findall(r'(?:fetch|addressOf)\("([^"]*)"', script)
    assert sorted(asked) == ["control/", "enter", "runs", "stream/"]  # so below any path
    assert not re.search(r"style=|onclick|<script>", page)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?:", script
    )
    assert set(re.findall(r'at\("([\w-]+)"\)', script)) <= set(re.findall(r'id="([\w-]+)"', page))
    assert all(
        key in COLUMNS for key in re.findall(r'^  \["(\w+)", "[\w ]+", (?:null|\w+)', script, re.M)
    )


# -- what is told ------------------------------------------------------------------------------


def sections(following):
    return json.loads(following.since({}))


def test_the_fleet_is_what_watch_shows(tmp_path):
    run = write_run(tmp_path / "a", SMALL)
    following, watch = Following(run), FolderWatch(run)
    following.tick(0.0)
    watch.read()
    told, state = sections(following), watch.state()
    assert told["run"]["step"] == state.step
    assert told["run"]["sent_bytes"] == state.sent_bytes
    assert told["run"]["status"] == json.loads((run / SUMMARY).read_text())["status"]
    for key in COLUMNS:
        known = [getattr(member, key) for member in state.members]
        assert told["fleet"][key] == [
            pytest.approx(each, abs=1e-6) if isinstance(each, float) else each for each in known
        ]


def test_the_last_point_is_the_figure_of_the_summary(tmp_path):
    run = write_run(tmp_path / "a", SMALL)
    following = Following(run)
    following.tick(0.0)
    curves, final = sections(following)["curves"], summarise(run)["final"]["accuracy"]
    assert curves["figure"][1][-1] == pytest.approx(final, rel=1e-4)
    assert len(curves["loss"][0]) == len(curves["loss"][1]) > 2


@given(cuts=st.lists(st.floats(0, 1), max_size=5))
def test_what_is_told_does_not_depend_on_when_it_was_read(tmp_path_factory, cuts):
    run = write_run(tmp_path_factory.mktemp("runs") / "a", replace(SMALL, steps=20))
    whole = metrics_path(run).read_bytes()
    at_once = Following(run)
    at_once.tick(0.0)
    metrics_path(run).write_bytes(b"")
    by_parts, done = Following(run), 0
    for end in [*sorted(int(cut * len(whole)) for cut in cuts), len(whole)]:
        with metrics_path(run).open("ab") as file:
            file.write(whole[done:end])
        done = end
        by_parts.tick(0.0)
    one, other = sections(at_once), sections(by_parts)
    for name in ("run", "fleet", "curves", "refusals"):
        assert one[name] == other[name]


def test_a_reader_is_told_what_is_new_and_nothing_twice(tmp_path):
    run = write_run(tmp_path / "a", SMALL)
    following, seen = Following(run), {}
    following.tick(0.0)
    assert set(json.loads(following.since(seen))) >= {"run", "fleet", "curves", "news", "timeline"}
    following.tick(0.0)
    assert following.since(seen) == b""
    event = {"kind": "event", "t": 9.0, "member": "hub", "event": "refused", "reason": "no key",
             "about": SCRIPT}  # fmt: skip
    with metrics_path(run).open("ab") as file:
        file.write(format_line(event))
    following.tick(0.0)
    fresh = json.loads(following.since(seen))
    assert {"news", "refusals"} <= set(fresh) <= {"news", "refusals", "run"}
    assert fresh["refusals"]["count"] == 1
    assert SCRIPT in fresh["refusals"]["lines"][0]  # text, which the page sets as text


def test_names_in_pictures_are_escaped(tmp_path):
    steps = {
        "compute_s": 0.1,
        "wait_s": 0.0,
        "overhead_s": 0.0,
        "sent_bytes": 1,
        "received_bytes": 1,
    }
    lines = [
        {"kind": "step", "t": 0.2 * n, "member": SCRIPT, "step": n, "loss": 1.0} | steps
        for n in range(1, 9)
    ]
    lines += [
        {"kind": "exchange", "t": 0.4 * n + 0.3, "member": SCRIPT, "round": n,
         "arrived_t": 0.4 * n + 0.2, "submitted_t": 0.4 * n}
        for n in range(1, 4)
    ]  # fmt: skip
    (tmp_path / "a").mkdir()
    metrics_path(tmp_path / "a").write_bytes(b"".join(map(format_line, lines)))
    following = Following(tmp_path / "a")
    following.tick(0.0)
    told = sections(following)
    assert told["fleet"]["name"] == [SCRIPT]
    assert "<script" not in told["timeline"]
    assert "&lt;script&gt;" in told["timeline"]
    assert "style=" not in told["timeline"]  # the policy would drop it


def test_a_curve_keeps_its_course_and_its_size():
    curve = BoundedCurve()
    for n in range(10_000):
        curve.add(n, n % 7)
    times, values = curve.columns()
    assert MOST_POINTS / 2 <= len(times) <= MOST_POINTS
    assert times == sorted(times)
    assert all(abs(value - 3) <= 0.5 for value in values[1:])


def test_a_point_of_a_large_fleet_is_the_median_of_its_members():
    curve, members = BoundedCurve(), [5.0, 1.0, 9.0]
    for t in (1.0, 2.0):
        for value in members:
            curve.add(t, value * t, least=3)
    assert curve.columns() == [
        [1.0, 2.0],
        [statistics.median(members), 2 * statistics.median(members)],
    ]


def test_memory_does_not_grow_with_steps(tmp_path):
    run = write_run(tmp_path / "a", replace(SMALL, steps=3000))
    following = Following(run)
    following.tick(0.0)
    story = following.story
    assert {len(member.steps) for member in story.members.values()} == {follow.KEPT_LINES}
    assert len(story.rounds) == MOST_ROUNDS


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_damaged_folder_is_one_line(tmp_path, name):
    run = write_run(tmp_path / "a", SMALL)
    (run / name).unlink()
    (run / name).mkdir()
    following = Following(run)
    following.tick(0.0)
    told = sections(following)
    assert name in told["trouble"]
    assert "\n" not in told["trouble"]


def test_a_run_that_stopped_without_an_end_is_quiet(tmp_path):
    run = write_run(tmp_path / "a", SMALL)
    (run / SUMMARY).unlink()
    written = metrics_path(run).stat().st_mtime
    following = Following(run)
    following.tick(written + 1)
    assert sections(following)["run"]["status"] != "quiet"
    following.tick(written + 61)
    assert sections(following)["run"]["status"] == "quiet"


def test_a_file_is_read_in_parts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [format_line({"kind": "step", "t": float(n), "member": "m0"}) for n in range(20)]
    path.write_bytes(b"".join(lines))
    follower, read = Follower(path, 100), []
    while True:
        read += follower.read()
        if not follower.is_behind:
            break
    assert [record["t"] for record in read] == list(range(20))


# -- which runs, and the stream ----------------------------------------------------------------


def test_the_list_has_every_run_and_a_name_is_no_path(tmp_path):
    one = write_run(tmp_path / "runs" / "20260131-142501-digits", SMALL)
    both = tmp_path / "runs" / "20260131-143007-digits"
    write_comparison(both, SMALL, replace(SMALL, strategy="fedavg"))
    write_run(tmp_path / "other", SMALL)
    hall = Hall(tmp_path / "runs")
    ids = {row["id"] for row in hall.rows()}
    assert ids == {one.name} | {f"{both.name}/{inside}" for inside in ("dga", "fedavg")}
    assert all(hall.find(each) is not None for each in ids)
    for name in ("../other", "..", "", ".", str(tmp_path / "other"), f"{one.name}/../{one.name}"):
        assert hall.find(name) is None
    assert hall.only() == ""
    assert Hall(one).only() == one.name


def test_a_run_that_has_not_begun_can_be_waited_for(tmp_path):
    folder = tmp_path / "20260131-142501-digits"
    folder.mkdir()
    write_job(folder, {"task": "t:t", "train": {"steps": 5}})
    hall = Hall(folder)
    assert hall.find(hall.only()) == folder
    following = Following(folder)
    following.tick(0.0)
    assert sections(following)["run"]["status"] == "waiting"


def test_ten_readers_cost_one_look(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a", SMALL)
    app, looks = application(Hall(run)), []
    monkeypatch.setattr(dashboard, "LOOK_S", 3600.0)
    tick = Following.tick
    monkeypatch.setattr(Following, "tick", lambda self, now: (looks.append(1), tick(self, now)))

    async def first_of(number):
        async for part in stream(app, "/stream/a", {}):
            if b"data: " in part:
                return json.loads(part.split(b"data: ")[1])
        return None

    async def ten():
        return await asyncio.gather(*map(first_of, range(10)))

    told = asyncio.run(ten())
    assert len(looks) == 1
    assert all(each == told[0] for each in told)


def test_a_reader_of_a_run_without_news_is_sent_a_beat(tmp_path, monkeypatch):
    app = application(Hall(write_run(tmp_path / "a", SMALL)))
    for name, value in (("LOOK_S", 0.001), ("SHARE_OF_A_CORE", 1.0), ("BEAT_S", 0.05)):
        monkeypatch.setattr(dashboard, name, value)

    async def beat():
        async for part in stream(app, "/stream/a", {}):
            if part == b": here\n\n":
                return True
        return False

    assert asyncio.run(beat())


def test_streams_have_a_limit_and_unknown_runs_are_told_so(tmp_path, monkeypatch):
    app = application(Hall(write_run(tmp_path / "a", SMALL)))
    assert asyncio.run(ask(app, "GET", "/stream/b", {})).status == 404
    assert asyncio.run(ask(app, "GET", "/page/nosuch", {})).status == 404
    monkeypatch.setattr(dashboard, "MOST_READERS", 0)
    assert asyncio.run(ask(app, "GET", "/stream/a", {})).status == 503


def test_metrics_are_what_watch_shows_of_runs_under_way(tmp_path):
    run = write_run(tmp_path / "runs" / "a", SMALL, upto=30)
    write_run(tmp_path / "runs" / "b", SMALL)  # it is over
    answer = asyncio.run(ask(application(Hall(tmp_path / "runs")), "GET", "/metrics", {}))
    watch = FolderWatch(run)
    watch.read()
    state = watch.state()
    found = re.findall(r'^edgetrain_(\w+)\{run="(.*?)".*\} (\S+)$', answer.body.decode(), re.M)
    values = {name: float(value) for name, _, value in found}
    assert {name for _, name, _ in found} == {"a"}
    assert values["step"] == pytest.approx(state.step)
    assert values["sent_bytes_total"] == pytest.approx(state.sent_bytes)
    assert values["figure"] == pytest.approx(state.figure)
    assert values["members"] == 3
    lines = answer.body.decode().splitlines()
    assert all(re.match(r"# (HELP|TYPE) |edgetrain_\w+\{", line) for line in lines)


def test_a_damaged_run_is_one_row_of_metrics_and_takes_none_from_the_others(tmp_path):
    runs = tmp_path / "runs"
    for name in ("a", "b", "c"):
        write_run(runs / name, SMALL, upto=30)
    with metrics_path(runs / "b").open("r+b") as file:
        file.truncate(1 << 40)
    metrics_path(runs / "c").unlink()
    metrics_path(runs / "c").mkdir()
    app = application(Hall(runs))

    def rows():
        text = asyncio.run(ask(app, "GET", "/metrics", {})).body.decode()
        found = re.findall(r'^edgetrain_(\w+)\{run="(.*?)"(.*)\} (\S+)$', text, re.M)
        assert ("step", "a", "", "30") in found
        assert [name for name, run, more, _ in found if run == "c" and "Is a directory" in more]
        return [(name, more) for name, run, more, _ in found if run == "b"]

    assert rows() == [("unread", ',why="it is being read"')]
    ((name, why),) = rows()
    assert (name, "no line end in 16 MiB after byte" in why) == ("unread", True)


def test_a_label_of_metrics_cannot_end_its_line(tmp_path):
    folder = tmp_path / 'x"} 1'
    text = exposition([('a"b\\c\nd', FolderWatch(folder).state())])
    assert '{run="a\\"b\\\\c\\nd"} 0' in text.splitlines()[2]


# -- acting ------------------------------------------------------------------------------------


def acting(tmp_path, *, control=True, why=None):
    """A guarded dashboard of one run, its cookie, and what the run's hub is told."""
    run, told = write_run(tmp_path / "a", SMALL, upto=30), []

    def tell(folder, words):
        told.append((folder, *words))
        if why is not None:
            raise why
        return {"course": "", "round": 7, "members": ["m0"]}

    app = application(Hall(run), tell if control else None)
    guard = Guard(app, LOOPBACK, secure=False)
    return guard, GOOD | {"Cookie": cookie_of(guard)}, told


def post(guard, headers, body, path="/control/a", method="POST"):
    sent = {key: value for key, value in headers.items() if value is not None}
    return asyncio.run(ask(guard, method, path, sent, body))


@pytest.mark.parametrize(
    "words", [["pause"], ["resume"], ["stop"], ["remove", "m3"], ["remove", SCRIPT]], ids=str
)
def test_an_order_of_the_page_reaches_the_hub_of_its_run(tmp_path, words):
    guard, headers, told = acting(tmp_path)
    answer = post(guard, headers, json.dumps(words).encode())
    assert (answer.status, json.loads(answer.body)["round"]) == (200, 7)
    assert told == [(tmp_path / "a", *words)]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"X-Edgetrain": None}, 403),
        ({"Host": f"evil.example:{PORT}"}, 421),
        ({"Cookie": None}, 401),
        ({"Cookie": f"edgetrain-{PORT}=wrong"}, 401),
        ({"Cookie": None, "Authorization": "Bearer wrong"}, 401),
    ],
)
def test_what_the_guard_refuses_tells_no_hub_anything(tmp_path, change, status):
    guard, headers, told = acting(tmp_path)
    assert (post(guard, headers | change, b'["stop"]').status, told) == (status, [])


@pytest.mark.parametrize(
    ("body", "path", "method", "status"),
    [
        (b'["stop"]', "/control/a", "GET", 405),
        (b'["stop"]', "/control/b", "POST", 404),
        (b'["stop"]', "/control/../a", "POST", 404),
        (b'["hubs", "add", "tcp://evil.example:1"]', "/control/a", "POST", 400),
        (b'["stop", "m0"]', "/control/a", "POST", 400),
        (b'["remove"]', "/control/a", "POST", 400),
        (b'[["stop"]]', "/control/a", "POST", 400),
        (b'{"order": ["stop"]}', "/control/a", "POST", 400),
        (b'"stop"', "/control/a", "POST", 400),
        (b"[" * 5000, "/control/a", "POST", 400),
        (b'["remove", "' + b"m" * 5000 + b'"]', "/control/a", "POST", 400),
        (b"\xff", "/control/a", "POST", 400),
        (b"", "/control/a", "POST", 400),
    ],
)
def test_what_is_no_order_of_a_page_tells_no_hub_anything(tmp_path, body, path, method, status):
    guard, headers, told = acting(tmp_path)
    assert (post(guard, headers, body, path, method).status, told) == (status, [])


def test_without_control_nothing_is_told_and_there_are_no_buttons(tmp_path):
    guard, headers, told = acting(tmp_path, control=False)
    answer = post(guard, headers, b'["stop"]')
    assert (answer.status, told) == (403, [])
    assert json.loads(answer.body)["hint"] == "start it with --control"
    mark = b'<body class="acts">'
    assert mark not in asyncio.run(ask(guard, "GET", "/", headers)).body
    acts, headers, _ = acting(tmp_path / "other")
    assert mark in asyncio.run(ask(acts, "GET", "/", headers)).body


@pytest.mark.parametrize("kind", [ConfigError, EdgetrainError])
def test_what_a_hub_refuses_is_shown_as_it_says_it(tmp_path, kind):
    guard, headers, _ = acting(tmp_path, why=kind(f"no member '{SCRIPT}' is in", "m0, m1"))
    answer = post(guard, headers, json.dumps(["remove", SCRIPT]).encode())
    assert answer.status == 409
    assert json.loads(answer.body) == {"error": f"no member '{SCRIPT}' is in", "hint": "m0, m1"}


def test_one_order_at_a_time(tmp_path):
    """A hub that does not answer holds one thread, not all that the server has."""
    asked, may_end = threading.Event(), threading.Event()

    def tell(folder, words):
        asked.set()
        assert may_end.wait(60)
        return {"course": "paused", "round": 1, "members": []}

    app = application(Hall(write_run(tmp_path / "a", SMALL)), tell)

    async def both():
        first = asyncio.create_task(ask(app, "POST", "/control/a", {}, b'["pause"]'))
        assert await asyncio.to_thread(asked.wait, 60)
        second = await ask(app, "POST", "/control/a", {}, b'["stop"]')
        may_end.set()
        return (await first).status, second.status

    assert asyncio.run(both()) == (200, 503)


def test_a_page_knows_whether_a_hub_hears_and_whether_it_is_paused(tmp_path):
    run = write_run(tmp_path / "a", SMALL, upto=30)
    following = Following(run)

    def now(*told):
        with metrics_path(run).open("ab") as file:
            for reason in told:
                event = {"kind": "event", "t": 9.0, "member": "hub", "event": "told"}
                file.write(format_line(event | {"reason": reason}))
        following.tick(metrics_path(run).stat().st_mtime + 600)
        told_of = sections(following)["run"]
        return told_of["hears"], told_of["status"]

    assert now() == (False, "quiet")
    (run / ORDERS).touch()
    assert now(NEWS["paused"]) == (True, "paused")
    assert now(NEWS[""]) == (True, "quiet")
    assert now(NEWS["paused"], NEWS["stopped"])[1] == "quiet"


def test_control_beyond_this_machine_needs_tls(tmp_path):
    place = ListensAt("0.0.0.0:0", insecure=True)
    with pytest.raises(ConfigError, match="whoever is on the way could end the job"):
        serve.serve(tmp_path, place, lambda address: None, tell=lambda folder, words: {})


# -- Grafana -----------------------------------------------------------------------------------


def test_every_name_in_the_board_is_one_that_metrics_gives(tmp_path):
    watch = FolderWatch(write_run(tmp_path / "a", SMALL, upto=30))
    watch.read()
    given = exposition([("a", watch.state())])
    names = set(re.findall(r"^edgetrain_(\w+)\{", given, re.M))
    labels = set(re.findall(r'[{,](\w+)="', given))
    board = json.loads((ROOT / "examples" / "grafana" / "edgetrain.json").read_text())
    asked = [each for panel in board["panels"] for each in panel["targets"]]
    queries = [each["expr"] for each in asked] + [board["templating"]["list"][1]["query"]["query"]]
    found = [set(re.findall(r"edgetrain_(\w+)", query)) for query in queries]
    assert len(found) > 10
    assert all(found)
    assert set().union(*found) == names
    assert {label for each in asked for label in re.findall(r"\w+", each["legendFormat"])} <= {
        *labels, "up", "down"
    }  # fmt: skip


# -- listening ---------------------------------------------------------------------------------


def refused(tmp_path, place):
    with pytest.raises(ConfigError) as caught:
        serve.serve(tmp_path, place, lambda address: pytest.fail(f"it listens at {address}"))
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_bad_places_get_one_line_each(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = ListensAt(f"127.0.0.1:{taken.getsockname()[1]}")
        assert "in use" in refused(tmp_path, place)
    assert "--tls" in refused(tmp_path, ListensAt("0.0.0.0:0"))
    for wrong in ("127.0.0.1", "127.0.0.1:http", "", "127.0.0.1:99999"):
        assert "HOST:PORT" in refused(tmp_path, ListensAt(wrong))
    for wrong in ("https://lab", "lab/x", "lab:http", "a b", "", "lab:1:2"):
        assert "HOST:PORT" in refused(tmp_path, ListensAt("127.0.0.1:0", proxied=(wrong,)))
    (tmp_path / "cert.pem").write_text("nothing")
    for cert in ("cert.pem", "nosuch.pem"):
        tls = (tmp_path / cert, tmp_path / cert)
        said = refused(tmp_path, ListensAt("127.0.0.1:0", tls))
        assert cert in said
        assert "_ssl.c" not in said  # OpenSSL's own words say nothing to whoever gave the file
    assert "no folder" in refused(tmp_path / "nosuch", ListensAt("127.0.0.1:0"))


def test_a_token_file_is_a_secret_and_no_short_one(tmp_path):
    file = tmp_path / "token"
    assert "no such file" in refused(tmp_path, ListensAt("127.0.0.1:0", token=file))
    for text, mode, said in (("x" * 20, 0o644, "read by others"), ("short", 0o600, "20 or more")):
        file.write_text(text)
        file.chmod(mode)
        assert said in refused(tmp_path, ListensAt("127.0.0.1:0", token=file))


def test_without_its_packages_it_says_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert "[dashboard]" in refused(tmp_path, ListensAt("127.0.0.1:0"))


# -- strangers ---------------------------------------------------------------------------------


async def knocks(hosts, *, asks=(), shows=()):
    """Which of those who connect from `hosts`, one after the other, are ended. The numbers in
    `asks` send a request, those in `shows` one with the token."""
    door, clients, taken = listener.LimitedListener(socket.create_server(("127.0.0.1", 0))), [], []
    guard = Guard(Inside(), LOOPBACK, secure=False, listener=door)
    with door:
        for number, host in enumerate(hosts):
            clients.append(socket.create_connection(door.getsockname(), source_address=(host, 0)))
            connection, peer = door.accept()
            taken.append(connection)
            token = guard.token if number in shows else "wrong"
            if number in {*asks, *shows}:
                headers = {"Host": HOST, "Authorization": f"Bearer {token}"}
                await ask(guard, "GET", "/metrics", headers, client=peer)
        for _ in range(3):
            await asyncio.sleep(0)
    ended = []
    for number, client in enumerate(clients):
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            ended += [number] * (client.recv(1) == b"")
    for each in (*clients, *taken):
        each.close()
    return ended


A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"


@pytest.mark.parametrize(
    ("hosts", "shows", "ended"),
    [
        ([A, A, A, B], (), []),
        ([A, A, A, B, B], (), [0]),
        ([B, A, A, A, B, C, C], (), [1, 2, 0]),
        ([A] * 7, (), [0, 1, 2]),
        ([A] * 7, (0, 2), [1]),  # who has shown the token is no stranger
        ([A, B, C, "127.0.0.5", "127.0.0.6"], (), [0]),
    ],
)
def test_of_a_crowd_of_strangers_the_address_with_most_ends_first(hosts, shows, ended, monkeypatch):
    monkeypatch.setattr(listener, "MOST_STRANGERS", 4)
    assert asyncio.run(knocks(hosts, shows=shows)) == sorted(ended)


def test_who_asks_nothing_is_ended_and_who_asked_is_not(monkeypatch):
    monkeypatch.setattr(listener, "SILENT_S", 0.0)
    assert asyncio.run(knocks([A, A, B, B], asks=(1,), shows=(3,))) == [0, 2]


@pytest.mark.real
def test_three_hundred_silent_connections_keep_no_owner_out(tmp_path):
    run = write_run(tmp_path / "20260131-142501-digits", SMALL)
    said: queue.Queue[str] = queue.Queue()
    with contextlib.ExitStack() as stack:
        stack.enter_context(beside(["dashboard", str(run), "--bind", "127.0.0.1:0"], said.put))
        address = said.get(timeout=60)
        port, token = re.search(r"127\.0\.0\.1:(\d+)/#token=([\w-]+)&run=", address).groups()
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", int(port))))
            for _ in range(300)
        ]
        silent[-1].sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert streamed(port, token)["fleet"]["name"] == ["m0", "m1", "m2"]
        for each in silent:  # also the half of a request
            each.settimeout(60)
            assert each.recv(1) == b""


@pytest.mark.real
def test_a_child_serves_a_run_and_ends_with_its_block(tmp_path):
    run = write_run(tmp_path / "20260131-142501-digits", SMALL)
    lines: asyncio.Queue[str] = asyncio.Queue()

    async def look():
        loop = asyncio.get_running_loop()
        words = ["dashboard", str(run), "--bind", "127.0.0.1:0"]
        with beside(words, lambda line: loop.call_soon_threadsafe(lines.put_nowait, line)):
            said = await asyncio.wait_for(lines.get(), 60)
            port, token = re.search(r"127\.0\.0\.1:(\d+)/#token=([\w-]+)&run=", said).groups()
            return port, await asyncio.to_thread(streamed, port, token)

    port, told = asyncio.run(look())
    assert told["fleet"]["name"] == ["m0", "m1", "m2"]
    with socket.socket() as after, pytest.raises(ConnectionRefusedError):
        after.connect(("127.0.0.1", int(port)))


FORWARDED = """
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
      proxy_set_header X-Forwarded-Proto https;
      proxy_set_header X-Forwarded-Host $http_host;
      proxy_set_header X-Forwarded-Prefix /edgetrain;"""
HOSTS = {"": 403, "proxy_set_header Host $http_host;": 421, "proxy_set_header Host $host;": 421}
"""Lines on the Host that nginx sends on: its own, the browser's, that without its port. The status
of a request under a name that was not given."""


@contextlib.contextmanager
def nginx(folder, behind, ports):
    """nginx at `ports`, one for each line of HOSTS, with the server at `behind` on a path."""
    program = shutil.which("nginx", path="/usr/local/sbin:/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("apt-get install nginx-light")
    servers = "".join(
        f"""
  server {{
    listen 127.0.0.1:{port};
    location /edgetrain/ {{
      proxy_pass http://127.0.0.1:{behind}/;
      {line}{FORWARDED}
    }}
  }}"""
        for port, line in zip(ports, HOSTS, strict=True)
    )
    own = "".join(
        f"{each}_temp_path {folder};\n"
        for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ access_log off;\n{own}{servers}\n}}\n"
    )
    words = [program, "-c", folder / "nginx.conf", "-e", "stderr"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", ports[-1])).close()
                    break
                time.sleep(0.05)
            assert process.poll() is None, process.stderr.read()
            yield
        finally:
            process.terminate()


@pytest.mark.real
def test_behind_a_real_proxy_a_page_is_live_and_other_names_are_told_the_option(tmp_path):
    run = write_run(tmp_path / "20260131-142501-digits", SMALL)
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in HOSTS]
        ports = [each.getsockname()[1] for each in taken]
    names = ["lab.example", *(f"lab.example:{port}" for port in ports)]
    lines: queue.Queue[str] = queue.Queue()
    words = ["dashboard", str(run), "--bind", "127.0.0.1:0"]
    words += [word for name in names for word in ("--name", name)]
    with beside(words, lines.put):
        address = lines.get(timeout=60)
        behind, token = re.search(r"127\.0\.0\.1:(\d+)/#token=([\w-]+)&run=", address).groups()
        with nginx(tmp_path, behind, ports):
            for port, (line, status) in zip(ports, HOSTS.items(), strict=True):
                told = streamed(port, token, "/edgetrain/", f"lab.example:{port}")
                assert told["fleet"]["name"] == ["m0", "m1", "m2"], line
                end, answer = entered(port, token, "/edgetrain/", f"other.example:{port}")
                with contextlib.closing(end):
                    said = answer.read().decode()
                name = "other.example" if "$host;" in line else f"other.example:{port}"
                assert (answer.status, f"--name {name}\n" in said) == (status, True), said


def entered(port, token, under="/", name=""):
    """A connection to the server below a path, under a name, and its answer to the token."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    name = name or f"127.0.0.1:{port}"
    headers = {"Host": name, "Origin": f"http://{name}", "X-Edgetrain": "1"}
    headers["Authorization"] = f"Bearer {token}"
    connection.request("POST", f"{under}enter", headers=headers)
    return connection, connection.getresponse()


def streamed(port, token, under="/", name=""):
    """The first message of the run's stream, over a real connection."""
    connection, answer = entered(port, token, under, name)
    answer.read()
    headers = {"Host": name or f"127.0.0.1:{port}"}
    headers["Cookie"] = answer.headers["set-cookie"].split(";")[0]
    connection.request("GET", f"{under}runs", headers=headers)
    (row,) = json.loads(connection.getresponse().read())["runs"]
    connection.request("GET", f"{under}stream/{row['id']}", headers=headers)
    answer = connection.getresponse()
    while not (line := answer.readline()).startswith(b"data: "):
        assert line
    connection.close()
    return json.loads(line.removeprefix(b"data: "))
