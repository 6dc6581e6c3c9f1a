"""Network profiles: the catalog is complete, and a bad value names file, key and range."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from edgetrain.errors import ConfigError
from edgetrain.fleet import catalog
from edgetrain.fleet.networks import Direction, load, names, parse, traces

FILE = Path("/somewhere/mine.toml")


@pytest.mark.parametrize("name", catalog.names("netem"))
def test_every_figure_of_the_catalog_has_a_source(name: str) -> None:
    profile = load(name)
    assert profile.title
    plain = dataclasses.asdict(Direction())
    for way in (profile.up, profile.down):
        for key, value in dataclasses.asdict(way).items():
            if value != plain[key] and key != "distribution":
                assert key in profile.source, f"{name}: {key} has no source"


def test_the_profiles_that_are_promised_are_there() -> None:
    promised = "ethernet home-fixed wifi 3g 4g-good 4g-medium 4g-bad 5g starlink geo-satellite"
    pairs = {
        "dallas-washington": 31,
        "washington-frankfurt": 91,
        "dallas-tokyo": 143,
        "london-tokyo": 242,
        "sydney-sao-paulo": 328,
    }
    assert set(promised.split()) | set(pairs) | {"inter-az"} <= set(names())
    for name, rtt_ms in pairs.items():
        assert load(name).rtt_ms == rtt_ms
    for rtt_ms in (50, 100, 200, 300, 500, 1000):
        assert load(f"wan-{rtt_ms}ms").rtt_ms == rtt_ms


def test_a_parametric_name_is_a_bare_round_trip() -> None:
    profile = load("rtt-500ms")
    assert profile.up == profile.down == Direction(delay_ms=250)
    assert load("none").up.is_plain


@pytest.mark.parametrize("name", ["rtt-ms", "rtt--5ms", "rtt-500", "rtt-999999ms"])
def test_a_parametric_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="rtt-0ms to rtt-120000ms"):
        load(name)


def test_an_unknown_name_says_the_near_miss() -> None:
    with pytest.raises(ConfigError, match="did you mean 'starlink'"):
        load("starlnk")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"up": {"delay_ms": -3}}, r"mine.toml: up.delay_ms = -3 .*0 to 60000 ms"),
        ({"both": {"loss_percent": 101}}, r"up.loss_percent = 101 .*0 to 100 %"),
        ({"both": {"delay_ms": 10, "distribution": "normel"}}, "did you mean 'normal'"),
        ({"up": {"dely_ms": 3}}, "no key 'up.dely_ms' .*did you mean 'delay_ms'"),
        ({"upp": {}}, "no key 'upp' .*did you mean 'up'"),
        ({"up": {"delay_ms": "3"}}, "up.delay_ms = '3' .*a number from 0 to 60000 ms"),
        ({"up": {"delay_ms": True}}, "= True .*a number from 0"),
        ({"up": {"delay_ms": float("nan")}}, "= nan .*a number from 0"),
        ({"up": 3}, "up = 3 .*a table"),
        ({"both": {"delay_ms": 10, "jitter_ms": 3}}, r"jitter_ms = 3 .*0 to 2.5 ms"),
        ({"up": {"burst": {"enter_percent": 1}}}, "up.burst.leave_percent is missing"),
        (
            {"up": {"burst": {"enter_percent": 1, "leave_percent": 0}}},
            "leave_percent = 0 .*0.001 to 100 %",
        ),
        ({"up": {"burst": 1}}, "up.burst = 1 .*a table"),
        (
            {"up": {"loss_percent": 1, "burst": {"enter_percent": 1, "leave_percent": 9}}},
            "exclude each other",
        ),
        ({"up": {"reorder_percent": 3}}, "up.reorder_percent .*none .*set up.delay_ms"),
        ({"up": {"rate_trace": "missing.trace"}}, "up.rate_trace = 'missing.trace' cannot be read"),
        ({"up": {"delay_trace": "no.csv"}}, "up.delay_trace = 'no.csv' cannot be read"),
        ({"title": 3}, "title = 3 .*is text"),
        ({"up": {"slow_start_after_idle": 0}}, "up.slow_start_after_idle = 0 .*is true or false"),
        ({"up": {"first_window": 2.5}}, "first_window = 2.5 .*an integer from 1 to 1000"),
        ({"both": {"first_window": 45}}, r"up.first_window = 45.*64 kB.*44 segments.*_kb = 137"),
        ({"up": {"receive_kb": 64}}, "up.receive_kb = 64 .*131 to 6000 kB"),
    ],
)
def test_a_bad_value_names_file_key_and_range(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse("mine", table, FILE)


def test_traces_are_read_where_the_profile_lies(tmp_path: Path) -> None:
    (tmp_path / "lte.trace").write_text("0\n1\n2\n4\n")
    (tmp_path / "delay.csv").write_text("seconds,delay_ms\n0,10\n1,30\n2,10\n")
    table = {"both": {"rate_trace": "lte.trace", "delay_trace": "delay.csv"}}
    profile = parse("mine", table, tmp_path / "mine.toml")
    assert profile.up.mean_rate_mbit == pytest.approx(4 * 1504 * 8 / 4000)
    assert profile.rtt_ms == pytest.approx(40)


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("rate_trace", "5\n3\n", "3 ms is earlier than the line before"),
        ("rate_trace", "fast\n", "'fast' is not a whole millisecond"),
        ("rate_trace", "", "no packet-delivery time"),
        ("delay_trace", "0,5\n", "needs two points"),
        ("delay_trace", "0,5\n0,6\n", "seconds must rise"),
        ("delay_trace", "0,5\n1,-6\n", "delay_ms = -6 is out of range"),
        ("delay_trace", "0,5\n1\n", "a.trace:2: not `seconds,delay_ms`"),
        ("delay_trace", "0,5\nnan,6\n", "a.trace:2: seconds = nan is out of range"),
        ("delay_trace", "0,5\n1,6\ninf,6\n", "a.trace:3: seconds = inf is out of range"),
        ("delay_trace", "0,5\n1,nan\n", "a.trace:2: delay_ms = nan is out of range"),
        ("delay_trace", "-1,5\n1,6\n", "a.trace:1: seconds = -1 is out of range"),
        ("delay_trace", "# s\n2,5\n3,6\n", "a.trace:2: the first point is not at 0 seconds"),
        ("delay_trace", "0,5\n1e-10,6\n", "a.trace:2: seconds must rise"),
        ("delay_trace", "0,5\n1,6\0\n", "a.trace:2: not `seconds,delay_ms`"),
        ("delay_trace", b"0,5\n1,6 \xb5\n", "a.trace:2: not text in UTF-8"),
        ("rate_trace", "1\n2\n".encode("utf-16"), "a.trace:1: not text in UTF-8"),
        ("rate_trace", "1\n-2\n", "a.trace:2: '-2' is not a whole millisecond"),
        ("rate_trace", "1\nnan\n", "a.trace:2: 'nan' is not a whole millisecond"),
        ("rate_trace", "1\n5000000000\n", "a.trace:2: '5000000000' is not a whole millisecond"),
        ("rate_trace", "1\n" + 5000 * "9", "a.trace:2: '9+' is not a whole millisecond"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path: Path, key: str, text: str | bytes, says: str) -> None:
    (tmp_path / "a.trace").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=says):
        parse("mine", {"up": {key: "a.trace"}}, tmp_path / "mine.toml")


def test_a_trace_is_read_with_a_byte_order_mark_and_any_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf1\r\n# \xc2\xb5\r2\n")
    (tmp_path / "b").write_bytes(b'\xef\xbb\xbf"seconds","delay_ms"\r\n"0","5"\r\n2, 7\r\n')
    assert list(traces.read_rate(str(tmp_path / "a"))) == [1, 2]
    assert [list(each) for each in traces.read_delay(str(tmp_path / "b"))] == [
        [0, 2_000_000_000],
        [5_000_000, 7_000_000],
    ]


def test_a_trace_takes_bytes_a_line_and_not_integers_of_python(tmp_path: Path) -> None:
    for read, line, bytes_a_line in (
        (traces.read_rate, "{}\n", 10),
        (traces.read_delay, "{},7\n", 30),
    ):
        first, file = tmp_path / f"first {bytes_a_line}", tmp_path / str(bytes_a_line)
        first.write_text(line.format(0) + line.format(1))
        file.write_text("".join(line.format(n) for n in range(20_000)))
        read(str(first))  # what reading imports is not the trace's
        tracemalloc.start()
        read(str(file))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000 * bytes_a_line + 100_000


@pytest.mark.real
def test_importing_networks_loads_neither_torch_nor_zmq_nor_numpy() -> None:
    code = (
        "import sys, edgetrain.cli.networks, edgetrain.fleet.networks.emulation.stream,"
        " edgetrain.fleet.networks.emulation.packet;"
        "print([m for m in ('torch', 'zmq', 'numpy') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
