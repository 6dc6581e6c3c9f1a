"""What every `Remote` does: commands, input, limits, copies that are cut off and go on.

Here for folders, and for `SshClient` with an `ssh` that runs its line on this machine. The fleet
tests run the same against a real sshd.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import resource
import shutil
import subprocess
import tarfile
import threading
import types
from pathlib import Path

import pytest
from folder_remote import FolderRemote
from hypothesis import given
from hypothesis import strategies as st
from remote_laws import LAWS

from edgetrain.errors import ConfigError
from edgetrain.fleet import ssh
from edgetrain.fleet.ssh import (
    COPY_S,
    CUT,
    FILES_EACH,
    SshAnswer,
    SshClient,
    SshHost,
    SshTrouble,
    argv,
    copy,
    on_each,
)

pytestmark = pytest.mark.real

HOST = SshHost("pi-0", "10.0.0.1", "fleet")
SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "$MARKS/said"
for word in "$@"; do line="$word"; done
case "$*" in *accept-new*)
    for word in "$@"; do
        case "$word" in UserKnownHostsFile=*) cp "$MARKS/key" "${word#*=}";; esac
    done
    exit 255;;
esac
if [ -e "$MARKS/stderr" ]; then cat "$MARKS/stderr" >&2; exit 255; fi
case "$*" in *"-O exit"*) exit;; *UserKnownHostsFile=*) ;; *)
    if [ -e "$MARKS/strange" ]; then
        echo "No ED25519 host key is known for 10.0.0.1 and you have requested strict checking." >&2
        exit 255
    fi;;
esac
cd "$MARKS/home"
if [ -e "$MARKS/quits" ]; then cat "$MARKS/quits"; exit 1; fi
if [ -e "$MARKS/talks" ]; then
    printf '%s\n0\n{}\036\036' "$line"
    sh -c "$line"; status=$?
    printf 'logout\n%s' "$line"
    exit $status
fi
exec sh -c "$line"
"""


@pytest.fixture
def marks(tmp_path, monkeypatch):
    """A folder for marks, and an `ssh` on PATH that runs here."""
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MARKS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", ["folder", "ssh", "talking"])
def test_a_remote_keeps_the_laws(kind, law, marks, tmp_path):
    if kind == "talking":  # a login shell that prints, before and behind, and what it runs
        (marks / "talks").touch()
    if kind == "folder":
        law(FolderRemote(tmp_path / "machines"), HOST, tmp_path)
    else:
        with SshClient({}) as client:
            law(client, HOST, tmp_path)


@given(sizes=st.lists(st.integers(0, 3000), max_size=4), content=st.binary(max_size=3000))
def test_a_copy_cut_off_anywhere_goes_on_where_it_ended(sizes, content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    source = folder / "file"
    source.write_bytes(content)
    remote = FolderRemote(folder)
    for size in sizes:
        remote.cuts["pi-0"] = size
        copy(remote, HOST, source, "opt/a b")
        remote.cuts.clear()
    assert copy(remote, HOST, source, "opt/a b").ok
    assert (folder / "pi-0/opt/a b").read_bytes() == content
    assert [path.name for path in (folder / "pi-0/opt").iterdir()] == ["a b"]
    assert copy(remote, HOST, source, "opt/a b").text.strip() == "same"


def test_a_copy_that_arrives_damaged_begins_anew(tmp_path):
    source = tmp_path / "file"
    source.write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    remote = FolderRemote(tmp_path)
    (tmp_path / "pi-0").mkdir()
    (tmp_path / f"pi-0/file.{digest}.part").write_bytes(b"CON")
    (tmp_path / "pi-0/file.0123.part").write_bytes(b"of an older one")
    damaged = copy(remote, HOST, source, "file")
    assert "another SHA-256" in damaged.why
    assert list((tmp_path / "pi-0").iterdir()) == []
    assert copy(remote, HOST, source, "file").ok


def test_only_what_is_missing_is_sent_again(tmp_path):
    source = tmp_path / "file"
    source.write_bytes(bytes(range(200)))
    remote = FolderRemote(tmp_path)
    remote.cuts["pi-0"] = 150
    assert copy(remote, HOST, source, "file").trouble is SshTrouble.LOST
    remote.cuts["pi-0"] = 51
    assert copy(remote, HOST, source, "file").trouble is SshTrouble.LOST
    assert (tmp_path / "pi-0/file").read_bytes() == bytes(range(200)), "the last 50 were enough"


HOSTILE = """IgnoreUnknown UseKeychain
Host *
UseKeychain yes
NoSuchOption yes
RequestTTY force
RemoteCommand tmux attach
StdinNull yes
SessionType none
ForkAfterAuthentication yes
LogLevel QUIET
ControlMaster auto
ControlPath /tmp/mine-%C
PermitLocalCommand yes
LocalCommand echo hello
LocalForward 8080 localhost:80
ExitOnForwardFailure yes
ForwardX11 yes
Tunnel yes
ConnectionAttempts 9
VisualHostKey yes
VerifyHostKeyDNS yes
BatchMode no
"""
KEPT = {
    "requesttty": "false", "remotecommand": None, "stdinnull": "no", "sessiontype": "default",
    "forkafterauthentication": "no", "loglevel": "ERROR", "controlpath": None,
    "permitlocalcommand": "no", "localforward": None, "forwardx11": "no", "tunnel": "false",
    "connectionattempts": "1", "visualhostkey": "no", "verifyhostkeydns": "false",
    "batchmode": "yes", "stricthostkeychecking": "true", "user": "fleet",
}  # fmt: skip


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs OpenSSH's client, to read its options")
def test_no_configuration_of_the_user_changes_what_is_depended_on(tmp_path):
    (tmp_path / "config").write_text(HOSTILE)
    words = argv(HOST.target, "true")
    words[1:1] = ["-G", "-F", str(tmp_path / "config")]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = dict(line.partition(" ")[::2] for line in said.splitlines())
    assert {name: found.get(name) for name in KEPT} == KEPT


JUMP = "Connection closed by UNKNOWN port 65535\n"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\nConnection reset by 10.0.0.1 port 22\n", "Connection reset by 10.0.0.1 port 22"),
        (f"b\nme@bastion: Permission denied (publickey).\n{JUMP}",
         f"me@bastion: Permission denied (publickey).; {JUMP.strip()}"),
        (f"ssh: connect to host bastion port 22: Connection refused\r\n{JUMP}",
         f"ssh: connect to host bastion port 22: Connection refused; {JUMP.strip()}"),
        (f"channel 0: open failed: connect failed: No route\nstdio forwarding failed\n{JUMP}",
         f"channel 0: open failed: connect failed: No route; {JUMP.strip()}"),
        (f"kex_exchange_identification: Connection closed by remote host\n{JUMP}", JUMP.strip()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trouble", [SshTrouble.LOST, SshTrouble.KEY_CHANGED])
def test_the_last_line_of_ssh_is_shown_and_that_of_a_jump_host(said, shown, trouble):
    why = SshAnswer(-1, b"", said, trouble).why
    assert why == f"{trouble}: {shown} ({trouble.way_out})"


SAID = {
    SshTrouble.UNREACHABLE: "ssh: connect to host 10.0.0.1 port 22: Connection refused",
    SshTrouble.REFUSED: "fleet@10.0.0.1: Permission denied (publickey).",
    SshTrouble.KEY_CHANGED: "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n"
    "Host key verification failed.",
    SshTrouble.KEY_UNKNOWN: "Host key verification failed.",
    SshTrouble.TIMEOUT: "Connection timed out during banner exchange",
    SshTrouble.LOST: "client_loop: send disconnect: Broken pipe",
}


@pytest.mark.parametrize("trouble", SAID)
def test_words_of_ssh_are_one_trouble_with_a_way_out(trouble, marks):
    (marks / "stderr").write_text(SAID[trouble])
    with SshClient({}) as client:
        answer = client.run(HOST, ["true"])
    assert (answer.status, answer.trouble) == (-1, trouble)
    assert not answer.ok
    assert answer.why.startswith(trouble.value)
    assert trouble.way_out in answer.why
    assert "\n" not in answer.why


def test_a_known_host_that_shows_another_kind_of_key_has_changed_it(marks):
    (marks / "stderr").write_text(SAID[SshTrouble.KEY_UNKNOWN])
    with SshClient({"pi-0": "ssh-ed25519 AAAA"}) as client:
        assert client.run(HOST, ["true"]).trouble is SshTrouble.KEY_CHANGED


def test_the_key_of_the_enrolment_is_the_only_one_that_counts(marks):
    with SshClient({"pi-0": "ssh-ed25519 AAAA"}) as client:
        assert client.run(HOST, ["true"]).ok
        assert client.run(SshHost("pi-1", "10.0.0.2"), ["true"]).ok
    first, second = (marks / "said").read_text().splitlines()[:2]
    for option in ("HostKeyAlias=pi-0", "GlobalKnownHostsFile=/dev/null", "UserKnownHostsFile="):
        assert option in first
        assert option not in second, "the user's known_hosts"
    for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", "ControlMaster=auto"):
        assert option in first
        assert option in second


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 14, 15, 16, 1000])
def test_what_is_heard_does_not_depend_on_how_it_arrives(size, marks, monkeypatch):
    read, content = os.read, b"\x1e0\x1e\x1e" + bytes(range(40)) + b"\x1e"
    (marks / "talks").touch()
    monkeypatch.setattr(os, "read", lambda file, most: read(file, min(size, most)))
    heard = []
    with SshClient({}) as client:
        assert client.run(HOST, ["cat"], content, heard=heard.append).ok
    assert b"".join(heard) == content


@pytest.mark.parametrize("said", ["This account is currently not available.\n", "", "a\nmenu: "])
def test_a_login_that_runs_something_else_is_said(said, marks):
    (marks / "quits").write_text(said)
    with SshClient({}) as client:
        answer = client.run(HOST, ["true"])
    assert (answer.status, answer.stdout, answer.trouble) == (-1, b"", SshTrouble.SHELL)
    assert answer.why.startswith(
        "no shell" + "".join(f": {x.strip()}" for x in said.splitlines()[-1:])
    )


class SlowFile(io.BytesIO):
    """Each part of it takes 200 seconds."""

    now = 0.0

    def read(self, size):
        self.now += 200.0
        return super().read(min(size, 10))


def test_a_copy_may_take_any_time_while_it_moves(marks, monkeypatch):
    file = SlowFile(bytes(100))
    monkeypatch.setattr(ssh, "time", types.SimpleNamespace(monotonic=lambda: file.now))
    with SshClient({}) as client:
        answer = client.run(HOST, ["sh", "-c", "wc -c"], file, seconds=300.0)
    assert (answer.text.strip(), answer.trouble, file.now > 2000.0) == ("100", None, True)
    assert COPY_S == 300.0


def test_what_takes_the_output_may_fail_and_leaves_no_process(marks):
    def full(chunk):
        raise OSError(28, "No space left on device")

    with SshClient({}) as client, pytest.raises(OSError, match="No space left"):
        client.run(HOST, ["sh", "-c", "echo a; exec sleep 60"], heard=full)


@pytest.mark.parametrize("yes", [True, False])
def test_a_strange_host_is_shown_and_asked_about_once(yes, marks):
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIG3kTrqjLUdJWLGMV5RZEHZ4HIPYgJXKMHRZUKhNlL0g"
    (marks / "key").write_text(f"pi-0 {key}\n")
    (marks / "strange").touch()
    asked = []

    def ask(question):
        asked.append(question)
        return yes

    accepted = marks / "config/known_hosts"
    for _ in range(2):
        with SshClient({}, accepted=accepted, ask=ask) as client:
            assert client.run(HOST, ["true"]).ok is yes
    assert len(asked) == (1 if yes else 2)
    assert "SHA256:" in asked[0]
    assert accepted.exists() is yes
    with SshClient({}) as client:  # nobody to ask
        assert client.run(HOST, ["true"]).trouble is SshTrouble.KEY_UNKNOWN


def connections(marks):
    """The connection of each command of ssh, by its number."""
    return re.findall(
        r"ControlMaster=auto -o ControlPath=\S+/c(\d+) ", (marks / "said").read_text()
    )


@pytest.mark.parametrize("said", ["Connection reset by peer", "timed out"])
def test_a_connection_that_was_lost_or_hung_is_not_used_again(said, marks):
    with SshClient({}) as client:
        assert client.run(HOST, ["true"]).ok
        assert client.run(HOST, ["true"]).ok
        (marks / "stderr").write_text(said)
        assert not client.run(HOST, ["true"]).ok
        (marks / "stderr").unlink()
        assert client.run(HOST, ["true"]).ok
    *first, last = connections(marks)
    assert (first, last != "0") == (["0"] * 3, True)


def test_a_client_of_one_command_keeps_no_connection(marks):
    with SshClient({}, keeps=False) as client:
        assert client.run(HOST, ["true"]).ok
    assert re.findall(r"Control\S+", (marks / "said").read_text()) == ["ControlPath=none"]


def test_two_hosts_that_begin_at_once_do_not_share_a_connection(marks):
    both = threading.Barrier(2)

    class Slow(SshHost):
        def __hash__(self):
            both.wait()
            return 1

    with SshClient({}) as client:
        hosts = [Slow(f"pi-{i}", "10.0.0.1") for i in range(2)]
        answers = on_each(hosts, lambda host: client.run(host, ["true"]), none_fails)
        assert all(answer.ok for answer in answers)
    assert len(set(connections(marks))) == 2


def test_nothing_is_asked_by_a_window_either(marks):
    with SshClient({}) as client:
        answer = client.run(HOST, ["printenv", "SSH_ASKPASS_REQUIRE"])
    assert answer.text == "never\n"


def test_sixteen_are_worked_on_at_a_time():
    inside, most, lock = 0, 0, threading.Lock()
    all_there = threading.Barrier(16)

    def work(item):
        nonlocal inside, most
        with lock:
            inside, most = inside + 1, max(most, inside + 1)
        if item < 16:
            all_there.wait()
        with lock:
            inside -= 1
        return -item

    assert on_each(range(40), work, none_fails) == [-item for item in range(40)], "in order"
    assert most == 16


def none_fails(item, why):
    raise AssertionError(why)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("unit"), "KeyError: 'unit'"),
        (ValueError("no\nnumber"), "ValueError: no number"),
        (ConfigError("no worker", "make one"), "no worker (make one)"),
        (RecursionError("nested"), "RecursionError: nested"),
        (tarfile.ReadError("cut"), "ReadError: cut"),
        (OSError(28, "No space left"), "OSError: [Errno 28] No space left"),
    ],
)
def test_an_exception_is_the_end_of_one_item_and_its_line(error, said):
    def work(item):
        if item == 1:
            raise error
        return item, ""

    zero, one, two = on_each(range(3), work, lambda item, why: (item, why))
    assert (zero, two) == ((0, ""), (2, ""))
    assert one[0] == 1
    assert one[1].startswith(said)
    assert "\n" not in one[1]


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize(
    ("rooms", "items", "at_once"), [(0, 240, 1), (3, 240, 3), (400, 240, 16), (400, 2, 2)]
)
def test_no_more_are_worked_on_than_files_may_be_open(rooms, items, at_once, monkeypatch):
    pools, pool = [], ssh.ThreadPoolExecutor
    monkeypatch.setattr(ssh, "ThreadPoolExecutor", lambda n: pools.append(n) or pool(n))
    limit = open_files() + rooms * FILES_EACH + FILES_EACH // 2
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert on_each(range(items), abs, none_fails) == [*range(items)]
    assert pools == [at_once]


def test_many_machines_are_called_with_few_files(marks, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = open_files() + 2 * FILES_EACH + 3
    hosts = [SshHost(f"pi-{i}", "10.0.0.1") for i in range(24)]
    with SshClient({}, keeps=False) as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            answers = on_each(hosts, lambda host: client.run(host, ["true"]), none_fails)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(answer.ok for answer in answers)


def test_an_answer_says_why_in_one_line():
    assert SshAnswer().why == ""
    assert SshAnswer(3, b"", "a\n\n  last \n").why == "exit status 3: last"
    assert SshAnswer(CUT).why == "exit status 75"
    assert SshAnswer(-1, b"", "a\nKeyError: 'b'\n").why == "KeyError: 'b'"
    assert argv("pi", "true")[-3:] == ["--", "pi", "true"]
