"""A runner that is killed leaves nothing behind: no process of its guest, no network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import held
import pytest
from patience import patience

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: process and network namespaces"),
    pytest.mark.skipif(bool(os.geteuid() == 0 and held.why_not()), reason="no namespaces here"),
]

# In place of user-mode-linux: a process in a session of its own, and one that is stopped.
KERNEL = """\
#!/bin/sh
setsid sleep {mark} < /dev/null > /dev/null 2>&1 &
sleep {mark} &
kill -STOP $!
echo booted
sleep {mark}
"""
RUNNER = """\
import sys
from pathlib import Path
import boot_card, held
with held.network() as space, boot_card.Guest(Path("card"), space, Path(sys.argv[1]), "") as guest:
    guest.until("booted", 30)
    print(Path(f"/proc/{space.process}/ns/net").readlink(), flush=True)
    sys.stdin.read()
"""


def left_of(mark: str, network: str) -> list[str]:
    """Processes with this word in their command line, or in this network."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if mark in words or str((folder / "ns/net").readlink()) == network:
                found.append(f"{folder.name} {words}")
        except OSError:  # it ended meanwhile
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_runner_that_is_killed_leaves_no_guest_and_no_network(number, tmp_path):
    mark = f"{10**6 + os.getpid()}.{int(number)}"
    (tmp_path / "linux.uml").write_text(KERNEL.format(mark=mark))
    (tmp_path / "linux.uml").chmod(0o755)
    fakes = Path(held.__file__).parent
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{fakes}:{fakes.parents[1]}",
    }
    words = [sys.executable, "-c", RUNNER, str(tmp_path / "log")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as runner:
        assert runner.stdout is not None
        network = runner.stdout.readline().strip()
        assert network.startswith("net:")
        assert len(left_of(mark, network)) > 4
        runner.send_signal(number)
        runner.wait(patience(30))
        until = time.monotonic() + patience(30)
        while left := left_of(mark, network):
            assert time.monotonic() < until, left
            time.sleep(0.01)
