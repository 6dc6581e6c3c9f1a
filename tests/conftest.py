"""What all tests share: hypothesis' profile, no keys but their own, the order they run in, their
costs, and a check that they leave `sys.path` and `sys.modules` as they found them."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
from collections import Counter

import costs
import nothing_real
import patience
import pytest
import tools
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from left_behind import Imports

# A worker holds a million objects. With the usual thresholds, looking through them for garbage took
# a quarter of all time.
gc.set_threshold(50_000, 20, 50)

settings.register_profile(
    "edgetrain",
    deadline=None,  # shared machines are noisy
    max_examples=int(os.environ.get("EXAMPLES", "20")),
    # CI's verdict on a commit is always the same; everyone else's runs look for new examples.
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("edgetrain")

# A shell that runs the tests in the background has told them to ignore Ctrl-C, and what tests start
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_keys(tmp_path_factory):
    """The keys of whoever runs the tests are not used, and not changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("no-keys")))
        yield


FORKED = ("torch._dynamo", "edgetrain.training.member.train", "edgetrain.exchange.hub.serve",
          "edgetrain.training.servers.process", "ranks")  # fmt: skip
"""What processes that tests fork find imported. A worker has one fork server, which the first test
that wants one starts: what that one did not import, every process of the others would."""


@pytest.fixture(autouse=True, scope="session")
def _one_fork_server():
    from edgetrain.training import processes

    with pytest.MonkeyPatch.context() as patch:
        real = processes.fork_server
        patch.setattr(processes, "fork_server", lambda preload: real([*FORKED, *preload]))
        yield


def pytest_configure(config):
    """Let pytest-xdist hand files out in the order of `pytest_collection_modifyitems`, and not by
    how many tests they have: long ones have few, and would leave a processor idle at the end."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if not hasattr(config, "workerinput") and selects_real(config):
        config.stash[MEASURED] = patience.measure()


def selects_real(config) -> bool:
    """Whether this run is of tests that wait for something real."""
    return re.search(r"(?<!not )\breal\b", config.getoption("markexpr", "")) is not None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    """Say how slow this machine is, and which tools are missing."""
    config = session.config
    if hasattr(config, "workerinput"):
        return
    write = config.pluginmanager.get_plugin("terminalreporter").write_line
    if MEASURED in config.stash:
        write(config.stash[MEASURED])
    for line in tools.told(selects_real(config)):
        write(line)


def pytest_addoption(parser):
    parser.addoption("--tries", type=int, default=1, help="run each test this often, and count")
    parser.addoption("--costs", action="store_true", help="tell where the time went")
    parser.addoption("--write-costs", action="store_true", help="write tests/costs.toml")
    parser.addoption(
        "--order",
        type=int,
        metavar="SEED",
        help="draw the order of the files, and of the tests in each",
    )


def pytest_collection_modifyitems(config, items):
    """Draw the order if a seed is given. With several workers, begin with the long files."""
    seed = config.getoption("order")
    if seed is not None or hasattr(config, "workerinput"):
        costs.in_order(items, costs.read(), seed)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of the workers, the third takes what waits."""
    if config.getvalue("dist") != "loadfile":
        return None
    from scheduling import Scheduling

    return Scheduling(config, log, costs.read())


MEASURED = pytest.StashKey[str]()
SPENT = pytest.StashKey[float]()
WAITING = pytest.StashKey[costs.Waiting]()


def _freeze():
    """What stands now, stands to the end: the garbage collector need not walk a million objects
    again with each test."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session):
    """What collecting costs is no test's."""
    _freeze()
    session.stash[SPENT] = costs.cpu_seconds()
    if session.config.getoption("write_costs"):
        session.stash[WAITING] = costs.Waiting()
        session.stash[WAITING].start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test's last report has its CPU seconds, and each those in which it waited."""
    report = yield
    stash = item.session.stash
    if report.failed and item.get_closest_marker("real"):
        report.sections.append(("machine", patience.load()))
    if report.when == "teardown":
        now = costs.cpu_seconds()
        report.cpu_s, stash[SPENT] = now - stash[SPENT], now
    if waiting := stash.get(WAITING, None):
        report.waited_s, waiting.seconds = waiting.seconds, 0.0
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Of tests of `make test`, and their fixtures, nothing real starts. With --tries, run each
    test that often, each time with fixtures of its own."""
    is_real = any(mark.name in nothing_real.OTHERS for mark in item.iter_markers())
    with contextlib.nullcontext() if is_real else nothing_real.nothing_real(item.nodeid):
        _again(item)
        report = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()  # what this file imported and drew
    return report


def _again(item):
    for _ in range(item.config.getoption("tries") - 1):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def pytest_terminal_summary(terminalreporter, config):
    """The seed of the order, and where the time went; with --tries, how often each test failed."""
    tries = config.getoption("tries")
    stats = terminalreporter.stats
    if config.getoption("costs") or config.getoption("write_costs"):
        ended = [each for kind in stats.values() for each in kind if hasattr(each, "duration")]
        spent = costs.of_reports(ended)
        terminalreporter.section("where the time went")
        for line in costs.told(spent, stats.get("skipped", ())):
            terminalreporter.write_line(line)
        if config.getoption("write_costs"):
            costs.write(spent)
    if tries > 1:
        tried = [each for kind in ("passed", "failed", "error") for each in stats.get(kind, ())]
        bad = Counter(each.nodeid for each in tried if each.failed)
        terminalreporter.section(f"failed before, and alone of {tries}")
        for test in sorted({each.nodeid for each in tried}):
            terminalreporter.write_line(f"{bad[test]} of {tries}  {test}")
    if config.getoption("order") is not None:
        terminalreporter.write_line(f"The order was drawn: --order {config.getoption('order')}")


@pytest.fixture(autouse=True, scope="module")
def _imports_stay():
    """Fail the last test of a file after which `sys.path` or `sys.modules` is another, which may
    decide over a later test. `own_imports` puts both back."""
    before = Imports()
    yield
    left = before.restore()
    assert not left, f"the file leaves behind: {', '.join(left)} (see the fixture own_imports)"


@pytest.fixture
def own_imports():
    """Forget at the end of the test what it imported from its own folders."""
    before = Imports()
    yield
    before.restore()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same for what a file of tests does when it is imported."""
    before = Imports()
    report = yield
    if isinstance(collector, pytest.Module) and report.passed:
        folders = collector.path.parents
        left = before.restore({str(next(f for f in folders if not (f / "__init__.py").exists()))})
        if left:
            report.outcome = "failed"
            report.longrepr = f"{collector.nodeid} leaves behind: {', '.join(left)}"
    return report
