"""What `networks check` says of a rate that cannot be held against its profile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgetrain.cli.networks import finding_line
from edgetrain.fleet.networks import profile
from edgetrain.fleet.networks.emulation import check


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
