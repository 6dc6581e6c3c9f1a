"""What holds for every `Remote`: functions of a remote, a machine that it reaches, and a folder."""

from __future__ import annotations

import io
import time
from pathlib import Path

from patience import patience

from edgetrain.fleet.ssh import Remote, SshHost, SshTrouble, copy


def words_arrive_as_they_are(remote: Remote, host: SshHost, folder: Path) -> None:
    words = ["a b", "", "'", '"', "$HOME", "*", "line\nline", "ü", "-n", ";exit 7", "\\"]
    answer = remote.run(host, ["printf", "[%s]", *words])
    assert answer.ok, answer
    assert answer.text == "".join(f"[{word}]" for word in words)


def bytes_arrive_as_they_are(remote: Remote, host: SshHost, folder: Path) -> None:
    content = bytes(range(256)) * 3000
    answer = remote.run(host, ["cat"], content)
    assert (answer.stdout, answer.stderr) == (content, "")
    (folder / "content").write_bytes(content)
    with (folder / "content").open("rb") as file:
        file.seek(1000)
        assert remote.run(host, ["cat"], file).stdout == content[1000:]


def a_command_that_reads_no_input_ends(remote: Remote, host: SshHost, folder: Path) -> None:
    assert remote.run(host, ["true"], bytes(1 << 20)).ok


def status_and_stderr_come_back(remote: Remote, host: SshHost, folder: Path) -> None:
    answer = remote.run(host, ["sh", "-c", "echo out; echo bad >&2; exit 9"])
    assert (answer.status, answer.stdout, answer.stderr) == (9, b"out\n", "bad\n")
    assert answer.why == "exit status 9: bad"
    ended = remote.run(host, ["sh", "-c", "exit 255"])
    assert (ended.status, ended.trouble) == (254, None)


def a_limit_ends_it(remote: Remote, host: SshHost, folder: Path) -> None:
    began = time.monotonic()
    for given in (b"", io.BytesIO(bytes(1000))):
        answer = remote.run(host, ["sleep", "30"], given, seconds=0.5)
        assert (answer.status, answer.trouble) == (-1, SshTrouble.TIMEOUT)
    assert time.monotonic() - began < patience(20)


def output_is_heard_as_it_comes(remote: Remote, host: SshHost, folder: Path) -> None:
    heard: list[bytes] = []
    answer = remote.run(host, ["printf", "abc"], heard=heard.append)
    assert (b"".join(heard), answer.stdout) == (b"abc", b"")


def a_file_is_copied_once(remote: Remote, host: SshHost, folder: Path) -> None:
    source = folder / "source"
    source.write_bytes(bytes(range(256)) * 100)
    for said in ("", "same"):
        answer = copy(remote, host, source, "a folder/file")
        assert (answer.status, answer.text.strip()) == (0, said), answer
    assert remote.run(host, ["cat", "a folder/file"]).stdout == source.read_bytes()
    assert remote.run(host, ["ls", "a folder"]).text == "file\n"


LAWS = (
    words_arrive_as_they_are,
    bytes_arrive_as_they_are,
    a_command_that_reads_no_input_ends,
    status_and_stderr_come_back,
    a_limit_ends_it,
    output_is_heard_as_it_comes,
    a_file_is_copied_once,
)
