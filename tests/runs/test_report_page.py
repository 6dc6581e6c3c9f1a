"""The page about runs: whole for any folder, nothing to load, every text readable, sums true."""

from __future__ import annotations

import itertools
import re
import shutil
from html.parser import HTMLParser
from importlib.resources import files
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import DGA, SYNC, Clock, replace, write_comparison, write_run

from edgetrain.errors import ConfigError
from edgetrain.runs.folder import METRICS, metrics_path, write_job
from edgetrain.runs.kept import EXCHANGE, Columns
from edgetrain.runs.metrics.lines import format_line
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.reports import units
from edgetrain.runs.reports.message import message
from edgetrain.runs.reports.page import charts, svg
from edgetrain.runs.reports.page.document import document
from edgetrain.runs.reports.page.story import report_of
from edgetrain.runs.reports.page.svg import Scale

SHORT = replace(DGA, members=3, steps=60)


def with_exchanges(folder, story, took_s=0.2):
    """A run whose members exchange every few steps; each exchange takes `took_s`."""
    write_run(folder, story)
    clock = Clock()
    for number in range(story.members):
        with MetricsLog(metrics_path(folder), f"m{number}", clock, 0.0) as log:
            for round in range(story.steps // story.exchanges_every):
                submitted = (round + 1) * story.exchanges_every * story.step_s
                clock.now = submitted + took_s
                log.exchange(
                    round=round, submitted=submitted, arrived=clock.now - 0.01, submit_s=0.001,
                    decode_s=0.0, apply_s=0.001, sent_bytes=100, received_bytes=100,
                    members=story.members,
                    local_steps=2,
                    delay=2,
                )  # fmt: skip
    return folder


class Page(HTMLParser):
    """Tags that are open, addresses that something would be loaded from, and the words."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.words = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "input", "br", "path", "rect"):
            self.open.append(tag)
        found = dict(attributes)
        self.loads += [found[key] for key in ("src", "href", "data", "srcset") if key in found]
        assert tag != "script"

    def handle_endtag(self, tag):
        if tag not in ("path", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(page):
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    assert parser.loads == []
    assert "@import" not in page
    assert "url(" not in page.replace("url(#", "")
    for drawn in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawn)
    return " ".join(parser.words)


def test_one_run_has_every_part_and_loads_nothing(tmp_path):
    story = replace(SHORT, steps=200)
    words = read(document(report_of([with_exchanges(tmp_path / "run", story)])))
    for part in (
        "Figure and loss",
        "Where the time of a step goes",
        "the middle",
        "Job and machine",
    ):
        assert part in words
    assert "step 100: compute" in words


def test_the_final_sync_and_the_ages_of_contributions_are_on_the_page(tmp_path):
    plain, aged = (write_run(tmp_path / name, SHORT) for name in ("plain", "aged"))
    assert "final sync from" not in read(document(report_of([plain])))
    clock = Clock()
    with MetricsLog(metrics_path(aged), "hub", clock, 0.0) as log:
        paces = [(10, 5, False), (10, 5, False), (10, 5, False), (7, 0, True), (7, 0, True)]
        for round, (local_steps, delay, final_sync) in enumerate(paces):
            clock.now = 1.0 + round
            log.round(
                round=round, members=["m0", "m1"], missing=[], weight=2.0, close_s=0.1,
                sent_bytes=1, received_bytes=1, cpu_s=0.0, peak_bytes=1, local_steps=local_steps,
                delay=delay, final_sync=final_sync, ages=[round, 2 * round],
            )  # fmt: skip
    words = read(document(report_of([aged])))
    assert "final sync from 4.0 s to 5.0 s: 2 rounds of 7 steps" in words
    table = words[words.index("age of contributions, in replies") :]
    # Medians of pairs are the lower: of 0, 1, 2, 3, 4; the highest are 0, 2, 4, 6, 8.
    assert " 5 2 4 8 " in " ".join(table.split())


def test_a_comparison_says_who_was_faster(tmp_path):
    write_comparison(
        tmp_path, replace(SYNC, steps=200, members=2), replace(DGA, steps=200, members=2)
    )
    words = read(document(report_of([tmp_path])))
    assert re.search(r"dga reaches 97 % [\d.]+ times sooner than sync-sgd", words)


def test_names_and_reasons_of_other_machines_are_escaped(tmp_path):
    folder = write_run(tmp_path / "run", SHORT)
    with MetricsLog(metrics_path(folder), "<b>hub", Clock(9.0), 0.0) as log:
        log.event("error", "<script>alert(1)</script> & more")
    assert "<script>alert(1)</script> & more" in read(document(report_of([folder])))


def test_torn_and_foreign_lines_are_left_out_and_counted(tmp_path):
    folder = write_run(tmp_path / "run", SHORT)
    with (folder / METRICS).open("ab") as file:
        file.write(b'{"kind":"step","t":1.0,"member":"m0"}\n{"kind":"exchange","t":')
        file.write(b'1,"member":"m9","round":"x","submitted_t":{},"arrived_t":1}\nnoise\n')
        file.write(b'{"kind":"of a later version","t":1.0,"member":"m0"}\n')
    assert "3 lines of metrics could not be read" in read(document(report_of([folder])))


def test_a_run_that_is_not_over_or_was_never_evaluated_has_a_page(tmp_path):
    read(document(report_of([write_run(tmp_path / "short", SHORT, upto=3)])))
    read(document(report_of([write_run(tmp_path / "none", SHORT, upto=0)])))


def test_a_hub_and_its_members_are_one_run(tmp_path):
    whole = with_exchanges(tmp_path / "whole", SHORT)
    parts = []
    for name in ("hub", *(f"m{i}" for i in range(SHORT.members))):
        part = tmp_path / name
        part.mkdir()
        shutil.copy(whole / "job.toml", part)
        lines = (whole / METRICS).read_bytes().splitlines(keepends=True)
        mark = b'"member":"%b"' % name.encode()
        (part / METRICS).write_bytes(b"".join(line for line in lines if mark in line))
        parts.append(part)
    (one,), (joined,) = report_of([whole]), report_of(parts)
    assert joined.members.keys() == one.members.keys()
    assert joined.seconds == one.seconds
    assert joined.evaluations == one.evaluations
    for key in ("steps", "sent_bytes", "received_bytes", "seconds"):
        assert joined.summary[key] == one.summary[key]
    assert joined.summary["compute_s"] == pytest.approx(one.summary["compute_s"])
    read(document([joined]))


def test_members_are_called_by_the_names_that_their_machines_were_enrolled_under(tmp_path):
    folder = with_exchanges(tmp_path / "run", SHORT)
    with MetricsLog(metrics_path(folder), "hub", Clock(1.0), 0.0) as log:
        log.status(about="m0", name="<i>pi\n", keys={"step": 1})
        log.status(about="m1", name="a-board-in-the-far-corner", keys={"step": 1})
    (story,) = report_of([folder])
    called = [charts.called(story.members[name]) for name in ("m0", "m1")]
    assert called == ["m0 <i>pi ", "m1 a-board-in-the-f…"]
    page = read(document([story]))
    assert "m0 <i>pi" in page
    assert "m1 a-board-in-the-f…" in page


def test_what_cannot_be_a_page_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, said in (("nothing", "does not exist"), ("file", "no folder"), ("empty", "no run")):
        with pytest.raises(ConfigError, match=said):
            report_of([tmp_path / name])
    first, second = (write_run(tmp_path / name, SHORT) for name in ("a", "b"))
    job = {"task": "edgetrain.tasks:mnist"}
    (second / "summary.json").unlink()
    write_job(second, job)
    with pytest.raises(ConfigError, match="different tasks"):
        report_of([first, second])


def test_the_parts_of_a_step_add_up_to_the_clock(tmp_path):
    (story,) = report_of([with_exchanges(tmp_path / "run", replace(SYNC, members=1, steps=40))])
    member = story.members["m0"]
    assert sum(member.seconds) == pytest.approx(story.seconds, rel=0.01)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 30)), max_size=40))
def test_exchanges_in_one_row_do_not_overlap(spans):
    exchanges = Columns(EXCHANGE)
    for number, (at, took) in enumerate(spans):
        exchanges.add({"round": number, "submitted_t": at, "t": at + took})
    rows = charts.stacked(exchanges.rows)
    assert sorted(e["round"] for row in rows for e in row) == list(range(len(spans)))
    for row in rows[:11]:
        for earlier, later in itertools.pairwise(row):
            assert earlier["t"] <= later["submitted_t"]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_lie_on_their_axis_and_are_few(low, span):
    axis = Scale(low, low + span, "", str)
    ticks = axis.ticks()
    assert len(ticks) <= 8
    slack = 1e-6 * (abs(low) + span)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)


def test_a_diverged_member_does_not_flatten_the_chart():
    _, high = charts.value_range([2.0, 1.0, 0.5, 0.4, 1e31], None, False)
    assert high < 20


def test_every_colour_of_text_can_be_read():
    """WCAG 2: a contrast of 4.5 for text, 3 for what is drawn."""
    sheet = files("edgetrain.runs.reports.page").joinpath("page.css").read_text("utf-8")
    light, dark = re.findall(r":root\{(.*?)\}", sheet, re.DOTALL)[:2]
    for palette in (light, dark):
        colours = dict(re.findall(r"--(\w+):(#[0-9a-f]+)", palette))
        for name in ("ink", "soft", "note"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, name
            assert contrast(colours[name], colours["lane"]) >= 4.5, name
        for name in ("compute", "wait", "overhead", "flight", "kept", *(f"s{i}" for i in range(7))):
            assert contrast(colours[name], colours["paper"]) >= 3, name


def contrast(one, other):
    first, second = sorted((luminance(one), luminance(other)))
    return (second + 0.05) / (first + 0.05)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * char for char in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_message_without_a_target_reached_tells_the_ends(tmp_path):
    stories = report_of(
        write_comparison(
            tmp_path, replace(SYNC, steps=20, members=2), replace(DGA, steps=20, members=2)
        )
    )
    from edgetrain.runs.reports.comparison import compare

    said = message(compare([story.summary for story in stories]))
    assert said.startswith("No run reaches 97 %: sync-sgd")


def test_no_word_below_an_axis_leaves_the_picture():
    axis = Scale(0.0, 80.0, "time", units.duration)
    picture = svg.lines([], axis, Scale(0.0, 1.0, "accuracy", str), "a chart")
    for x, anchor, words in re.findall(
        r'<text x="([\d.]+)"[^>]*anchor="(\w+)"[^>]*>([^<]*)', picture
    ):
        wide = 6.2 * len(words) * {"start": 1, "middle": 0.5, "end": 0}[anchor]
        assert float(x) + wide <= svg.WIDTH, words


def test_what_happened_is_marked_on_the_figure_and_said_what_it_is(tmp_path):
    folder = with_exchanges(tmp_path / "dga", SHORT)
    for t, delay in ((0.5, 4), (1.5, 12)):
        with MetricsLog(metrics_path(folder), "hub", Clock(t), 0.0) as log:
            log.event("fault", "uplink down <b>")
            log.round(round=1, members=[], missing=[], weight=1.0, close_s=0.0, sent_bytes=0,
                received_bytes=0, cpu_s=0.0, peak_bytes=0, delay=delay, local_steps=5)  # fmt: skip
    with MetricsLog(metrics_path(folder), "hub", Clock(1e4), 0.0) as log:
        log.event("fault", "after the last figure")
    page = document(report_of([folder]))
    words = read(page)
    assert "faults: 2" in words
    assert "changes of the delay: " in words
    assert f'd="{svg.SHAPES["fault"]}" transform' in page
    assert f'd="{svg.SHAPES["delay"]}" transform' in page
    assert "hub fault: uplink down &lt;b&gt;" in page
    assert len(set(svg.SHAPES.values())) == len(svg.SHAPES)


def test_an_exchange_shows_its_seconds_and_bytes_each_way(tmp_path):
    words = read(document(report_of([with_exchanges(tmp_path / "dga", SHORT)])))
    assert re.search(r"m0 +12 +190 ms +1\.00 ms +- +1\.00 ms +100 B +100 B", words)
    assert "An exchange" not in read(document(report_of([write_run(tmp_path / "old", SHORT)])))


def test_only_what_is_wrong_looks_like_a_warning(tmp_path):
    well = write_run(tmp_path / "well", replace(SHORT, lost="m2"))
    page = document(report_of([well]))
    assert '<p class="remark">dga lost m2</p>' in page
    assert 'class="note"' not in page
    late = document(report_of([write_run(tmp_path / "late", replace(SHORT, timing_ok=False))]))
    assert '<p class="note">dga: the emulated network was itself late' in late


def test_a_timeline_says_which_members_it_leaves_out(tmp_path):
    crowd = replace(SHORT, members=12)
    one = document(report_of([with_exchanges(tmp_path / "one", crowd)]))
    assert ", the first 8 of 12 members" in one
    two = [with_exchanges(tmp_path / "two", replace(crowd, strategy="fedavg")), tmp_path / "one"]
    assert "fedavg, the first 3 of 12 members" in document(report_of(two))
    few = document(report_of([with_exchanges(tmp_path / "few", SHORT)]))
    assert "the first" not in few


def test_a_run_without_exchanges_shows_how_its_members_differ(tmp_path):
    write_run(tmp_path / "run", replace(DGA, members=70, steps=20))
    page = read(document(report_of([tmp_path / "run"])))
    assert "recorded no exchanges" in page
    assert "70 members, how many of them have at most this" in page
    (story,) = report_of([tmp_path / "run"])
    for _, values in charts.shares_of_members(story):
        assert len(values) == 5
        assert values == sorted(values)


def test_the_training_loss_is_a_median_of_members_with_their_range(tmp_path):
    write_run(tmp_path, SHORT)
    words = read(document(report_of([tmp_path])))
    assert "training loss (median of members), shaded: their range" in words
    with metrics_path(tmp_path).open("wb") as file:
        losses = {"a": 0.0001, "b": 0.0002, "c": 0.9}
        for t, (name, loss) in itertools.product(range(150), losses.items()):
            file.write(format_line({"kind": "step", "t": float(t), "member": name, "step": 1 + t,
                "loss": loss, "sent_bytes": 0, "received_bytes": 0}))  # fmt: skip
    (story,) = report_of([tmp_path])
    assert {each[1:] for each in charts.losses_of(story)} == {(0.0002, 0.0001, 0.9)}


def test_bytes_of_the_fleet_go_on_where_a_member_was_started_again(tmp_path):
    lines = [(1.0, "a", 10, 1), (2.0, "b", 5, 2), (3.0, "a", 4, 3), (4.0, "b", 6, 3)]
    with metrics_path(tmp_path).open("wb") as file:
        for t, name, sent, received in lines:
            file.write(format_line({"kind": "step", "t": t, "member": name, "step": 1,
                "sent_bytes": sent, "received_bytes": received}))  # fmt: skip
    (story,) = report_of([tmp_path])
    assert list(story.steps["sent_bytes"]) == [10, 15, 19, 20]
    assert list(story.bytes_at([0.5, 2.5, 9.0])) == [0, 18, 26]
    assert "sent, and received (dashed)" in read(document([story]))


def test_the_busiest_member_comes_first_and_what_it_does_before_its_waits(tmp_path):
    folder = write_run(tmp_path / "run", replace(SHORT, members=5, wait_s=0.1))
    drawn = charts.bars(report_of([folder]))
    assert re.findall(r'"end" class="tick">(m\d)', drawn) == ["m4", "m3", "m2", "m1", "m0"]
    kinds = re.findall(r'class="(\w+)"><title>m4', drawn)
    assert kinds == ["compute", "overhead", "eval", "wait", "end"]
