"""What a picture marks: faults, absences, lost members, and where the delay changed."""

from __future__ import annotations

from edgetrain.runs.reports.happenings import Happening, happenings


def test_events_and_changes_of_the_delay_are_found_in_the_order_of_time() -> None:
    def event(t: float, name: str, **more: str) -> dict[str, object]:
        return {"kind": "event", "t": t, "member": "hub", "event": name, **more}

    def closed(t: float, delay: int | None) -> dict[str, object]:
        return {"kind": "round", "t": t, "member": "hub", "round": 1, "delay": delay}

    found = happenings(
        [
            event(9.0, "gone", about="m1", reason="silent for 5.0 s"),
            event(-1.0, "joined"),
            event(2.0, "fault", reason="uplink\x1b down"),
            event(3.0, "late", about="m2"),
            closed(5.0, 12),
            closed(1.0, 4),
            closed(4.0, 4),
            closed(7.0, None),
            {"kind": "delay", "t": 1.0, "member": "hub"},
        ]
    )
    assert found == (
        Happening("fault", 2.0, "hub fault: uplink  down"),
        Happening("delay", 5.0, "delay 4 to 12"),
        Happening("gone", 9.0, "m1 gone: silent for 5.0 s"),
    )
