"""The tests' own runner: who gets which file, in which order, and what it says at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import costs
import psutil
import pytest
from costs import Cost
from scheduling import Scheduling
from xdist.remote import Producer

SHORT = [f"tests/short_{i}.py" for i in range(8)]
COSTS = {
    "tests/long.py": Cost(60, 55),
    "tests/waits.py": Cost(90, 10),
    "tests/waits_less.py": Cost(30, 5),
    "tests/medium.py": Cost(20, 19),
} | dict.fromkeys(SHORT, Cost(0.2, 0.2))
TESTS = [f"{name}::test_{i}" for name in COSTS for i in range(3)]


class Node:
    """A worker: has tests to do, and does the next unless it is the last and more may come."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id=str(id(self)))
        self.shutting_down = False
        self.left: list[int] = []
        self.done: list[str] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        assert not self.shutting_down
        self.left += indexes

    def shutdown(self) -> None:
        assert not self.shutting_down
        self.shutting_down = True

    @property
    def may_go_on(self) -> bool:
        return len(self.left) > (0 if self.shutting_down else 1)


def handed_out(count: int, seconds: dict[str, Cost]) -> list[list[str]]:
    """The files of each of so many workers, of which who is behind is next."""
    config = SimpleNamespace(
        getvalue=lambda name: ["popen"] * count, option=SimpleNamespace(loadscopereorder=False)
    )
    log = Producer("log", enabled=False)
    nodes = [Node() for _ in range(count)]
    scheduler = Scheduling(config, log, seconds)
    for node in nodes:
        scheduler.add_node(node)
    items = [SimpleNamespace(nodeid=name) for name in TESTS]
    costs.in_order(items, seconds, None)
    order = [item.nodeid for item in items]
    for node in nodes:
        scheduler.add_node_collection(node, order)
    scheduler.schedule()
    clock = dict.fromkeys(nodes, 0.0)
    while ready := [node for node in nodes if node.may_go_on]:
        node = min(ready, key=lambda each: clock[each])
        index = node.left.pop(0)
        node.done.append(order[index])
        clock[node] += seconds[order[index].partition("::")[0]].wall / 3
        scheduler.mark_test_complete(node, index)
    assert sorted(name for node in nodes for name in node.done) == sorted(TESTS)
    assert all(node.shutting_down for node in nodes)
    return [list(dict.fromkeys(name.partition("::")[0] for name in node.done)) for node in nodes]


def test_the_third_worker_takes_what_waits_and_nothing_else():
    first, second, third = handed_out(3, COSTS)
    assert third == ["tests/waits.py", "tests/waits_less.py"]
    assert first[0] == "tests/long.py"
    assert second[0] == "tests/medium.py"


def test_who_has_no_file_left_to_compute_takes_one_that_waits():
    seconds = COSTS | {name: Cost(60, 1) for name in SHORT}
    first, second, third = handed_out(3, seconds)
    assert {*first, *second} & {*SHORT}
    assert "tests/long.py" not in third


@pytest.mark.parametrize("count", [1, 2])
def test_two_workers_take_all_the_longest_first(count):
    workers = handed_out(count, COSTS)
    assert [files[0] for files in workers] == ["tests/waits.py", "tests/long.py"][:count]


def test_a_drawn_order_is_the_same_for_a_seed_and_likely_begins_with_the_long_files():
    def order(seed: int) -> list[str]:
        items = [SimpleNamespace(nodeid=name) for name in TESTS]
        costs.in_order(items, COSTS, seed)
        return [item.nodeid for item in items]

    assert order(3) == order(3) != order(4)
    assert sorted(order(3)) == sorted(TESTS)
    files = [list(dict.fromkeys(name.partition("::")[0] for name in order(i))) for i in range(200)]
    assert sum(names.index("tests/long.py") for names in files) / 200 < 2
    assert len({tuple(names) for names in files}) > 150
    last = {names[-1] for names in files}
    assert last >= {*SHORT}
    tests = {tuple(name for name in order(i) if "long.py" in name) for i in range(50)}
    assert len(tests) == 6


def test_what_was_measured_is_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "FILE", tmp_path / "costs.toml")
    costs.FILE.touch()
    costs.write({"tests/b.py": Cost(1.2, 0.7), "tests/a.py": Cost(9.9, 1.2)})
    costs.write({"tests/b.py": Cost(61.2, 40.7), SHORT[0]: COSTS[SHORT[0]]})
    assert costs.read() == {"tests/a.py": (10, 1), "tests/b.py": (61, 41)}
    assert [cost.waits for cost in costs.read().values()] == [True, False]


def test_the_end_says_where_the_time_went_and_what_was_skipped_for_want_of_what():
    def report(name: str, wall: float, **more: object) -> SimpleNamespace:
        return SimpleNamespace(nodeid=f"{name}::test", duration=wall, **more)

    spent = costs.of_reports(
        [report("a.py", 1.0), report("b.py", 2.0), report("a.py", 9.0, cpu_s=4.0)]
    )
    assert spent == {"a.py": (10.0, 4.0), "b.py": (2.0, 0.0)}
    skipped = [
        SimpleNamespace(longrepr=("a.py", 3, f"Skipped: no {what}")) for what in ("ip", "tc", "ip")
    ]
    assert [line.split() for line in costs.told(spent, skipped)] == [
        ["12", "s,", "of", "which", "CPU", "4", "s:", "2", "files"],
        ["10", "s,", "of", "which", "CPU", "4", "s:", "a.py"],
        ["2", "s,", "of", "which", "CPU", "0", "s:", "b.py"],
        ["2", "skipped:", "no", "ip"],
        ["1", "skipped:", "no", "tc"],
    ]


@pytest.mark.real
def test_cpu_seconds_count_a_child_that_runs_and_one_that_ended():

    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    before = costs.cpu_seconds()
    words = [sys.executable, "-c", burn]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        alive = costs.cpu_seconds()
        child.communicate(b"\n")
    assert alive - before > 0.25
    assert costs.cpu_seconds() - before > 0.25


@pytest.mark.real
def test_a_busy_machine_is_told_from_a_process_that_waits():
    words = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        while psutil.Process(child.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        assert not costs.could_run(child.pid)
        assert costs.could_run(os.getpid())
        with subprocess.Popen(words) as burning:
            os.sched_setaffinity(burning.pid, {0})
            with subprocess.Popen(words) as other:
                os.sched_setaffinity(other.pid, {0})
                for each in (burning, other):
                    while not costs.could_run(each.pid):
                        time.sleep(0.01)
                seen = [costs.could_run(each.pid) for each in (burning, other) * 20]
                assert costs.could_run(os.getpid(), threading.get_native_id())
                other.kill()
            burning.kill()
        assert all(seen)
        child.communicate(b"\n")
