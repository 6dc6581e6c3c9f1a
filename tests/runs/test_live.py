"""The live view fits its terminal, costs little, and says in plain lines what a pipe can take."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import DGA, FEDAVG, SYNC, Clock, Story, write_metrics, write_run
from reflowing_terminal import ReflowingTerminal
from rich.console import Console

from edgetrain.runs.folder import create_inside, metrics_path, write_job, write_summary
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.reports.live.frame import Frame, bar
from edgetrain.runs.reports.live.plain import news, plain_line
from edgetrain.runs.reports.live.view import LiveView, cuts_rows
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.runs.summary import summarise


def watched(folder: Path) -> FolderWatch:
    watch = FolderWatch(folder)
    watch.read()
    return watch


def drawn(frame: Frame, width: int, height: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(frame)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).splitlines()


# --- what a folder says ---


def test_a_folder_without_anything_is_waiting(tmp_path: Path) -> None:
    state = watched(tmp_path / "dga").state()
    assert (state.name, state.phase, state.step, state.done) == ("dga", "waiting", 0, 0)
    assert plain_line(state) == "dga: waiting"


def test_a_run_half_way(tmp_path: Path) -> None:
    story = replace(FEDAVG, steps=100, members=4)
    state = watched(write_run(tmp_path / "fedavg", story, upto=50)).state()
    assert state.phase == "running"
    assert (state.step, state.steps, state.done) == (50, 100, 0.5)
    assert state.figure == pytest.approx(story.accuracy(50))
    assert state.left_s == pytest.approx(50 * story.step_s)
    assert state.wait_s == pytest.approx(0.42 / 5)
    assert state.sent_bytes == 4 * 10 * 19_000


def test_members_with_loops_of_their_own_may_go_on_behind_the_steps_of_the_job(tmp_path: Path):
    folder = write_run(tmp_path / "dga", replace(DGA, steps=50))
    write_job(folder, {"task": "t:t", "train": {"steps": 20}})
    state = watched(folder).state()
    assert (state.step, state.steps, state.left_s) == (50, None, None)
    assert "step 50, " in plain_line(state)


NAMES = ("m0", "m1", "hub")


def test_with_a_cohort_steps_are_the_jobs(tmp_path: Path) -> None:
    """No member has taken the last one itself, and each was idle while others trained."""
    clock, watch = Clock(), FolderWatch(tmp_path)
    zeros = {"wait_s": 0, "overhead_s": 0, "sent_bytes": 0, "received_bytes": 0, "cpu_s": 0}
    write_job(tmp_path, {"task": "t:t", "train": {"steps": 25}, "strategy": {"cohort": 1.0}})
    m0, m1, hub = (MetricsLog(metrics_path(tmp_path), name, clock, 0.0) for name in NAMES)
    for round, log in enumerate((m0, m1, None)):  # who was drawn last is off
        if log is not None:
            clock.now += 1.0
            log.event("joined")
            log.step(step=10 + 10 * round, round=round, loss=1, compute_s=1, peak_bytes=1, **zeros)
        hub.round(round=round, local_steps=10, delay=0, members=[], missing=[])
    for log in (m0, m1, hub):
        log.close()
    watch.read()
    state = watch.state()
    assert (state.step, state.steps, state.seconds_per_step) == (25, 25, pytest.approx(2 / 25))
    for name in NAMES[:2]:
        with MetricsLog(metrics_path(tmp_path), name, clock, 0.0) as log:
            log.event("finished")
    watch.read()
    assert "step 25/25, " in plain_line(watch.state())
    found = summarise(tmp_path)
    assert (found["status"], found["steps"], found["seconds"]) == ("finished", 25, 2.0)
    assert found["seconds_per_step"] == pytest.approx(2 / 25)
    assert found["steps_per_second"] == pytest.approx(25 / 2)


def test_the_pace_is_that_of_the_last_seconds(tmp_path: Path) -> None:
    """A slow first step (caches, a compiler) must not spoil the time left for minutes."""
    clock, watch = Clock(), FolderWatch(tmp_path)
    zeros = {"wait_s": 0, "overhead_s": 0, "sent_bytes": 0, "received_bytes": 0, "cpu_s": 0}
    write_job(tmp_path, {"task": "t:t", "train": {"steps": 1000}})
    with MetricsLog(metrics_path(tmp_path), "m0", clock, 0.0) as log:
        for step in range(1, 301):
            clock.now += 30.0 if step == 1 else 0.1
            log.step(step=step, round=0, loss=1, compute_s=0.1, peak_bytes=1, **zeros)
            watch.read()
    assert watch.state().left_s == pytest.approx(700 * 0.1)
    assert watch.state().left_s == pytest.approx(70)


def test_a_lost_member_does_not_hold_the_progress_back(tmp_path: Path) -> None:
    story = Story(steps=100, members=4, lost="m3")
    state = watched(write_run(tmp_path / "dga", story, upto=80)).state()
    assert state.step == 80
    assert {member.name: member.standing for member in state.members}["m3"] == "gone"


@pytest.mark.parametrize(("reason", "step"), [("it was asked to stop", 80), ("done", 60)])
def test_a_member_that_left_early_does_not_hold_the_progress_back(
    tmp_path: Path, reason: str, step: int
) -> None:
    """As a group that has stepped in and out again; one that is done has taken its own steps."""
    folder = write_run(tmp_path / "dga", Story(steps=100, members=2), upto=80)
    zeros = {"wait_s": 0, "overhead_s": 0, "sent_bytes": 0, "received_bytes": 0, "cpu_s": 0}
    with MetricsLog(metrics_path(folder), "servers", Clock(), 0.0) as log:
        log.step(step=20, round=4, loss=1.0, compute_s=0.1, **zeros)
    with MetricsLog(metrics_path(folder), "hub", Clock(), 0.0) as log:
        log.event("left", reason, about="servers")
    assert watched(folder).state().step == step


def test_a_finished_run_is_done(tmp_path: Path) -> None:
    state = watched(write_run(tmp_path / "dga", Story(steps=20, lost="m1"))).state()
    assert (state.phase, state.done, state.left_s) == ("finished", 1.0, None)


def test_a_run_whose_network_was_late_is_marked(tmp_path: Path) -> None:
    late = watched(write_run(tmp_path / "dga", replace(DGA, timing_ok=False))).state()
    kept = watched(write_run(tmp_path / "fedavg", FEDAVG)).state()
    assert (late.timing_ok, kept.timing_ok) == (False, True)
    assert plain_line(late).endswith("untrusted: the emulated network was late")
    assert "untrusted" not in plain_line(kept)
    lines = drawn(Frame("", (late, kept), ()), 100, 20)
    assert [line.rstrip().rpartition(" ")[2] for line in lines[1:3]] == ["untrusted", "finished"]


def test_a_run_under_way_is_not_judged(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "dga", replace(DGA, steps=100), upto=50)
    write_summary(folder, {"emulation": {"timing_ok": False}})  # of an earlier life
    assert watched(folder).state().timing_ok is None


def test_a_damaged_job_does_not_stop_the_view(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "dga", Story(steps=20), upto=10)
    (folder / "job.toml").write_text("=")
    state = watched(folder).state()
    assert (state.step, state.steps, state.left_s) == (10, None, None)


# --- a terminal ---


@pytest.mark.parametrize("members", [1, 8, 16, 64])
@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (60, 14), (200, 60)])
def test_a_frame_fits_its_terminal(tmp_path: Path, members: int, width: int, height: int) -> None:
    write_run(tmp_path / "sync-sgd", replace(SYNC, members=members, steps=20))
    write_run(tmp_path / "fedavg", replace(FEDAVG, members=members, steps=20, lost="m3"), upto=15)
    states = tuple(watched(tmp_path / name).state() for name in ("sync-sgd", "fedavg", "dga"))
    said = tuple(f"fedavg: m{i} was lost at 6.9 s: silent for {'5.0 s ' * 30}" for i in range(3))
    lines = drawn(Frame("digits on " + "8 raspberry-pi-4b " * 20, states, said), width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    for name in ("sync-sgd", "fedavg", "dga"):
        assert any(line.startswith(name) for line in lines)


def test_sixteen_members_fit_a_usual_terminal_each_in_its_row(tmp_path: Path) -> None:
    write_run(tmp_path / "dga", replace(DGA, members=16, steps=20), upto=10)
    lines = drawn(Frame("digits", (watched(tmp_path / "dga").state(),), ()), 100, 30)
    assert {line.split()[0] for line in lines if re.match(r"m\d", line)} == {
        f"m{i}" for i in range(16)
    }


def test_who_holds_the_run_up_is_shown_and_members_keep_their_places(tmp_path: Path) -> None:
    write_run(tmp_path / "dga", replace(DGA, members=16, steps=40, lost="m3"), upto=30)
    state = watched(tmp_path / "dga").state()
    lines = drawn(Frame("", (state,), ()), 100, 12)
    rows = [line.split()[0] for line in lines if re.match(r"m\d", line)]
    assert rows[0] == "m3"
    assert {"m15", "m14"} <= set(rows)
    assert "m0" not in rows
    assert rows == sorted(rows, key=lambda name: int(name[1:]))
    (lost,) = [line for line in lines if line.startswith("m3 ")]
    assert lost.endswith("gone")
    assert any(re.match(r"and \d+ more at step 30, busy 52\.0 ms to", line) for line in lines)


def test_without_room_for_members_there_are_only_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "dga", DGA, upto=10)
    lines = drawn(Frame("", (watched(tmp_path / "dga").state(),), ()), 100, 7)
    assert len(lines) == 2


@given(st.floats(0, 1), st.integers(1, 40), st.booleans())
def test_a_bar_has_its_width_and_is_full_only_at_the_end(
    done: float, width: int, ascii_only: bool
) -> None:
    shown = bar(done, width, ascii_only=ascii_only)
    assert len(shown) == width
    assert shown.isascii() or not ascii_only
    if done < 1:
        assert shown[-1] in ".\u2500"
    else:
        assert set(shown) <= set("#\u2501")


def test_the_view_follows_a_growing_run_and_leaves_the_last_word(tmp_path: Path) -> None:
    clock, out, story = Clock(), io.StringIO(), replace(FEDAVG, steps=60, members=3, lost="m1")
    console = Console(file=out, width=100, height=30, force_terminal=True, color_system=None)
    folder = create_inside(tmp_path, "fedavg")
    write_job(folder, {"task": "t:t", "train": {"steps": 60}})
    with LiveView([folder], clock=clock, cpu=no_cpu, heading="digits", console=console) as view:
        for now in write_metrics(folder, story):
            clock.now = now
            view.refresh()
    text = out.getvalue()
    assert len(set(re.findall(r"(\d+)/60", text))) > 20
    assert "m1 was lost at" in text
    last = text[text.rindex("run  ") :]
    assert "60/60" in last
    assert "finished" in last
    assert "\nm0" not in last


def no_cpu() -> float:
    """Drawing takes no time: importing rich, in the first test of a process, would."""
    return 0.0


def test_the_view_looks_a_few_times_a_second_and_draws_only_news(tmp_path: Path) -> None:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, width=100, height=30, force_terminal=True)
    write_run(tmp_path / "dga", DGA, upto=10)
    folders = [tmp_path / "dga"]
    with LiveView(folders, clock=clock, cpu=no_cpu, console=console) as view:
        view.refresh()
        drawn_once = len(out.getvalue())
        write_run(tmp_path / "dga", DGA, upto=20)
        clock.now = 0.1
        view.refresh()
        assert len(out.getvalue()) == drawn_once
        clock.now = 0.3
        view.refresh()
        drawn_twice = len(out.getvalue())
        assert drawn_twice > drawn_once
        clock.now = 1.0
        view.refresh()
        assert len(out.getvalue()) == drawn_twice


class SlowTerminal(io.StringIO):
    """Each write takes some milliseconds of the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.writes = 0

    def write(self, text: str) -> int:
        self.clock.now += 0.008
        self.writes += 1
        return super().write(text)


def test_where_drawing_is_slow_it_is_done_more_rarely(tmp_path: Path) -> None:
    clock = Clock()
    out = SlowTerminal(clock)
    view = LiveView([tmp_path], clock=clock, cpu=clock, out=out)
    view.verbose = True
    write_run(tmp_path, DGA, upto=10)
    view.refresh()
    assert out.writes > 0
    assert 0.01 < clock.now < 0.04
    cost, writes = clock.now, out.writes
    write_run(tmp_path, DGA, upto=20)
    clock.now = cost * 49
    view.refresh()
    assert out.writes == writes
    clock.now = cost * 52
    view.refresh()
    assert out.writes > writes


def test_on_a_busy_machine_it_is_drawn_as_often_as_on_an_idle_one(tmp_path: Path) -> None:
    """What a look takes by the clock is not what it costs: others had the processor."""
    clock, cpu = Clock(), Clock()
    out = SlowTerminal(clock)
    view = LiveView([tmp_path], clock=clock, cpu=cpu, out=out)
    view.verbose = True
    write_run(tmp_path, DGA, upto=10)
    view.refresh()
    writes, clock.now = out.writes, 0.3
    write_run(tmp_path, DGA, upto=20)
    view.refresh()
    assert out.writes > writes


def test_however_dear_a_look_is_the_next_is_two_seconds_away(tmp_path: Path) -> None:
    clock, cpu, out = Clock(), Clock(), io.StringIO()
    view = LiveView(
        [tmp_path], clock=clock, cpu=lambda: (setattr(cpu, "now", cpu.now + 9), cpu.now)[1], out=out
    )
    write_run(tmp_path, DGA, upto=10)
    view.refresh()
    said = out.getvalue()
    write_run(tmp_path, DGA, upto=20)
    for clock.now, more in ((1.9, False), (2.1, True)):
        view.refresh()
        assert (out.getvalue() != said) is more


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live") / "dga"
    return write_run(folder, replace(DGA, members=8, steps=40), upto=20)


@given(widths=st.lists(st.integers(40, 130), min_size=1, max_size=6))
def test_a_terminal_that_breaks_its_rows_again_keeps_no_pieces_of_older_frames(
    half_way: Path, widths: list[int]
) -> None:
    clock, out, said = Clock(), ReflowingTerminal(120, 100), []
    console = Console(file=out, width=120, height=100, force_terminal=True, color_system=None)
    with LiveView(
        [half_way], clock=clock, cpu=no_cpu, heading="digits: 8 members", console=console
    ) as view:
        view.refresh()
        for place, width in enumerate(widths):
            console.width = width
            out.resize(width)
            if place % 2:
                said.append(f"said-{place}")
                view.say_above(said[-1])
            clock.now += 5.0
            view.refresh()
            frame = ["digits:", "run", "dga", "member", *(f"m{i}" for i in range(8))]
            assert [row.split()[0] for row in out.shown] == [*said, *frame]
    assert [row.split()[0] for row in out.shown] == [*said, *frame[:3]]


def test_where_a_terminal_cuts_its_rows_nothing_above_the_frame_is_erased() -> None:
    assert cuts_rows({"TERM": "xterm-256color", "XTERM_VERSION": "XTerm(390)"})
    assert cuts_rows({"TERM": "screen", "STY": "4711.pts-0.pi"})
    assert not cuts_rows({"TERM": "tmux", "TMUX": "/tmp/tmux-0/default", "XTERM_VERSION": "x"})
    assert not cuts_rows({"TERM": "xterm-256color"})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "drawn_in_place"), [("xterm-256color", True), ("dumb", False)])
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str, drawn_in_place: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    out = Terminal()
    write_run(tmp_path / "dga", DGA, upto=20)
    with LiveView([tmp_path / "dga"], clock=Clock(), cpu=no_cpu, out=out) as view:
        view.refresh()
    assert ("\x1b[?25l" in out.getvalue()) is drawn_in_place
    assert ("dga: step 20/400" in out.getvalue()) is not drawn_in_place


# --- a pipe or a file ---


def test_plain_lines_come_at_most_every_two_seconds_and_events_at_once(tmp_path: Path) -> None:
    clock, out, story = Clock(), io.StringIO(), replace(DGA, steps=400, members=3, lost="m1")
    write_job(tmp_path, {"task": "t:t", "train": {"steps": 400}})
    with LiveView([tmp_path], clock=clock, cpu=no_cpu, heading="digits", out=out) as view:
        view.verbose = True
        for now in write_metrics(tmp_path, story):
            clock.now = now
            view.refresh()
    lines = out.getvalue().splitlines()
    name = tmp_path.name
    assert lines[0] == "digits"
    assert lines[1] == f"{name}: 3 members joined"
    assert f"{name}: m1 was lost at 10.5 s: silent for 5.0 s" in lines
    progress = [line for line in lines if "/step" in line]
    assert 9 <= len(progress) <= 12
    assert progress[-1].startswith(f"{name}: step 400/400, loss 0.050, held-out accuracy 98.")
    assert all(line.isascii() and len(line) < 200 for line in lines)


def test_a_run_of_hours_leaves_a_log_of_hundreds_of_lines_not_thousands(tmp_path: Path) -> None:
    clock, out = Clock(), io.StringIO()
    with LiveView([tmp_path], clock=clock, cpu=no_cpu, out=out) as view:
        for now in write_metrics(tmp_path, Story(members=1, steps=2000, compute_s=10.0)):
            clock.now = now
            view.refresh()
    assert 100 < len(out.getvalue().splitlines()) < 400


def test_a_slow_member_is_counted_and_not_told_every_round(tmp_path: Path) -> None:
    clock, out = Clock(), io.StringIO()
    folder = write_run(tmp_path / "20260131-142501-digits", DGA, upto=50)
    with MetricsLog(metrics_path(folder), "hub", clock, 0.0) as log:
        for _ in range(7):
            log.event("late", "round 3 closed at its deadline without it", about="m2")
        log.event("started", "8 members")
    with LiveView([folder], clock=clock, cpu=no_cpu, out=out) as view:
        view.verbose = True
        view.refresh()
        assert {m.name: m.standing for m in view.watches[0].state().members}["m2"] == "late"
    lines = out.getvalue().splitlines()
    begun = "digits: hub started training at 0 s: 8 members"
    assert lines[:2] == ["digits: 8 members joined", begun]
    assert all(line.startswith("digits: step 50/400") for line in lines[2:])
    assert "7 times late" in lines[2]


def test_names_and_reasons_from_afar_cannot_steer_the_terminal(tmp_path: Path) -> None:
    with MetricsLog(metrics_path(tmp_path), "m\x1b[2J", Clock(), 0.0) as log:
        log.event("error", "bad\x1b]0;title\x07\n[bold]thing")
    watch = FolderWatch(tmp_path)
    (line,) = news("dga", watch.read())
    assert line == "dga: m [2J had an error at 0 s: bad ]0;title  [bold]thing"
    assert all("\x1b" not in member.name for member in watch.state().members)


@pytest.mark.real
def test_watching_in_plain_lines_loads_neither_rich_nor_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "dga", DGA, upto=20)
    script = (
        "import sys, pathlib, time; from edgetrain.runs.reports.live.view import LiveView\n"
        "with LiveView([pathlib.Path(sys.argv[1])], clock=time.monotonic) as view:\n"
        "    view.refresh()\n"
        "print(sorted({'torch', 'zmq', 'numpy', 'rich'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "dga")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "step 20/400" in done.stdout


# --- nothing new ---


def test_a_table_of_a_run_that_says_nothing_shows_that_it_is_alive(tmp_path: Path) -> None:
    """A member that computes for seconds, or a busy machine, must not look like a dead table."""
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, width=100, height=20, force_terminal=True)
    (tmp_path / "dga").mkdir()
    with LiveView(
        [tmp_path / "dga"], clock=clock, cpu=no_cpu, heading="digits", console=console
    ) as view:
        frames = []
        for _ in range(60):
            clock.now += 0.1
            before = out.tell()
            view.refresh()
            if out.tell() > before:
                frames.append(clock.now)
    gaps = [later - earlier for earlier, later in zip([0.0, *frames], frames, strict=False)]
    assert max(gaps) < 2.0
    assert len(frames) < 10
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "digits (5 s; nothing new for 5 s)" in said


def test_a_narrow_terminal_keeps_the_clock_and_the_reason_of_news(tmp_path: Path) -> None:
    run = watched(write_run(tmp_path / "dga", replace(DGA, steps=20, members=2), upto=9)).state()
    heading = "digits: 8 members, network wan-200ms, 320 steps each: sync-sgd, fedavg, dga"
    paced = (
        "dga: hub changed the pace at 13.3 s: round length raised from 10 to 15 steps: the hub, "
        "or a link, needs 1.0 s a round, members begin one every 200 ms"
    )
    lines = drawn(Frame(heading, (run,), (paced, paced * 3), True, " (31 s)"), 80, 24)
    assert lines[0].endswith("… (31 s)")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert " ".join(line.strip() for line in lines[-4:-2]) == paced
    assert lines[-1].endswith("…")


def test_the_clock_of_a_table_ends_with_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "dga", replace(DGA, steps=20, members=2))
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, width=100, height=20, force_terminal=True)
    with LiveView([folder], clock=clock, cpu=no_cpu, heading="digits", console=console) as view:
        clock.now = 9.0
        view.refresh()
    assert "(9 s" not in out.getvalue()


def test_a_small_fleet_stands_in_the_order_of_its_names(tmp_path: Path) -> None:
    write_run(tmp_path / "dga", replace(DGA, members=11, steps=40, lost="m9"), upto=30)
    lines = drawn(Frame("", (watched(tmp_path / "dga").state(),), ()), 100, 30)
    rows = [line.split()[0] for line in lines if re.match(r"m\d", line)]
    assert rows == [f"m{place}" for place in range(11)]


def test_what_a_member_has_not_told_yet_is_not_a_number(tmp_path: Path) -> None:
    (tmp_path / "dga").mkdir()
    with MetricsLog(metrics_path(tmp_path / "dga"), "hub", Clock(), 0.0) as log:
        log.event("joined", about="m0")
    lines = drawn(Frame("", (watched(tmp_path / "dga").state(),), ()), 120, 30)
    (row,) = [line for line in lines if line.startswith("m0")]
    assert "0 B" not in " ".join(lines)
    assert row.split()[-3:] == ["-", "-", "-"]


@pytest.mark.parametrize("runs", [1, 3])
def test_a_bar_survives_80_columns(tmp_path: Path, runs: int) -> None:
    stories = (SYNC, FEDAVG, DGA)[:runs]
    states = tuple(
        watched(write_run(tmp_path / story.strategy, story, upto=399)).state() for story in stories
    )
    lines = drawn(Frame("digits", states, ()), 80, 24)
    assert all(re.search("[\u2501\u2500]{5}", line) for line in lines[2 : 2 + runs]), lines


def test_overruns_are_one_line_a_run(tmp_path: Path) -> None:
    clock, out = Clock(), io.StringIO()
    (tmp_path / "dga").mkdir()
    with LiveView([tmp_path / "dga"], clock=clock, cpu=no_cpu, out=out) as view:
        for place in range(4):
            with MetricsLog(metrics_path(tmp_path / "dga"), f"m{place}", clock, 0.0) as log:
                log.event("overrun", "40 of 60 steps took longer than the device would have")
            clock.now += 0.5
            view.refresh()
    assert out.getvalue().count("was too slow") == 1


def test_what_all_members_say_is_told_once_with_its_range() -> None:
    def said(member: str, divergence: float, word: str = "decay") -> dict[str, object]:
        reason = f"{word}: divergence over 3 rounds is {divergence} (below 1.25: similar data)"
        keys = {"event": "correction", "reason": reason}
        return {"kind": "event", "t": 2.4, "member": member, **keys}

    lines = news("dga", [said("m0", 0.22), said("m1", 0.3, "predict"), said("m2", 0.29)])
    assert lines == [
        'dga: m0 and m2 chose the correction "decay" at 2.4 s: divergence over 3 rounds is '
        "0.22 to 0.29 (below 1.25: similar data)",
        'dga: m1 chose the correction "predict" at 2.4 s: divergence over 3 rounds is 0.3 '
        "(below 1.25: similar data)",
    ]


def test_members_that_come_and_go_are_told_in_one_line_with_names_if_they_are_few() -> None:
    def gone(member: int, t: float, why: str = "unreachable for 5 s") -> dict[str, object]:
        keys = {"event": "gone", "reason": why, "about": f"m{member}"}
        return {"kind": "event", "t": t, "member": "hub", **keys}

    records = [gone(place, 60.0 + place) for place in range(7)]
    removed = {**gone(8, 63.0, "its owner asked"), "event": "removed"}
    assert news("far", [*records, removed, removed]) == [
        "far: 7 members were lost from 1m00s to 1m06s: unreachable for 5 s",
        *["far: m8 was removed at 1m03s: its owner asked"] * 2,
    ]
    assert news("far", [gone(1, 1.0, "off for 3.5 s"), gone(3, 1.2, "off for 40 s")]) == [
        "far: m1 and m3 were lost from 1.0 s to 1.2 s: off for 3.5 to 40 s"
    ]


_ROUTINE_EVENTS = ("joined", "started", "finished", "left", "correction", "absence")
_WARNINGS = ("refused", "removed", "error", "overrun", "gone", "back", "pace")


@given(events=st.lists(st.sampled_from((*_ROUTINE_EVENTS, *_WARNINGS)), max_size=12))
def test_without_routine_there_are_the_warnings_and_nothing_else(events: list[str]) -> None:
    """Each warning that is told with details is told without them, in the same words."""
    records = [
        {"kind": "event", "t": 1.0, "member": f"m{place}", "event": event, "reason": "decay: why"}
        for place, event in enumerate(events)
    ]
    warnings = [each for each in records if each["event"] in _WARNINGS]
    assert news("far", records, routine=False) == news("far", warnings)


@pytest.mark.parametrize("terminal", [False, True])
def test_routine_news_is_shown_to_those_who_ask(tmp_path: Path, terminal: bool) -> None:
    folder = write_run(tmp_path / "dga", replace(DGA, steps=40, members=3, lost="m1"), upto=30)
    with MetricsLog(metrics_path(folder), "m0", Clock(), 0.0) as log:
        log.event("correction", "decay: similar data")
    said = {}
    for verbose in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=100, height=30, force_terminal=True, color_system=None)
        with LiveView(
            [folder], clock=Clock(), cpu=no_cpu, out=out,
            console=console if terminal else None,
        ) as view:  # fmt: skip
            view.verbose = verbose
            view.refresh()
        said[verbose] = out.getvalue()
    assert 'm0 chose the correction "decay"' in said[True]
    assert "chose" not in said[False]
    assert "joined" not in said[False]
    assert all("dga" in text for text in said.values())
