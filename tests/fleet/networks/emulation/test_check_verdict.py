"""What `networks check` says of a rate that cannot be held against its profile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgetrain.cli.networks import finding_line
from edgetrain.fleet.networks import Direction, Profile, profile
from edgetrain.fleet.networks.emulation import check
from edgetrain.fleet.networks.links.model import LinkModel


def rates(name, share, monkeypatch):
    """Findings where TCP reached this share of the line's rate."""
    found = profile.load(name)
    target = found.up.mean_rate_mbit * check.PAYLOAD_SHARE
    monkeypatch.setattr(check, "line_mbit", lambda samples, skip: share * target)
    net = SimpleNamespace(request=SimpleNamespace(congestion="cubic"))
    bench = SimpleNamespace(client=SimpleNamespace(do=lambda *words, **named: []))
    return next(check.rates(found, net, bench, 1.0))


@pytest.mark.parametrize(
    ("name", "share", "mark", "good"),
    [
        ("home-fixed", 1.0, "ok ", True),
        ("home-fixed", 0.8, "OFF", False),
        ("wan-200ms", 0.8, "?  ", True),
        ("wan-200ms", 1.0, "ok ", True),
    ],
)
def test_a_rate_below_its_line_is_never_called_ok(name, share, mark, good, monkeypatch):
    found = rates(name, share, monkeypatch)
    line = finding_line(found)
    assert line.startswith(mark), line
    assert found.good == good
    assert found.judged == (mark != "?  ")
    if mark == "?  ":
        assert found.note in line


@pytest.mark.parametrize(
    ("up_mbit", "share", "mark", "note"),
    [
        (3.0, 0.5, "OFF", ""),  # 100 Mbit/s need 2.2 Mbit/s of acknowledgements
        (2.0, 0.5, "?  ", "not measurable over TCP: acknowledgements fill the way back"),
        (0.5, 0.2, "?  ", "not measurable over TCP: acknowledgements fill the way back"),
        (0.5, 1.0, "ok ", ""),
    ],
)
def test_a_rate_above_what_its_acknowledgements_let_through_is_not_judged(
    up_mbit, share, mark, note, monkeypatch
):
    found = Profile("x", "", Direction(rate_mbit=up_mbit), Direction(rate_mbit=100.0))
    monkeypatch.setattr(check, "line_mbit", lambda samples, skip: share * 100 * check.PAYLOAD_SHARE)
    net = SimpleNamespace(request=SimpleNamespace(congestion="cubic"))
    bench = SimpleNamespace(client=SimpleNamespace(do=lambda *words, **named: []))
    down = list(check.rates(found, net, bench, 1.0))[1]
    assert finding_line(down).startswith(mark)
    assert note in down.note


@pytest.mark.parametrize("backend", ["packet", "stream"])
@pytest.mark.parametrize("mbit", [0, 0.01, 0.1, 20])
def test_a_round_trip_has_the_time_of_its_own_bytes(mbit, backend):
    """The delays of the emulator's own model for the probes that are sent."""
    way = Direction(delay_ms=20, rate_mbit=mbit)
    size = 64 + (66 if backend == "stream" else 42)

    def do(verb, count, gap_s):
        up, down = LinkModel(way, 0), LinkModel(way, 1)
        sent = [round(n * gap_s * 1e9) for n in range(count)]
        return [(down.due(up.due(at, size - 14), size - 14) - at) / 1e6 for at in sent]

    net, bench = SimpleNamespace(backend=backend), SimpleNamespace(client=SimpleNamespace(do=do))
    found = check.round_trip(Profile("x", "", way, way), net, bench)
    assert found.measured == pytest.approx(found.target, rel=1e-4)
    assert found.target == pytest.approx(40 + (2 * size * 0.008 / mbit if mbit else 0))
    assert found.good
