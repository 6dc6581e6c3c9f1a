"""What all tests share: hypothesis' profile, no keys but their own, the order they run in, and a
check that they leave `sys.path` and `sys.modules` as they found them."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from left_behind import Imports

settings.register_profile(
    "edgetrain",
    deadline=None,  # shared machines are noisy
    max_examples=60,
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


LONG = (
    "training/test_faulty_links.py",
    "cli/test_cli.py",
    "cli/test_resume.py",
    "cli/test_run_folder_page.py",
    "training/test_checkpoint_fleet.py",
    "test_wheel.py",
    "cli/test_keys_cli.py",
    "training/chaos/test_real_processes.py",
    "exchange/masks/test_secure_chaos.py",
    "training/test_drift_runs.py",
    "codecs/test_codec_memory.py",
    "codecs/kernels/test_kernels_replay.py",
    "strategies/test_fedprox.py",
    "cli/test_group_cli.py",
    "training/test_service.py",
    "cli/test_waiting.py",
    "training/servers/test_groups.py",
    "fleet/cards/test_first_boot.py",
    "exchange/masks/test_secure_runs.py",
    "exchange/masks/test_secure_memory.py",
    "training/servers/test_servers.py",
    "fleet/networks/emulation/test_lab.py",
    "jobs/test_privacy.py",
    "cli/test_slips.py",
    "test_readme.py",
)
"""Files with few tests and many seconds, the longest first (`--durations`)."""


def pytest_configure(config):
    """Let pytest-xdist hand files out in the order of `pytest_collection_modifyitems`, and not by
    how many tests they have: long ones have few, and would leave a processor idle at the end."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_addoption(parser):
    parser.addoption("--tries", type=int, default=1, help="run each test this often, and count")
    parser.addoption(
        "--order",
        type=int,
        metavar="SEED",
        help="draw the order of the files, and of the tests in each",
    )


def pytest_collection_modifyitems(config, items):
    """Draw the order if a seed is given. With several workers, begin with the long files: in drawn
    orders, all of them are in the first half."""
    tests = Path(__file__).parent
    place = {tests / name: number for number, name in enumerate(LONG)}
    seed = config.getoption("order")
    if seed is not None:
        draw = random.Random(seed)
        draw.shuffle(items)
        files = sorted({item.path for item in items})
        place = {path: draw.random() / (1 + (path in place)) for path in files}
        items.sort(key=lambda item: place[item.path])
    elif hasattr(config, "workerinput"):
        items.sort(key=lambda item: place.get(item.path, len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """With --tries, run each test that often, each time with fixtures of its own."""
    for _ in range(item.config.getoption("tries") - 1):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def pytest_terminal_summary(terminalreporter, config):
    """The seed of the order; with --tries, how often each test failed."""
    tries = config.getoption("tries")
    if tries > 1:
        stats = terminalreporter.stats
        tried = [each for kind in ("passed", "failed", "error") for each in stats.get(kind, ())]
        bad = Counter(each.nodeid for each in tried if each.failed)
        terminalreporter.section(f"failed before, and alone of {tries}")
        for test in sorted({each.nodeid for each in tried}):
            terminalreporter.write_line(f"{bad[test]} of {tries}  {test}")
    if config.getoption("order") is not None:
        terminalreporter.write_line(f"The order was drawn: --order {config.getoption('order')}")


@pytest.fixture(autouse=True)
def _imports_stay():
    """Fail a test after which `sys.path` or `sys.modules` is another, which may decide over a later
    test. `own_imports` puts both back."""
    before = Imports()
    yield
    left = before.restore()
    assert not left, f"the test leaves behind: {', '.join(left)} (see the fixture own_imports)"


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
        left = before.restore({str(collector.path.parent)})
        if left:
            report.outcome = "failed"
            report.longrepr = f"{collector.nodeid} leaves behind: {', '.join(left)}"
    return report
