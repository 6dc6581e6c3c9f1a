"""Commands and files on other machines, over the system's `ssh`: one way, for devices and servers.

The user's agent, configuration and jump hosts are used; nothing is ever asked by ssh itself. A
machine's host key is looked for in three places, and is never taken silently:

    place                                     if the key is another one
    the enrolment, or a person's earlier yes  KEY_CHANGED; nothing is sent
    the user's known_hosts                    KEY_CHANGED; nothing is sent
    nowhere: its fingerprint is shown         a person says yes once, or KEY_UNKNOWN

What runs on the other side needs a POSIX shell, and for `root` sudo. What is sent, and why, is not
known here: see `provisioning/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import resource
import selectors
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, BinaryIO, Protocol, TypeVar

from edgetrain.errors import ConfigError, EdgetrainError, in_words

OPTIONS = ("-T", *(f"-o{option}" for option in (
    "IgnoreUnknown=*",  # an older ssh lacks some of these
    "BatchMode=yes", "StrictHostKeyChecking=yes", "VerifyHostKeyDNS=no", "ConnectTimeout=10",
    "ConnectionAttempts=1", "ServerAliveInterval=5", "ServerAliveCountMax=3",
    "RemoteCommand=none", "SessionType=default", "StdinNull=no", "ForkAfterAuthentication=no",
    "LogLevel=ERROR", "VisualHostKey=no", "PermitLocalCommand=no", "ClearAllForwardings=yes",
    "ForwardX11=no", "Tunnel=no",
)))  # fmt: skip
"""Asks nothing, takes no host that is not known, and notices a dead one within 15 seconds. Carries
one command, its input and its output, whatever the user's configuration does for other uses."""
AT_ONCE = 16
"""Machines that are worked on at a time."""
FILES_EACH = 12
"""Files that are open at once for one of them, at most: three pipes, and what is copied."""
CHUNK = 1 << 18
MOST_OUTPUT = 16 << 20
"""Bytes that are kept of what a command prints."""
LONGEST_SOCKET = 80
"""Characters of a control socket's path: the system allows 108, and ssh adds 17 for a draft."""
COPY_S = 300.0
"""Seconds for which a copy may stand still: a slow card takes its time to write what it has."""
CUT = 75
"""Exit status of a copy whose bytes ended too soon."""
T = TypeVar("T")
R = TypeVar("R")


class SshTrouble(StrEnum):
    """Why a command did not run to its end. Its value is what a person reads."""

    UNREACHABLE = "unreachable"
    REFUSED = "key refused"
    KEY_UNKNOWN = "host key unknown"
    KEY_CHANGED = "host key changed"
    TIMEOUT = "timeout"
    LOST = "connection lost"
    SUDO = "no sudo"
    SHELL = "no shell"

    @property
    def way_out(self) -> str:
        return _WAYS_OUT[self]


_WAYS_OUT = {
    SshTrouble.UNREACHABLE: "is it on, and is its address right? then the same command again",
    SshTrouble.REFUSED: "`ssh -o BatchMode=yes HOST true` has to work without a question: the "
    "user's key has to be on the device, and in the agent if it has a passphrase",
    SshTrouble.KEY_UNKNOWN: "on a terminal its fingerprint is shown and asked for; or put its key "
    "into ~/.ssh/known_hosts",
    SshTrouble.KEY_CHANGED: "nothing was sent. If the machine was set up anew, take its old key "
    "off: edgetrain keys revoke NAME, or ssh-keygen -R HOST",
    SshTrouble.TIMEOUT: "it is slow or hangs: the same command again, or restart the machine",
    SshTrouble.LOST: "the same command goes on where it was cut off",
    SshTrouble.SHELL: "something else answers: give the user a POSIX shell, without a ForceCommand",
    SshTrouble.SUDO: "--ask-sudo asks for the password; or allow the user sudo without one",
}
_SIGNS = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", SshTrouble.KEY_CHANGED),
    ("host key is known for", SshTrouble.KEY_UNKNOWN),
    ("Host key verification failed", SshTrouble.KEY_UNKNOWN),
    ("Permission denied (", SshTrouble.REFUSED),
    ("Too many authentication failures", SshTrouble.REFUSED),
    ("ssh: connect to host", SshTrouble.UNREACHABLE),
    ("Could not resolve hostname", SshTrouble.UNREACHABLE),
    ("during banner exchange", SshTrouble.TIMEOUT),
    ("timed out", SshTrouble.TIMEOUT),
    ("kex_exchange_identification", SshTrouble.UNREACHABLE),
)
"""Words of ssh, the most telling first; without any of them the connection was lost."""
_JUMPED, _VAGUE = " UNKNOWN port ", ("stdio forwarding failed", "kex_exchange_identification:")
"""How ssh names a host behind a jump host; its words that do not say why."""
_NO_SUDO = (
    "a password is required", "incorrect password", "no password was provided",
    "not in the sudoers", "may not run sudo", "sudo: not found", "not allowed to execute",
    "must have a tty",
)  # fmt: skip


@dataclass(frozen=True)
class SshHost:
    """A machine that is reached over ssh."""

    name: str
    """The name that results and host keys have."""
    address: str
    """Destination of ssh: a name, an address, or an alias of ~/.ssh/config."""
    user: str = ""
    """"": as ssh's configuration says."""

    @property
    def target(self) -> str:
        return f"{self.user}@{self.address}" if self.user else self.address


@dataclass(frozen=True)
class SshAnswer:
    """The result of a command on one machine."""

    status: int = 0
    """Its exit status, 0 to 254; -1: it did not run to its end."""
    stdout: bytes = field(default=b"", repr=False)
    stderr: str = ""
    trouble: SshTrouble | None = None

    @property
    def ok(self) -> bool:
        return self.status == 0 and self.trouble is None

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def why(self) -> str:
        """Why it is not ok, in a line; "" if it is."""
        if self.ok:
            return ""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip(" @\t")]
        last = lines[-1] if lines else ""
        if _JUMPED in last:  # why is in a line before it
            last = "; ".join([*(x for x in lines[:-1] if not x.startswith(_VAGUE)), last][-2:])
        if self.trouble is None:
            if self.status < 0:
                return last
            return f"exit status {self.status}: {last}" if last else f"exit status {self.status}"
        told = f": {last}" if last else ""
        return f"{self.trouble}{told} ({self.trouble.way_out})"


class Remote(Protocol):
    """A way to run commands on machines. `tests/fakes/folder_remote.py` has one without ssh; both
    pass `tests/fleet/test_remotes.py`."""

    def run(
        self,
        host: SshHost,
        words: Sequence[str],
        stdin: bytes | BinaryIO = b"",
        *,
        seconds: float = 60.0,
        root: bool = False,
        heard: Callable[[bytes], None] | None = None,
    ) -> SshAnswer:
        """Run a command, given as a list of words, with these bytes as its input.

        seconds: its limit, the connection included, and of a file as input from when a part of it
        was last taken. root: as root, by sudo. heard: is given what it prints as it comes, in place
        of `SshAnswer.stdout`. Does not raise for what goes wrong on the way or over there. A status
        of 255 is seen as 254.
        """


def argv(target: str, script: str, options: Sequence[str] = ()) -> list[str]:
    """The first of two options counts: without one in `options` no connection is shared."""
    return ["ssh", *OPTIONS, *options, "-o", "ControlPath=none", "--", target, script]


def configured(host: SshHost) -> dict[str, str]:
    """What the user's ssh has for a machine, by the names of ssh_config in small letters: its port,
    its jump host. {} if there is no ssh here."""
    if shutil.which("ssh") is None:
        return {}
    words = ["ssh", "-G", "--", host.target]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


def on_each(
    items: Sequence[T],
    work: Callable[[T], R],
    failed: Callable[[T, str], R],
    at_once: int = AT_ONCE,
) -> list[R]:
    """Call `work` for each item, `at_once` at a time, or as many as files may be open; what it
    returns, in order. An exception is the end of one item: `failed` makes its result, of the item
    and a line. Only a closed output of our own, BrokenPipeError, is raised."""

    def one(item: T) -> R:
        try:
            return work(item)
        except BrokenPipeError:
            raise
        except Exception as error:
            known = isinstance(error, EdgetrainError)
            return failed(item, str(error) if known else in_words(error).splitlines()[0])

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit >= 0:  # below: there is none
        at_once = min(at_once, (limit - len([*Path("/proc/self/fd").iterdir()])) // FILES_EACH)
    with ThreadPoolExecutor(max(1, min(at_once, len(items)))) as pool:
        return list(pool.map(one, items))


# -- files ---------------------------------------------------------------------------------------

_LOOK = """\
target=$1 digest=$2 part=$1.$2.part
if [ -f "$target" ] && [ "$(sha256sum < "$target")" = "$digest  -" ]; then echo same; exit; fi
for other in "$target".*.part; do [ "$other" = "$part" ] || rm -f -- "$other"; done
stat -c %s -- "$part" 2> /dev/null || echo 0
"""
_PUT = f"""\
target=$1 digest=$2 size=$3 part=$1.$2.part
mkdir -p -- "$(dirname -- "$target")" && cat >> "$part" || exit 1
[ "$(stat -c %s -- "$part")" -ge "$size" ] || exit {CUT}
if [ "$(sha256sum < "$part")" != "$digest  -" ]; then
  rm -f -- "$part"; echo "it arrived with another SHA-256: the same command again" >&2; exit 1
fi
chmod 0644 -- "$part" && sync -- "$part" && mv -f -- "$part" "$target"
"""


def copy(
    remote: Remote,
    host: SshHost,
    source: Path,
    target: str,
    *,
    digest: str = "",
    seconds: float = COPY_S,
    root: bool = False,
) -> SshAnswer:
    """Copy a file to a path on a machine, whole or not at all. Its status is 0 if it is there.
    seconds: how long nothing of it may move.

    A copy that was cut off goes on where it ended: its bytes wait in TARGET.DIGEST.part. Nothing is
    sent if the file is there already. digest: the SHA-256 of the file, if it is known.
    """
    with source.open("rb") as file:
        digest = digest or hashlib.file_digest(file, "sha256").hexdigest()
        words = ["sh", "-c", _LOOK, "sh", target, digest]
        found = remote.run(host, words, seconds=seconds, root=root)
        if not found.ok or found.text.strip() == "same":
            return found
        size = os.fstat(file.fileno()).st_size
        file.seek(min(int(found.text), size))
        words = ["sh", "-c", _PUT, "sh", target, digest, str(size)]
        done = remote.run(host, words, file, seconds=seconds, root=root)
    if done.status == CUT and done.trouble is None:
        return SshAnswer(-1, b"", done.stderr, SshTrouble.LOST)
    return done


# -- the system's ssh ----------------------------------------------------------------------------

_AS_ROOT = """\
IFS= read -r word
export LC_ALL=C.UTF-8
[ "$(id -u)" = 0 ] && exec "$@"
if [ -z "$word" ] || sudo -n true 2> /dev/null; then exec sudo -n -- "$@"; fi
{ printf '%s\\n' "$word"; exec cat; } | sudo -k -S -p '' -- "$@"
"""
"""Runs its words as root. The first line of its input is the password, "" for none: sudo reads it
from there, and only where it needs one. Its words of refusal are known in English only."""


class SshClient:
    """A `Remote` that starts the system's ssh. One connection a machine is kept and shared, until a
    command over it is lost or takes too long: the next one begins with a connection of its own."""

    def __init__(
        self,
        host_keys: Mapping[str, str],
        *,
        accepted: Path | None = None,
        ask: Callable[[str], bool] | None = None,
        password: str = "",
        keeps: bool = True,
        options: Sequence[str] = (),
    ) -> None:
        """host_keys: "ssh-ed25519 AAAA…" by `SshHost.name`, of the enrolment. accepted: the file
        of host keys that a person said yes to. ask: shows a line and says whether it was a yes;
        None: nobody can be asked. password: of sudo, on all machines. keeps: whether connections
        are kept; for one command a machine that costs more than it saves. options: more words for
        ssh.
        """
        if shutil.which("ssh") is None:
            raise ConfigError("there is no ssh on this machine", "install OpenSSH's client")
        self._ask, self._accepted, self._password = ask, accepted, password
        self._options, self._keeps = tuple(options), keeps
        self._folder = Path(tempfile.mkdtemp(prefix="edgetrain-ssh-"))
        self._known = dict(host_keys)
        if accepted is not None and accepted.exists():
            for line in accepted.read_text("utf-8").splitlines():
                name, _, key = line.partition(" ")
                self._known.setdefault(name, key)
        self._numbers: dict[SshHost, int] = {}
        self._next = itertools.count()
        self._asking = threading.Lock()

    def __enter__(self) -> SshClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        _end_connections(self._folder.glob("c*"))
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        host: SshHost,
        words: Sequence[str],
        stdin: bytes | BinaryIO = b"",
        *,
        seconds: float = 60.0,
        root: bool = False,
        heard: Callable[[bytes], None] | None = None,
    ) -> SshAnswer:
        if root:
            words = ["sh", "-c", _AS_ROOT, "sh", *words]
        # A shell of its own: the user's may be another, and 255 is what ssh itself ends with. Marks
        # of this call alone, which the line spells in another way: shells may print it, too.
        mark = os.urandom(6).hex()
        show = f"printf '\\036{mark}\\036'"
        script = f"{show}; {shlex.join(words)}; s=$?; {show}; [ $s = 255 ] && s=254; exit $s"
        line = f"exec sh -c {shlex.quote(script)}"

        def start() -> SshAnswer:
            said = _Marked(f"\x1e{mark}\x1e".encode(), heard)
            return self._start(host, line, first, stdin, seconds, said)

        first = f"{self._password}\n".encode() if root else b""
        answer = start()
        if answer.trouble is SshTrouble.KEY_UNKNOWN and self._learn(host):
            return start()
        if answer.trouble in (SshTrouble.TIMEOUT, SshTrouble.LOST):
            number = self._numbers.pop(host, None)
            _end_connections(self._folder.glob(f"c{number}"))
        if root and answer.status > 0 and any(sign in answer.stderr for sign in _NO_SUDO):
            return SshAnswer(-1, b"", answer.stderr, SshTrouble.SUDO)
        return answer

    def _start(
        self,
        host: SshHost,
        line: str,
        first: bytes,
        stdin: bytes | BinaryIO,
        seconds: float,
        marked: _Marked,
    ) -> SshAnswer:
        # A file for stderr: a connection that is kept holds it open after the command has ended.
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                argv(host.target, line, self._host_options(host)), start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, "SSH_ASKPASS_REQUIRE": "never"},  # a jump host might ask
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            feed = _Feed(process.stdin, first, stdin)
            feed.start()
            in_time = False
            try:
                in_time = _drain(process.stdout, lambda: feed.moved + seconds, marked.take)
            finally:
                if not in_time:
                    process.kill()
                status = process.wait()
                process.stdout.close()
                feed.join()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - CHUNK))
            said = errors.read().decode(errors="replace")
        out = marked.end()
        if not in_time:
            return SshAnswer(-1, out, said, SshTrouble.TIMEOUT)
        if 0 <= status < 255 and not marked.seen:
            return SshAnswer(-1, b"", f"{said}\n{marked.before}", SshTrouble.SHELL)
        if 0 <= status < 255:
            return SshAnswer(status, out, said)
        trouble = next((trouble for sign, trouble in _SIGNS if sign in said), SshTrouble.LOST)
        if trouble is SshTrouble.KEY_UNKNOWN and host.name in self._known:
            trouble = SshTrouble.KEY_CHANGED  # it has a key of another kind only
        return SshAnswer(-1, out, said, trouble)

    def _host_options(self, host: SshHost) -> list[str]:
        number = self._numbers.setdefault(host, next(self._next))
        options = list(self._options)
        socket = self._folder / f"c{number}"
        if self._keeps and len(str(socket)) <= LONGEST_SOCKET:
            options += ["-o", "ControlMaster=auto", "-o", f"ControlPath={socket}"]
            options += ["-o", "ControlPersist=30"]
        if host.name in self._known:
            known = self._folder / f"k{number}"
            if not known.exists():
                known.write_text(f"{host.name} {self._known[host.name]}\n", "utf-8")
            options += ["-o", f"UserKnownHostsFile={known}", "-o", "GlobalKnownHostsFile=/dev/null"]
            options += ["-o", f"HostKeyAlias={host.name}", "-o", "UpdateHostKeys=no"]
            options += ["-o", "KnownHostsCommand=none"]
        return options

    def _learn(self, host: SshHost) -> bool:
        """Show the host key of a machine, and take it if a person says yes."""
        if self._ask is None or self._accepted is None:
            return False
        with self._asking:
            # A handshake that stops before the user's key is offered.
            file = self._folder / "seen"
            file.unlink(missing_ok=True)
            options = [*self._options, "-o", "StrictHostKeyChecking=accept-new"]
            options += ["-o", f"UserKnownHostsFile={file}", "-o", "HashKnownHosts=no"]
            options += ["-o", "GlobalKnownHostsFile=/dev/null", "-o", f"HostKeyAlias={host.name}"]
            options += ["-o", "PreferredAuthentications=none", "-o", "ControlPath=none"]
            words = ["ssh", *options, *OPTIONS, "--", host.target, "true"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(words, capture_output=True, check=False, timeout=30)
            if not file.exists():
                return False
            shown = subprocess.run(
                ["ssh-keygen", "-l", "-f", str(file)], capture_output=True, text=True, check=False
            ).stdout.split()
            fingerprint = next((word for word in shown if word.startswith("SHA256:")), "unreadable")
            question = (
                f"{host.name} ({host.address}) has the host key {fingerprint}: is that right?"
            )
            if not self._ask(question):
                return False
            key = file.read_text("utf-8").partition(" ")[2].strip()
            self._known[host.name] = key
            self._accepted.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._accepted.open("a", encoding="utf-8") as out:
                out.write(f"{host.name} {key}\n")
        return True


def _end_connections(sockets: Iterable[Path]) -> None:
    """End the connections that are kept at these control sockets."""

    def end(socket: Path) -> None:
        words, quiet = ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "x"], subprocess.DEVNULL
        subprocess.run(words, stdin=quiet, stdout=quiet, stderr=quiet, timeout=5, check=False)

    on_each([*sockets], end, lambda *_: None)


class _Feed(threading.Thread):
    """Writes a command's input, and closes it."""

    def __init__(self, pipe: IO[bytes], first: bytes, stdin: bytes | BinaryIO) -> None:
        super().__init__(daemon=True)
        self.moved = time.monotonic()
        """When it began, or a part of a file was last taken."""
        self._pipe, self._first, self._stdin = pipe, first, stdin

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, and reads no more
            self._pipe.write(self._first)
            if isinstance(self._stdin, bytes):
                self._pipe.write(self._stdin)
            else:
                while chunk := self._stdin.read(CHUNK):
                    self._pipe.write(chunk)
                    self._pipe.flush()
                    self.moved = time.monotonic()
        with contextlib.suppress(OSError):
            self._pipe.close()


class _Marked:
    """Takes what a command prints out of all that arrives, by a mark that stands before and behind
    it: login shells, and what follows them, may print, too."""

    def __init__(self, mark: bytes, heard: Callable[[bytes], None] | None) -> None:
        """heard: is given it as it comes; None: `end` returns it, up to MOST_OUTPUT."""
        self.seen, self.before = 0, ""
        """Marks so far; the end of what came before the first."""
        self._mark, self._heard = mark, heard
        self._rest, self._out = b"", bytearray()

    def take(self, chunk: bytes) -> None:
        *parts, last = (self._rest + chunk).split(self._mark)
        begun = last.rfind(self._mark[:1], -len(self._mark))  # a mark that is not whole yet
        cut = begun if begun >= 0 else len(last)
        self._rest = last[cut:]
        for part in parts:
            self._give(part)
            self.seen += 1
        self._give(last[:cut])

    def _give(self, part: bytes) -> None:
        if self.seen == 0:
            self.before = (self.before + part.decode(errors="replace"))[-1000:]
        elif self.seen == 1 and part and self._heard is not None:
            self._heard(part)
        elif self.seen == 1 and len(self._out) < MOST_OUTPUT:
            self._out += part

    def end(self) -> bytes:
        """Nothing more arrives."""
        self._give(self._rest)
        return bytes(self._out)


def _drain(pipe: IO[bytes], until: Callable[[], float], take: Callable[[bytes], None]) -> bool:
    """Take what comes out of a pipe; whether it ended in time, which may move meanwhile."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := until() - time.monotonic()) > 0:
            if selector.select(left):
                if not (chunk := os.read(pipe.fileno(), CHUNK)):
                    return True
                take(chunk)
    return False
