"""What a device does with its jobs and versions, as root: job sets, slots, and the way back.

Runs on the device, from keeper.pyz, by the system's Python: only the standard library, and
first_boot.py's functions. The desk (`provisioning.desk`) copies files to `incoming` and calls a
verb; each verb may be cut off at any moment by a loss of power, and calling it again ends in the
same state. It needs no network, and nothing of the version that is on trial.

Sets: /etc/edgetrain/jobs/N has one job, its data and its bundle; /etc/edgetrain/current leads to
the one that is trained. A new set is unpacked beside the others, and taken by one rename.

Slots: /opt/edgetrain/a and b, of which `current` is used. An update goes into the other one, and
is on trial until the member in it is READY:

=========  ==================================================  =========  ==========================
phase      what happens                                        next       what is left
=========  ==================================================  =========  ==========================
(none)     `update`: unpacked, its modules can be imported     switching  trial.json
switching  unit stopped, `current` switched, unit started      trying     trial.json
trying     the unit is active, or has ended its job            (none)     the new slot is ready
trying     the unit has failed (status 2: also a refusal over  returning  trial.json
           versions), or is not READY for TRIAL_S
returning  unit stopped, `current` back, unit started          (none)     the new slot is not ready
=========  ==================================================  =========  ==========================

A slot whose member was never READY is no way back: then the new one stays, and a person is needed.
While no hub can be found nothing can be READY: that time counts only if the device was in a job
when the update came.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgetrain.provisioning.cards import first_boot
from edgetrain.provisioning.cards.first_boot import HUB_UNIT, SPARE, UNIT, Failed

TRIAL_S = 600.0
"""Seconds in which the member of a new version has to be READY."""
POLL_S = 5.0
LOCK_S = 30.0
TRIAL_UNIT = "edgetrain-trial.service"
LOOKING = "looking for the hub"
"""How the status of a member, or gateway, begins that has not found its hub: see
training.member.service."""
MESSAGES = "edgetrain/exchange/messages.py"
HUB_MARK = "Description=edgetrain hub"
"""In the text of a hub's unit."""
BEGUN = "etc/edgetrain/hub/run"
"""The number of the last run that a hub was told to begin. After a restart it goes on with that."""
SHOWN = ("ActiveState", "SubState", "Result", "ExecMainStatus", "StatusText", "NRestarts")
_TRIAL_TEXT = """\
[Unit]
Description=edgetrain: an update is on trial
ConditionPathExists=/opt/edgetrain/trial.json
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=/usr/bin/python3 /opt/edgetrain/keeper.pyz watch
Restart=on-failure
RestartSec=5

[Install]
WantedBy=multi-user.target
"""


class DeviceFiles:
    """The device's files. Each method is one step that a loss of power may cut off."""

    def write(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        """Put a file in place of `path`, whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        first_boot.write(path, content, mode)

    def link(self, path: Path, target: str) -> None:
        first_boot.relink(path, target)

    def rename(self, path: Path, to: Path) -> None:
        """What is in the folder `path` is on the disk, then has its name."""
        first_boot.sync_tree(path)
        path.rename(to)
        first_boot.sync_folder(to.parent)

    def remove(self, path: Path) -> None:
        """A file, or a folder with all in it, if it is there."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def unpack(self, file: BinaryIO, into: Path) -> None:
        into.mkdir(parents=True)
        with tarfile.open(fileobj=file, mode="r|") as tar:
            first_boot.extract(tar, into)


@dataclass(frozen=True)
class UnitState:
    """A unit, as `systemctl show` has it."""

    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    status: int = 0
    text: str = ""
    restarts: int = 0

    @property
    def is_ready(self) -> bool:
        return self.active in ("active", "reloading")

    @property
    def is_done(self) -> bool:
        return self.active == "inactive" and self.result == "success"


@dataclass(frozen=True)
class Trial:
    old: str
    new: str
    phase: str = "switching"
    left_s: float = TRIAL_S
    strict: bool = False
    """Whether time without a hub counts: the device was in a job when the update came."""
    why: str = ""


def judge(unit: UnitState, trial: Trial, passed_s: float) -> tuple[str, Trial]:
    """What to do after `passed_s` more seconds of "trying": ("taken" or "back" or "", trial)."""
    said = unit.text or f"{unit.active} ({unit.sub}), exit status {unit.status}"
    if unit.is_ready or unit.is_done:
        return "taken", trial
    if unit.active == "failed":
        return "back", dataclasses.replace(trial, why=said)
    looks = unit.sub == "start" and unit.text.startswith(LOOKING)
    waits = looks or (unit.sub == "auto-restart" and unit.status == first_boot.AGAIN)
    left_s = trial.left_s - (0.0 if waits and not trial.strict else passed_s)
    if left_s <= 0:
        return "back", dataclasses.replace(trial, why=f"not READY within {TRIAL_S:g} s: {said}")
    return "", dataclasses.replace(trial, left_s=left_s)


def unit_of(text: str) -> UnitState:
    """A unit, from lines with the properties SHOWN among them."""
    found = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
    status, restarts = (
        int(value) if (value := found.get(name, "")[:9]).isdecimal() else 0
        for name in ("ExecMainStatus", "NRestarts")
    )
    active, sub, result = (found.get(name, "") for name in ("ActiveState", "SubState", "Result"))
    return UnitState(active, sub, result, status, found.get("StatusText", ""), restarts)


def protocol_in(text: str) -> int | None:
    """The protocol that the text of MESSAGES says; None: it says none."""
    found = re.search(r"^PROTOCOL = (\d{1,9})$", text, re.MULTILINE)
    return int(found[1]) if found else None


def other_hub(there: str, ours: str) -> str:
    """Why a device with these lines "ADDRESS KEY" is another hub's than ours, with the way out;
    "": it is not."""
    keys, our_keys = (
        {words[1] for line in text.splitlines() if len(words := line.split()) == 2}
        for text in (there, ours)
    )
    if not keys or not our_keys or keys & our_keys:
        return ""
    return (
        f"it belongs to the hub with the key {min(keys)[:8]}…, of another cluster: take it out of "
        "that first (edgetrain devices remove)"
    )


def with_pins(there: str, ours: str) -> str:
    """A device's lines "ADDRESS KEY", with ours in place of those for the same addresses."""
    named = {line.split()[0] for line in ours.splitlines()}
    others = [line for line in there.splitlines() if not named & {*line.split()[:1]}]
    return "".join(f"{line}\n" for line in [*ours.splitlines(), *others])


Run = Callable[[Sequence[str], Mapping[str, str]], "tuple[int, str]"]
"""Runs a command with more environment: its exit status and what it printed."""


class DeviceKeeper:
    """The sets and slots of one device. `root`: "/" on a device."""

    def __init__(
        self, root: Path, run: Run, disk: DeviceFiles | None = None, program: bytes = b""
    ) -> None:
        """program: this program's own file, which an update leaves on the device."""
        self.slots, self.settings = root / "opt/edgetrain", root / "etc/edgetrain"
        self.incoming = self.slots / "incoming"
        self._root, self._run, self._disk = root, run, disk or DeviceFiles()
        self._program = program
        self._keys = root / first_boot.KEYS
        self._units = root / first_boot.UNITS

    # -- looking ------------------------------------------------------------------------------

    @property
    def slot(self) -> str:
        """The slot that is used; "": none is."""
        link = self.slots / "current"
        return str(link.readlink()) if link.is_symlink() else ""

    @property
    def name(self) -> str:
        """The name of the unit of what runs here: a member, or the hub."""
        return first_boot.unit_in(self._root)

    def unit(self) -> UnitState:
        words = ["systemctl", "show", self.name, *(f"--property={name}" for name in SHOWN)]
        return unit_of(self._run(words, {})[1])

    def _facts(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _slot_facts(self, slot: str) -> dict[str, Any]:
        found = self._facts(self.slots / f"{slot}.json")
        if slot and "edgetrain" not in found:  # as its card was flashed
            for info in (self.slots / slot).glob("edgetrain-*.dist-info"):
                found["edgetrain"] = info.name[10:-10]
        return found

    def _trial(self) -> Trial | None:
        found = self._facts(self.slots / "trial.json")
        return Trial(**found) if found else None

    def _put(self, path: Path, facts: Mapping[str, Any]) -> None:
        text = json.dumps(facts, sort_keys=True)
        self._disk.write(path, text.encode() + b"\n")

    def stop(self) -> dict[str, Any]:
        """Let the member leave its job, until it is started again."""
        self._systemctl("stop", self.name)
        return {}

    # -- job sets -----------------------------------------------------------------------------

    def send(self, digest: str, unit: str = "", hubs: str = "") -> dict[str, Any]:
        """Take the set that lies in `incoming` under this SHA-256, and the text of the member's
        unit and the hub's key for each address under those, if they are sent; then restart the
        member, or start one that does not run. A hub that does not run begins anew. Raises Failed;
        then the device trains what it trained."""
        if hubs and (why := other_hub(_text(self._keys / "hubs"), _text(self._arrived(hubs)))):
            raise Failed(why)
        if unit and (HUB_MARK in _text(self._arrived(unit))) != (self.name == HUB_UNIT):
            raise Failed("it is set up for another role: edgetrain devices provision, first")
        current = self.settings / "current"
        due = self.settings / "restart.due"
        changed = self._facts(current / "set.json").get("digest") != digest
        if changed:
            folder = self._unpacked_set(digest)
            self._disk.write(due, b"")
            self._disk.link(current, f"jobs/{folder.name}")
        if unit:  # as the set has it
            text, place = self._arrived(unit).read_text("utf-8"), self._units / self.name
            text = text.replace("@THREADS@", str(os.cpu_count() or 1))
            if _text(place) != text:
                self._disk.write(due, b"")
                self._disk.write(place, text.encode())
                changed = True
        if hubs:  # known by their keys at these addresses, other hubs as before
            text, place = self._arrived(hubs).read_text("utf-8"), self._keys / "hubs"
            if not set(text.splitlines()) <= set(_text(place).splitlines()):
                self._disk.write(due, b"")
                self._disk.write(place, with_pins(_text(place), text).encode())
                changed = True
        is_hub = self.name == HUB_UNIT
        if changed or due.exists() or (is_hub and not self.unit().is_ready):
            self._restart(is_hub=is_hub)
            self._disk.remove(due)
        elif not is_hub:
            self._systemctl("start", "--no-block", UNIT)
        facts = self._facts(current / "set.json")
        for folder in self._sets()[:-2]:  # the newest two stay, and the current one
            if folder.name != str(facts.get("number")):
                self._disk.remove(folder)
        for name in {digest, unit, hubs} - {""}:
            self._disk.remove(self.incoming / name)
        return {"changed": changed, "set": facts}

    def _unpacked_set(self, digest: str) -> Path:
        """The set with this digest, in its place."""
        sets = self.settings / "jobs"
        sets.mkdir(parents=True, exist_ok=True)
        for folder in self._sets():
            if self._facts(folder / "set.json").get("digest") == digest:
                return folder
        source = self._arrived(digest)
        for part in sets.glob("*.part"):
            self._disk.remove(part)
        number = max((int(folder.name) for folder in self._sets()), default=0) + 1
        part = sets / f"{number}.part"
        try:
            with source.open("rb") as file:
                self._disk.unpack(file, part)
        except (tarfile.TarError, EOFError) as error:
            raise Failed(f"the job's files cannot be unpacked: {error}") from None
        facts = self._facts(part / "set.json")
        if bundle := facts.get("bundle"):  # its code may run here, unless the owner revoked it
            path, name = self._keys / "bundles", str(facts.get("bundle_name", ""))
            lines = _text(path).splitlines()
            if not any(line.split()[:1] == [bundle] for line in lines):
                if any(self._facts(f / "set.json").get("bundle") == bundle for f in self._sets()):
                    raise Failed(
                        f"the bundle {bundle[:12]} was revoked on this device; `edgetrain bundle "
                        "allow` there lets it run again"
                    )
                text = "".join(f"{line}\n" for line in [*lines, f"{bundle} {name}".rstrip()])
                self._disk.write(path, text.encode(), 0o600)
        self._put(part / "set.json", {**facts, "digest": digest, "number": number})
        self._disk.rename(part, sets / str(number))
        return sets / str(number)

    def _sets(self) -> list[Path]:
        folders = (self.settings / "jobs").glob("*")
        return sorted((f for f in folders if f.name.isdecimal()), key=lambda f: int(f.name))

    def _restart(self, *, is_hub: bool) -> None:
        """A hub or gateway begins a run of its own, and listens before any member is told of the
        job: an older one would refuse it for good."""
        how = [] if is_hub else ["--no-block"]
        if is_hub:
            run = self._root / BEGUN
            number = int(_text(run) or 0) + 1
            self._disk.write(run, b"%d\n" % number)
        name = self.name
        for words in (["daemon-reload"], ["reset-failed", name], ["restart", *how, name]):
            self._systemctl(*words)
        unit = self.unit() if is_hub else UnitState("active")
        if not (unit.is_ready or unit.text.startswith(LOOKING)):  # a gateway, for the hub above
            raise Failed(f"its hub does not listen: {unit.text or unit.active}")

    # -- slots --------------------------------------------------------------------------------

    def update(self, digest: str) -> dict[str, Any]:
        """Unpack the archive that lies in `incoming` under this SHA-256 into the other slot, and
        put it on trial. Raises Failed; then nothing has changed."""
        trial, slot = self._trial(), self.slot
        if trial is not None:
            if self._slot_facts(trial.new).get("digest") != digest:
                raise Failed(f"slot {trial.new} is in use: another update is on trial")
            self._systemctl("start", "--no-block", TRIAL_UNIT)
            return {"trial": True}
        if slot and self._slot_facts(slot).get("digest") == digest:
            self._disk.remove(self.incoming / digest)
            return {"trial": False}
        new = "b" if slot == "a" else "a"
        if self._slot_facts(new).get("digest") != digest:
            source, part = self._arrived(digest), self.slots / f"{new}.part"
            self._disk.remove(self.slots / f"{new}.json")
            for path in (part, self.slots / new):
                self._disk.remove(path)
            try:
                with first_boot.worker_archive(source) as (manifest, payload):
                    takes = int(manifest["unpacked"]) + SPARE
                    if (free := shutil.disk_usage(self.slots).free) < takes:
                        raise Failed(
                            f"the disk has {free / 1e6:.0f} MB free, and the update takes "
                            f"{takes / 1e6:.0f} MB"
                        )
                    self._disk.unpack(payload, part)
            except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
                raise Failed(f"the worker archive cannot be unpacked: {error}") from None
            self._disk.rename(part, self.slots / new)
            packages = manifest.get("packages", {})
            versions = {name: packages.get(name, "") for name in ("edgetrain", "torch")}
            self._put(self.slots / f"{new}.json", {"digest": digest, **versions, "ready": False})
        # A version that cannot even be loaded is not tried.
        words = [sys.executable, "-c", "import torch, edgetrain.training.member.train"]
        environment = {"PYTHONPATH": str(self.slots / new), "PYTHONDONTWRITEBYTECODE": "1"}
        status, said = self._run(words, environment)
        if status:
            last = said.strip().splitlines()[-1:] or [f"exit status {status}"]
            raise Failed(f"the update does not load on this device: {last[0]}")
        unit = self.unit()
        if slot and (unit.is_ready or (unit.is_done and unit.status == 0 and unit.text)):
            self._put(self.slots / f"{slot}.json", {**self._slot_facts(slot), "ready": True})
        self._disk.remove(self.slots / "outcome.json")
        # Whatever happens from now on, each boot goes on with what is on trial.
        self._disk.write(self.slots / "keeper.pyz", self._program)
        self._disk.write(self._units / TRIAL_UNIT, _TRIAL_TEXT.encode())
        for words in (["daemon-reload"], ["enable", TRIAL_UNIT]):
            self._systemctl(*words)
        self._put_trial(Trial(slot, new, strict=unit.is_ready))
        self._systemctl("start", "--no-block", TRIAL_UNIT)
        self._disk.remove(self.incoming / digest)
        return {"trial": True}

    def _put_trial(self, trial: Trial) -> Trial:
        self._put(self.slots / "trial.json", dataclasses.asdict(trial))
        return trial

    # -- the way back -------------------------------------------------------------------------

    def watch(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Bring the update that is on trial to its end."""
        trial = self._trial()
        while trial is not None:
            if trial.phase == "switching":
                self._switch(trial.new)
                trial = self._put_trial(dataclasses.replace(trial, phase="trying"))
            elif trial.phase == "returning":
                self._switch(trial.old)
                self._end(trial, "back")
                trial = None
            else:
                sleep(POLL_S)
                verdict, after = judge(self.unit(), trial, POLL_S)
                if verdict == "taken":
                    facts = self._slot_facts(trial.new)
                    self._put(self.slots / f"{trial.new}.json", {**facts, "ready": True})
                    self._end(trial, "taken")
                    trial = None
                elif verdict == "back" and not self._slot_facts(trial.old).get("ready"):
                    self._end(after, "stuck")
                    trial = None
                elif verdict == "back":
                    trial = self._put_trial(dataclasses.replace(after, phase="returning"))
                else:
                    if int(after.left_s / 60) < int(trial.left_s / 60):  # a restart goes on here
                        self._put_trial(after)
                    trial = after

    def _switch(self, slot: str) -> None:
        name = self.name
        self._systemctl("stop", name)
        self._disk.link(self.slots / "current", slot)
        for words in (["reset-failed", name], ["start", "--no-block", name]):
            self._systemctl(*words)

    def _end(self, trial: Trial, ended: str) -> None:
        digest = str(self._slot_facts(trial.new).get("digest", "?"))
        self._put(self.slots / "outcome.json", {"digest": digest, "ended": ended, "why": trial.why})
        self._disk.remove(self.incoming / digest)
        self._disk.remove(self.slots / "trial.json")

    # -- tools --------------------------------------------------------------------------------

    def _arrived(self, digest: str) -> Path:
        """A file in `incoming`, whole. Raises Failed."""
        path = self.incoming / digest
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise Failed(f"{digest[:12]} has not been copied to this device") from None
        if found != digest:
            raise Failed(f"{digest[:12]} was not copied whole")
        return path

    def _systemctl(self, *words: str) -> None:
        self._run(["systemctl", *words], {})


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command; see Run."""
    try:
        done = subprocess.run(
            list(words), env={**os.environ, **environment}, check=False, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except FileNotFoundError:
        return 127, f"{words[0]} is not there"
    return done.returncode, done.stdout


@contextlib.contextmanager
def alone(root: Path, verb: str) -> Iterator[None]:
    """Let no other process change a device's sets and slots meanwhile; one more may watch a trial.
    Raises Failed if another one does for LOCK_S: it may be what is left of a call that was cut."""
    name = "watch.lock" if verb == "watch" else "keeper.lock"
    path = root / "run" / f"edgetrain-{name}"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Failed("another command is at work on this device") from None
            time.sleep(0.1)
        yield


VERBS = ("send", "update", "stop", "watch")


def main(argv: Sequence[str]) -> int:
    """`keeper.pyz [--root R] VERB`: send SET [UNIT [HUBS]], update DIGEST, stop, watch.

    Prints one line of JSON; exit status 2 with {"error": …} if the device refuses.
    """
    words, root = list(argv), Path("/")
    if words[:1] == ["--root"]:
        root, words = Path(words[1]).absolute(), words[2:]
    try:
        keeper = DeviceKeeper(root, run, program=Path(sys.path[0]).read_bytes())
        if words[0] not in VERBS:
            raise Failed(f"no verb '{words[0]}'")
        with alone(root, words[0]):
            found = getattr(keeper, words[0])(*words[1:])
        print(json.dumps(found), flush=True)
    except (Failed, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return first_boot.BAD
    return 0
