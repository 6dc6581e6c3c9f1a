#!/usr/bin/python3 -IS
"""A stand-in for systemctl in a root without systemd: it follows the unit files.

Called by /usr/local/bin/systemctl in roots (`ssh_fleet`), which answers `show` itself, as quickly
as the real one does, from what this leaves there; knows nothing of edgetrain. It starts what
ExecStart says, with the unit's environment, credentials, folders and user; reads what the service
tells on NOTIFY_SOCKET, keeps its watchdog, and starts it again as Restart= says. `boot`
starts what is enabled. It isolates nothing: that is for the boot test, which has systemd itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

UNITS, STATES = Path("/etc/systemd/system"), Path("/run/systemctl")
WANTS = UNITS / "multi-user.target.wants"
DYNAMIC_USER = 61184
SHOWN = {"ActiveState": "inactive", "SubState": "dead", "Result": "success", "ExecMainStatus": 0,
         "StatusText": "", "NRestarts": 0}  # fmt: skip


def read(unit: str) -> dict[str, list[str]]:
    """The settings of a unit, each with all its values."""
    found: dict[str, list[str]] = {}
    text = (UNITS / unit).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            found.setdefault(key.strip(), []).append(value.strip())
    return found


class Unit:
    """A unit, and the process that watches over it."""

    def __init__(self, name: str) -> None:
        self.name, self.file = name, STATES / f"{name}.json"
        self.shown = STATES / f"{name}.shown"
        self.stopping = False

    def state(self) -> dict:
        with contextlib.suppress(OSError, ValueError):
            return SHOWN | {"pid": 0} | json.loads(self.file.read_text())
        return SHOWN | {"pid": 0}

    def put(self, **changes) -> None:
        state = self.state() | changes
        shown = "".join(f"{key}={state[key]}\n" for key in SHOWN)
        for file, text in ((self.file, json.dumps(state)), (self.shown, shown)):
            draft = file.with_name(f"{file.name}.part")
            draft.write_text(text)
            draft.replace(file)

    @property
    def watcher(self) -> int:
        """The process that watches over it; 0: none does."""
        pid = self.state()["pid"]
        with contextlib.suppress(OSError):
            if pid and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return pid
        return 0

    def start(self) -> None:
        settings = read(self.name)
        needed = settings.get("ConditionPathExists", [])
        if self.watcher or not all(Path(path).exists() for path in needed):
            return
        if os.fork():
            os.wait()
            return
        os.setsid()
        if pid := os.fork():
            self.put(**SHOWN, pid=pid)
            os._exit(0)
        while self.state()["pid"] != os.getpid():
            time.sleep(0.01)
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.closerange(3, 256)
        signal.signal(signal.SIGTERM, self._stop)
        try:
            self.watch(settings)
        finally:
            os._exit(0)

    def stop(self) -> None:
        while pid := self.watcher:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)

    def _stop(self, *_) -> None:
        self.stopping = True

    def watch(self, settings: dict[str, list[str]]) -> None:
        """Run the service, again and again."""
        last = {key: values[-1] for key, values in settings.items()}
        good = {"0", *last.get("SuccessExitStatus", "").split()}
        while True:
            status = self.run(settings, last)
            is_good = str(status) in good or self.stopping
            again = last.get("Restart") == "always"
            again |= last.get("Restart") == "on-failure" and not is_good
            again &= str(status) not in last.get("RestartPreventExitStatus", "").split()
            self.put(ExecMainStatus=status, Result="success" if is_good else "exit-code")
            if self.stopping or not again:
                how = "inactive" if is_good else "failed"
                self.put(ActiveState=how, SubState="dead" if is_good else "failed")
                return
            self.put(ActiveState="activating", SubState="auto-restart")
            until = time.monotonic() + float(last.get("RestartSec", "0.1"))
            while not self.stopping and time.monotonic() < until:
                time.sleep(0.05)
            if self.stopping:
                self.put(ActiveState="inactive", SubState="dead")
                return
            self.put(NRestarts=self.state()["NRestarts"] + 1)

    def folders(self, last: dict[str, str], user: int) -> dict[str, str]:
        """Make the service's folders; what its specifiers stand for."""
        found = {"%S": "/var/lib", "%C": "/var/cache", "%t": "/run"}
        for key, top in (("State", "%S"), ("Cache", "%C"), ("Runtime", "%t")):
            if name := last.get(f"{key}Directory"):
                place = Path(found[top], name)
                real = place if top == "%t" else Path(found[top], "private", name)
                real.mkdir(parents=True, exist_ok=True)
                os.chown(real, user, user)
                if real != place and not place.exists():
                    place.symlink_to(f"private/{name}")
        return found

    def credentials(self, settings: dict[str, list[str]], user: int) -> Path:
        folder = Path("/run/credentials", self.name)
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, user, user)
        for line in settings.get("LoadCredential", []):
            name, _, path = line.partition(":")
            (folder / name).unlink(missing_ok=True)
            shutil.copyfile(path, folder / name)
            (folder / name).chmod(0o400)
            os.chown(folder / name, user, user)
        return folder

    def run(self, settings: dict[str, list[str]], last: dict[str, str]) -> int:
        """Run the service once; its exit status."""
        user = DYNAMIC_USER if last.get("DynamicUser") == "yes" else 0
        words = self.folders(last, user)
        words["%d"] = str(self.credentials(settings, user))

        def filled(text: str) -> str:
            for word, value in words.items():
                text = text.replace(word, value)
            return text.replace("$$", "$")

        pairs = (
            filled(p).split("=", 1) for e in settings.get("Environment", []) for p in e.split()
        )
        environment = {"PATH": os.environ["PATH"], "HOME": "/", **dict(pairs)}
        notify = STATES / f"{self.name}.notify"
        notify.unlink(missing_ok=True)
        told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        told.bind(str(notify))
        notify.chmod(0o777)
        is_notify = last.get("Type") == "notify"
        watchdog_s = float(last.get("WatchdogSec", "inf"))
        if is_notify:
            environment["NOTIFY_SOCKET"] = str(notify)
            if watchdog_s < float("inf"):
                environment["WATCHDOG_USEC"] = f"{1e6 * watchdog_s:.0f}"
        self.put(StatusText="", ActiveState="activating" if is_notify else "active",
                 SubState="start" if is_notify else "running")  # fmt: skip
        folder = filled(last.get("WorkingDirectory", "/"))
        journal = Path("/var/log/journal", f"{self.name}.log")
        journal.parent.mkdir(exist_ok=True)
        with journal.open("ab") as log:
            for line in settings.get("ExecStartPre", []):
                who = 0 if line.startswith("+") else user
                before = shlex.split(filled(line.lstrip("+-")))
                subprocess.run(
                    before, user=who, group=who, stdout=log, stderr=log, check=False, cwd=folder
                )
            child = subprocess.Popen(
                shlex.split(filled(last["ExecStart"])), env=environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, cwd=folder, user=user, group=user, extra_groups=[],
            )  # fmt: skip
        return self._wait(child, told, watchdog_s, float(last.get("TimeoutStopSec", "90")))

    def _wait(self, child, told, watchdog_s: float, stop_s: float) -> int:
        seen, asked = time.monotonic(), float("inf")
        with told, selectors.DefaultSelector() as selector:
            selector.register(told, selectors.EVENT_READ)
            while child.poll() is None:
                now = time.monotonic()
                if self.stopping and asked == float("inf"):
                    asked = now
                    child.terminate()
                if now - asked > stop_s or now - seen > watchdog_s:
                    child.kill()
                if not selector.select(0.05):
                    continue
                fields = dict(
                    line.partition("=")[::2] for line in told.recv(4096).decode().splitlines()
                )
                seen = now
                watchdog_s = float(fields.get("WATCHDOG_USEC", 1e6 * watchdog_s)) / 1e6
                if "STATUS" in fields:
                    self.put(StatusText=fields["STATUS"])
                for word, active, sub in (("READY", "active", "running"),
                                          ("RELOADING", "reloading", "reload"),
                                          ("STOPPING", "deactivating", "stop")):  # fmt: skip
                    if word in fields:
                        self.put(ActiveState=active, SubState=sub)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main(argv: list[str]) -> int:
    STATES.mkdir(exist_ok=True)
    verb, *words = argv
    names = [word for word in words if not word.startswith("-")]
    if verb == "boot":
        enabled = [path.name for path in sorted(WANTS.glob("*"))]
        verb, names = "start", [name for name in enabled if (UNITS / name).exists()]
    if verb == "show":
        print("".join(f"{key}={value}\n" for key, value in SHOWN.items()), end="")
        return 0
    with (STATES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in names:
            unit = Unit(name)
            if verb == "enable":
                WANTS.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    (WANTS / name).symlink_to(f"/etc/systemd/system/{name}")
            if verb == "disable":
                (WANTS / name).unlink(missing_ok=True)
            if verb == "reset-failed" and not unit.watcher:
                unit.put(**SHOWN)
            if verb in ("stop", "restart") or (verb == "disable" and "--now" in words):
                unit.stop()
            if verb in ("start", "restart") or (verb == "enable" and "--now" in words):
                unit.start()
    if verb in ("start", "restart") and "--no-block" not in words:
        for name in names:
            while Unit(name).watcher and Unit(name).state()["SubState"] in ("dead", "start"):
                time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
