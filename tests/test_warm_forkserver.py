"""Commands that are forked from a warm process: no test of them may see that they were not started
by an interpreter of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from command_line import environment
from warm_forkserver import Forked

pytestmark = pytest.mark.real

LOOKS = """
import json, locale, os, signal, sys, tempfile, threading
stream = lambda each: [each.name, each.mode, each.encoding, each.errors, each.line_buffering]
json.dump({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags),
    "cwd": os.getcwd(), "environ": dict(os.environ), "main": sys.modules["__main__"].__spec__.name,
    "warnings": sys.warnoptions, "encoding": locale.getpreferredencoding(),
    "streams": [stream(each) for each in (sys.stdin, sys.stdout, sys.stderr)],
    "originals": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__],
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "group": os.getpgrp() in (os.getpid(), os.getpgid(int(os.environ["TESTS"]))),
    "signals": [str(signal.getsignal(each)) for each in (2, 13, 15, 17)],
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "descriptors": sorted(os.listdir("/proc/self/fd")), "umask": os.umask(0o22),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "folder": tempfile.gettempdir(), "said": sys.stdin.read(), "__name__": __name__,
}, sys.stdout)
print("a word ×", file=sys.stderr)
"""
ENDS = {
    "with no more to do": "",
    "with a status": "raise SystemExit(3)",
    "with a word": "import sys; sys.exit('so it is')",
    "with an error": "1 / 0",
    "by Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "by SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); input()",
    "by a thread's end": "import threading; threading.Thread(target=print, args=['ran']).start()",
    "with a last wish": "import atexit; atexit.register(print, 'bye')",
    "without its streams": "import os; os.close(1); os.close(2)",
}


def both(tmp_path, text, **more):
    """What a module of this text does in a new interpreter, and forked."""
    (tmp_path / "probe.py").write_text(text)
    argv, found = [sys.executable, "-m", "probe", "a", "--b=ü"], []
    for popen in (subprocess.Popen, Forked):
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **more}
        with popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, **options) as process:
            said, errors = process.communicate("its input\n", timeout=120)
        found.append((process.returncode, said, errors))
    return found


@pytest.mark.parametrize("new_session", [False, True])
def test_a_forked_command_sees_what_a_new_interpreter_sees(new_session, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    env = environment(TESTS=str(os.getpid()), MINE="of this process alone")
    new, forked = both(tmp_path, LOOKS, env=env, start_new_session=new_session)
    assert (new[0], new[2]) == (forked[0], forked[2]) == (0, "a word ×\n")
    assert json.loads(forked[1]) == json.loads(new[1])
    assert json.loads(new[1])["leads"] == [new_session, new_session]


@pytest.mark.parametrize("how", ENDS)
def test_a_forked_command_ends_as_a_new_interpreter_does(how, tmp_path):
    new, forked = both(tmp_path, ENDS[how], env=environment())
    assert forked[:2] == new[:2]
    assert forked[2].splitlines()[-1:] == new[2].splitlines()[-1:]


def test_a_forked_command_writes_to_a_file_and_prints_a_line_at_a_time_to_a_terminal(tmp_path):
    text = (
        "import sys; print(sys.stdout.isatty(), sys.stdout.line_buffering, sys.stdout.seekable())"
    )
    said = []
    for _ in range(2):
        with (tmp_path / "said").open("w+") as file:
            both(tmp_path, text, env=environment(), stdin=subprocess.DEVNULL, stdout=file)
            file.seek(0)
            said += file.read().splitlines()
    assert said == ["False False True"] * 4
    ours, theirs = os.openpty()
    both(tmp_path, text, env=environment(), stdin=subprocess.DEVNULL, stdout=theirs)
    new, forked = os.read(ours, 999).decode().splitlines()
    assert new == forked
    assert new.startswith("True")


def test_no_two_forked_commands_draw_the_same_numbers(tmp_path):
    text = "import random, tempfile, numpy as np\n"
    text += "print(random.random(), np.random.random(), tempfile.mktemp())"
    drawn = {said for _ in range(2) for _, said, _ in both(tmp_path, text, env=environment())}
    assert len(drawn) == 4
    torch = "import torch; print(torch.initial_seed(), torch.rand(3).tolist())"
    _, first = both(tmp_path, torch, env=environment())
    _, second = both(tmp_path, torch, env=environment())
    assert first != second


def test_what_an_interpreter_reads_at_its_start_starts_one(tmp_path):
    env = environment(PYTHONIOENCODING="ascii")
    new, forked = both(tmp_path, "import sys; print(sys.stdout.encoding)", env=env)
    assert new == forked == (0, "ascii\n", "")


def start(tmp_path, text, **more):
    (tmp_path / "probe.py").write_text(text)
    argv = [sys.executable, "-m", "probe"]
    return Forked(argv, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, **more)


def test_a_forked_command_is_waited_for_as_long_as_asked_and_signalled_by_its_id(tmp_path):
    with start(tmp_path, "print('runs', flush=True); input()", stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "runs\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == process.poll() == -signal.SIGKILL
        assert not psutil.pid_exists(process.pid)
        process.kill()


CHILDREN = """
import multiprocessing, time
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["json"])
    children = [context.Process(target=time.sleep, args=[600]) for _ in range(2)]
    for each in children:
        each.start()
    print(*(each.pid for each in children), flush=True)
    time.sleep(600)
"""


def test_a_fork_server_is_forked_and_ends_with_its_command(tmp_path):
    # `run` is one of the verbs that have a fork server.
    (tmp_path / "probe.py").write_text(CHILDREN)
    argv = [sys.executable, "-m", "probe", "run"]
    with Forked(
        argv, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        children = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        (server,) = {child.parent() for child in children}
        assert server.parent().pid == process.pid
        assert "warm_forkserver" in " ".join(server.cmdline())
        process.kill()
        for child in children:
            child.kill()
        assert psutil.wait_procs([server], timeout=60)[1] == []


def test_a_command_ends_with_the_process_it_was_forked_from(tmp_path):
    (tmp_path / "probe.py").write_text("print('runs', flush=True); import time; time.sleep(600)")
    code = (
        "import subprocess, sys, time; from warm_forkserver import Forked\n"
        "forked = Forked([sys.executable, '-m', 'probe'], stdout=subprocess.PIPE, text=True)\n"
        "print(forked.pid, Forked.server.pid, forked.stdout.readline(), flush=True)\n"
        "time.sleep(600)"
    )
    fakes = Path(sys.modules["warm_forkserver"].__file__).parent
    env = environment(PYTHONPATH=f"{environment()['PYTHONPATH']}:{fakes}")
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE) as tests:
        left = [psutil.Process(int(pid)) for pid in tests.stdout.readline().split()[:2]]
        tests.kill()
    assert psutil.wait_procs(left, timeout=60)[1] == []
