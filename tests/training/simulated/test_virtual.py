"""Virtual time: order, sleep, mailboxes and the end of processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.training.simulated.virtual import SECOND, Mailbox, World


def ran(world: World) -> World:
    while world.step():
        pass
    return world


@given(st.lists(st.integers(0, 20), max_size=40))
def test_events_happen_in_order_of_time_then_of_asking(times):
    world, seen = World(), []
    for number, when in enumerate(times):
        world.at(when, lambda n=number: seen.append((world.now, n)))
    ran(world)
    assert seen == sorted((when, number) for number, when in enumerate(times))


def test_an_event_in_the_past_happens_now():
    world, seen = World(), []
    world.at(10, lambda: world.at(3, lambda: seen.append(world.now)))
    ran(world)
    assert seen == [10]


def test_processes_sleep_side_by_side():
    world, seen = World(), []

    def process(name, seconds):
        for _ in range(3):
            world.sleep(seconds)
            seen.append((world.clock(), name))

    world.start("a", lambda: process("a", 1.0))
    world.start("b", lambda: process("b", 1.5), when=SECOND)
    ran(world)
    assert seen == [(1.0, "a"), (2.0, "a"), (2.5, "b"), (3.0, "a"), (4.0, "b"), (5.5, "b")]


def test_a_mailbox_wakes_its_reader_or_lets_it_go_on_in_time():
    world, seen = World(), []
    box: Mailbox[str] = Mailbox(world)

    def read():
        for timeout in (1.0, 1.0, 0.0, 5.0):
            seen.append((box.get(timeout), world.clock()))

    world.start("reader", read)
    world.at(SECOND // 2, lambda: box.put("early"))
    world.at(3 * SECOND, lambda: box.put("late"))
    ran(world)
    assert seen == [("early", 0.5), (None, 1.5), (None, 1.5), ("late", 3.0)]


def test_a_reader_that_was_woken_is_not_woken_again_by_its_old_deadline():
    world, seen = World(), []
    box: Mailbox[int] = Mailbox(world)

    def read():
        box.get(1.0)
        world.sleep(0.2)
        seen.append((box.get(10.0), world.clock()))

    world.start("reader", read)
    world.at(SECOND // 2, lambda: box.put(1))
    world.at(5 * SECOND, lambda: box.put(2))
    ran(world)
    assert seen == [(2, 5.0)]


@given(
    puts=st.lists(st.integers(0, 30), max_size=20).map(sorted),
    timeouts=st.lists(st.integers(0, 9), min_size=1, max_size=30),
)
def test_a_mailbox_loses_and_repeats_nothing(puts, timeouts):
    world, seen = World(), []
    box: Mailbox[int] = Mailbox(world)

    def read():
        for timeout in timeouts:
            began = world.now
            item = box.get(timeout / SECOND)
            assert world.now - began <= timeout
            if item is not None:
                seen.append(item)

    world.start("reader", read)
    for number, when in enumerate(puts):
        world.at(when, lambda n=number: box.put(n))
    ran(world)
    assert seen == list(range(len(seen)))
    assert len(seen) + len(box) == len(puts)


def test_a_failure_is_kept_and_stops_nobody_else():
    world, seen = World(), []

    def fail():
        raise ValueError("no")

    failed = world.start("a", fail)
    world.start("b", lambda: seen.append("b"))
    ran(world)
    assert failed.over
    assert str(failed.error) == "no"
    assert seen == ["b"]


def test_a_killed_process_ends_where_it_waits_and_runs_its_finally():
    world, seen = World(), []

    def process():
        try:
            world.sleep(10)
            seen.append("slept")
        finally:
            seen.append("ended")

    victim = world.start("v", process)
    world.at(SECOND, victim.kill)
    ran(world)
    assert seen == ["ended"]
    assert victim.over
    assert victim.error is None
    victim.kill()
    assert world.now == 10 * SECOND  # its alarm still rings, for nobody


def test_a_wait_of_less_than_a_tick_passes():
    world, seen = World(), []
    box: Mailbox[int] = Mailbox(world)

    def read():
        began = world.now
        while world.now == began:
            box.get(3e-10)
        seen.append(world.now - began)

    world.start("reader", read)
    for _ in range(10):
        world.step()
    assert seen == [1]


def test_a_process_that_is_held_goes_on_when_it_is_let_go():
    world, seen = World(), []

    def process():
        for _ in range(3):
            world.sleep(1.0)
            seen.append(world.clock())

    held = world.start("p", process)
    world.at(SECOND + SECOND // 2, lambda: held.hold(5 * SECOND))
    ran(world)
    assert seen == [1.0, 5.0, 6.0]
