"""What tests of `make test` cannot do: start a process, or sleep. They would depend on how busy the
machine is; those that must are marked `real` (`make test-real`), or stand in `ALLOWED`."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

_SHELL = "shells on a made-up device, which end by themselves"
ALLOWED = {
    "tests/provisioning/test_glance.py": _SHELL,
    "tests/provisioning/test_in_job.py": _SHELL,
    "tests/provisioning/cards/test_archive.py": "pip's words about a package that is not there",
    "tests/provisioning/cards/test_disks.py": "lsblk of this machine",
    "tests/fleet/test_cluster.py": "keys of ssh-keygen",
}
"""Files whose tests start programs, and why no deadline is above them."""

PROGRAMS = {"git": "a run's folder names the commit of the checkout"}
"""Programs that the product asks, which answer and end at once."""

OTHERS = {
    "real",
    "fleet",
    "boot",
    "boot_qemu",
    "arm_doctor",
    "groups",
    "endurance",
    "nightly",
    "trainers",
    "zoo",
    "trackers",
    "notebook",
    "uml",
}
"""Marks of tests that are not in `make test`."""
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
_test: str | None = None
"""The test that runs now, if it is not to do such things."""


class Real(AssertionError):
    """A test that is not marked `real` started something real."""


def _refuse(what: str) -> NoReturn:
    raise Real(f"{what} in {_test}: pass a clock or a fake in, or mark the test `real`")


def _heard(event: str, arguments: Any) -> None:
    if _test is not None and event in _STARTS and str(next(iter(arguments), "")) not in PROGRAMS:
        _refuse(f"{event} {str(arguments[:2])[:200]}")


def _watched(function: Any, what: str) -> Any:
    def call(*arguments: Any, **more: Any) -> Any:
        if _test is not None:
            here = inspect.currentframe()
            above = here and here.f_back and here.f_back.f_globals["__name__"]
            if above != "subprocess":  # a Popen that is waited for sleeps
                _refuse(what)
        return function(*arguments, **more)

    return call


sys.addaudithook(_heard)
time.sleep = _watched(time.sleep, "time.sleep")
BaseProcess.start = _watched(BaseProcess.start, "a process")  # type: ignore[method-assign]


@contextmanager
def nothing_real(test: str) -> Iterator[None]:
    """Within it nothing real starts: `Real` is raised where it would, in the thread that tries."""
    global _test
    _test = None if test.partition("::")[0] in ALLOWED else test
    try:
        yield
    finally:
        _test = None
