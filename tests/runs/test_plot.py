"""The pictures: made whole, and with every word inside the picture and beside no other."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from figure_texts import check
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import DGA, FEDAVG, SYNC, Clock, write_comparison, write_run

from edgetrain import errors
from edgetrain.errors import ConfigError
from edgetrain.runs.folder import metrics_path, read_summary, write_summary
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.reports import plot
from edgetrain.runs.reports.plot import style
from edgetrain.runs.reports.plot.bars import draw_stacked
from edgetrain.runs.reports.plot.ends import spread
from edgetrain.runs.summary import summarise

pytest.importorskip("matplotlib")

from matplotlib.text import Text

MIX = "raspberry-pi-4b:4, jetson-orin-nano:2, laptop-i5:2"


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_comparison(tmp_path_factory.mktemp("usual"))


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_a_comparison_is_written_whole(usual: list[Path], tmp_path: Path) -> None:
    path = plot.save(lambda: plot.draw_comparison(usual), tmp_path / "compare.png")
    assert size_of(path) == (1800, 1200)
    assert [found.name for found in tmp_path.iterdir()] == ["compare.png"]


def test_a_comparison_says_what_was_run_and_how_much_sooner(usual: list[Path]) -> None:
    texts = check(plot.draw_comparison(usual))
    assert "digits, 8 x raspberry-pi-4b, wan-200ms" in texts
    assert "dga reaches 97 % 9.7 times sooner than sync-sgd" in texts
    assert {"sync-sgd 1m11s", "dga 7.3 s, 9.7x", "accuracy against time (dot: 97 %)"} <= set(texts)
    assert {"sync-sgd 98.6 %", "dga 98.7 %", "target 97 %"} <= set(texts)
    assert "network emulated by 'packet'; speed-up against sync-sgd" in texts
    assert {"compute", "wait", "overhead", "milliseconds per step"} <= set(texts)


def test_an_untrusted_run_is_marked_and_explained(tmp_path: Path) -> None:
    folders = write_comparison(tmp_path, SYNC, replace(DGA, timing_ok=False))
    texts = check(plot.draw_comparison(folders))
    assert "dga *" in texts
    assert "dga * 7.3 s, 9.7x" in texts
    assert any(text.endswith("(late emulation: not to be trusted)") for text in texts)
    assert any("* dga: the emulated network was itself late" in text for text in texts)


def test_a_single_untrusted_run_is_explained_in_its_picture(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "dga", replace(DGA, timing_ok=False))
    texts = check(plot.draw_comparison([folder]))
    assert any("the emulated network was itself late" in text for text in texts)


def test_many_runs_with_long_names_stay_readable(tmp_path: Path) -> None:
    stories = [
        replace(DGA, strategy=f"streaming-diloco-{i}", compute_s=0.05 + 0.01 * i, network="4g")
        for i in range(12)
    ]
    stories[0] = replace(SYNC, device=MIX, network="wifi:4, 4g-bad:4", wait_s=1.2, timing_ok=False)
    check(plot.draw_comparison(write_comparison(tmp_path, *stories)))


def test_a_loss_counts_downwards(tmp_path: Path) -> None:
    folders = write_comparison(tmp_path, replace(SYNC, steps=60), DGA)
    for folder in folders:
        down = {"name": folder.name, "metric": "loss", "better": "lower", "target": 0.05}
        write_summary(folder, summarise(folder, down))
    texts = check(plot.draw_comparison(folders))
    said = "dga reaches loss 0.05 over 4.2 times sooner than sync-sgd, which does not"
    assert {said, "sync-sgd, not reached", "dga 6.8 s, over 4.2x"} <= set(texts)


def test_time_is_logarithmic_only_where_the_fastest_would_be_squeezed(
    usual: list[Path], tmp_path: Path
) -> None:
    assert plot.draw_comparison(usual).axes[0].get_xscale() == "linear"
    slow = write_comparison(tmp_path, replace(SYNC, wait_s=1.5), DGA)
    figure = plot.draw_comparison(slow)
    assert figure.axes[0].get_xscale() == "log"
    check(figure)


def test_a_run_that_was_never_evaluated_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "dga", DGA, upto=3)
    assert "not evaluated yet" in check(plot.draw_comparison([folder]))


def test_an_empty_run_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    check(plot.draw_comparison([tmp_path / "run"]))


@pytest.mark.parametrize("members", [1, 64])
def test_a_run_has_a_picture_of_its_own(tmp_path: Path, members: int) -> None:
    story = replace(FEDAVG, members=members, steps=60, lost="m0" if members > 1 else None)
    folder = write_run(tmp_path / "fedavg", story)
    texts = check(plot.draw_comparison([folder]))
    assert f"digits, {members} x raspberry-pi-4b, wan-200ms" in texts
    assert size_of(plot.save(lambda: plot.draw_comparison([folder]), folder / "a.png")) == (
        1800, 1200,
    )  # fmt: skip


def test_a_name_is_never_taken_for_a_formula(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "dga", replace(DGA, steps=20))
    summary = {
        **(read_summary(folder) or {}),
        "strategy": r"a $\frac{1}{0$ b",
        "device": "$x$",
    }
    write_summary(folder, summary)
    check(plot.draw_comparison([folder]))


def test_no_run_and_no_room_are_clear_errors(usual: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to draw"):
        plot.save(lambda: plot.draw_comparison([]), tmp_path / "compare.png")
    with pytest.raises(ConfigError, match="No such file or directory"):
        plot.save(lambda: plot.draw_comparison(usual), tmp_path / "absent" / "compare.png")


def test_without_matplotlib_the_way_out_is_named(
    usual: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\[lab\]"):
        plot.save(lambda: plot.draw_comparison(usual), tmp_path / "compare.png")


@pytest.mark.real
def test_importing_loads_no_matplotlib() -> None:
    script = "import sys, edgetrain.runs.reports.plot; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@given(
    st.lists(st.floats(0, 1), max_size=8), st.floats(0.01, 0.1),
)  # fmt: skip
def test_labels_at_the_ends_of_lines_stay_in_order_and_apart(
    values: list[float], gap: float
) -> None:
    places = spread(values, gap, 0.0, 1.0)
    order = sorted(range(len(values)), key=lambda place: values[place])
    for lower, upper in itertools.pairwise(order):
        assert places[upper] - places[lower] >= gap - 1e-9
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    if all(b - a >= gap for a, b in itertools.pairwise(sorted(values))):
        assert places == values


def test_faults_absences_drops_and_delays_are_marked_and_said_what_they_are(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "run", replace(DGA, members=3, steps=60, lost="m2"))
    for t, delay in ((0.5, 4), (1.0, 4), (1.5, 12)):
        with MetricsLog(metrics_path(folder), "hub", Clock(t), 0.0) as log:
            log.event("fault", "uplink down for 2 s")
            log.event("absence", about="m1")
            log.round(round=1, members=[], missing=[], weight=1.0, close_s=0.0, sent_bytes=0,
                received_bytes=0, cpu_s=0.0, peak_bytes=0, delay=delay, local_steps=5)  # fmt: skip
    said = {"faults: 3", "absences: 3", "members given up: 1"}
    figure = plot.draw_comparison([folder])
    texts = check(figure)
    assert said <= set(texts)
    assert any(text.startswith("changes of the delay: ") for text in texts)
    shapes = [line.get_marker() for line in figure.axes[0].get_lines()]
    assert {"X", "v", "s", "D"} <= set(shapes)
    assert len(shapes[shapes.index("X") :]) == 4


def test_a_sweep_says_what_it_shows_and_of_what(tmp_path: Path) -> None:
    points = [
        {"strategy": s, "rtt": str(rtt), "final": 0.97, "low": 0.97, "high": 0.97, "runs": 1,
         "fleet_steps_per_second": speed, "target_seconds": 3.0, "wait_s": 0.1, "sent_bytes": 1e6}
        for s, speeds in (("sync-sgd", (20, 8, 1.2)), ("dga", (20, 20, 20.0)))
        for rtt, speed in zip((0, 100, 1000), speeds, strict=True)
    ]  # fmt: skip
    axes = {"strategy": ["sync-sgd", "dga"], "rtt": ["0", "100", "1000"]}
    texts = check(plot.draw_sweep("rtt", axes, points, "accuracy", "digits, 8 members, 400 steps"))
    assert "Steps a second at rtt 1000 (rtt 0 = 100 %): dga 100 %, sync-sgd 6 %" in texts
    assert "digits, 8 members, 400 steps" in texts
    assert texts.count("dga") == texts.count("sync-sgd") == 4  # at the ends, in each panel


# -- what a picture must not hide -------------------------------------------------------------


def test_a_run_that_stays_far_below_its_target_can_be_seen(tmp_path: Path) -> None:
    bad = replace(DGA, half_life_steps=10_000.0)
    figure = plot.draw_comparison(write_comparison(tmp_path, SYNC, bad))
    against_time = figure.axes[0]
    low, _ = against_time.get_ylim()
    for line in against_time.get_lines()[:2]:
        assert max(line.get_ydata()) > low


def test_a_simulation_is_not_called_an_emulation(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", replace(DGA, members=3, steps=60))
    summary = read_summary(folder) or summarise(folder)
    write_summary(folder, summary | {"emulation": {"backend": "simulated"}})
    texts = check(plot.draw_comparison([folder]))
    assert "simulated, in virtual time" in texts
    assert not any("emulated by" in text for text in texts)


def test_remarks_are_red_only_where_something_is_wrong(tmp_path: Path) -> None:
    said = {}
    for name, story in (("well", replace(DGA, lost="m3")), ("ill", replace(DGA, timing_ok=False))):
        figure = plot.draw_comparison([write_run(tmp_path / name, story)])
        remarks = figure.get_supxlabel()
        (said[name],) = {
            text.get_color() for text in figure.findobj(Text) if text.get_text() == remarks
        }
    assert said["well"] == "#333333"
    assert said["ill"] == "#B00020"


def test_a_long_legend_below_bars_does_not_make_them_narrower() -> None:
    def width_of(parts: tuple[float, ...]) -> float:
        with style.styled():
            figure = style.new_figure((9.0, 3.0))
            bars, beside = figure.subplots(1, 2)
            draw_stacked(bars, ["dga"], [parts], ["#000000"])
            beside.set_xlabel("at the socket: sent, received (hatched)")
            figure.draw_without_rendering()
            return float(bars.get_position().width)

    assert width_of((0.02, 0.1, 0.01, 0.01, 0.01)) == pytest.approx(
        width_of((0.02, 0.1, 0.01)), rel=1e-3
    )


def test_marks_over_a_name_stand_beside_each_other() -> None:
    points = [
        {"strategy": s, "codec": c, "final": 0.9, "low": 0.9, "high": 0.9, "runs": 1,
         "steps_per_second": 1.0, "fleet_steps_per_second": 1.0, "target_seconds": 3.0,
         "wait_s": 0.1, "sent_bytes": 1e6}
        for s in ("fedavg", "dga") for c in ("fp32", "int8")
    ]  # fmt: skip
    axes = {"strategy": ["fedavg", "dga"], "codec": ["fp32", "int8"]}
    figure = plot.draw_sweep("codec", axes, points, "accuracy", "digits, 8 members")
    for panel in figure.axes:
        places = [tuple(line.get_xdata()) for line in panel.get_lines() if len(line.get_xdata())]
        assert len(set(places)) == len(places)
    assert "digits, 8 members" in check(figure)
