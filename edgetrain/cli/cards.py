"""`edgetrain devices flash` and `worker`: cards for real devices, and what runs on them."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import getpass
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common, sudo
from edgetrain.cli.parser import AddVerb
from edgetrain.errors import ConfigError, explain_os_errors, refuse_first

if TYPE_CHECKING:
    from edgetrain.fleet.cluster import DeviceEntry
    from edgetrain.provisioning.cards.disks import Disk
    from edgetrain.provisioning.cards.flashing import Image, Target
    from edgetrain.provisioning.cards.writing import CardProgress, Written
    from edgetrain.provisioning.outfit import Tokens

_FLASH = """\
examples:
  edgetrain devices flash cluster.toml --dry-run          what would be done
  edgetrain devices flash cluster.toml                    all devices, with the cards that are found
  edgetrain devices flash cluster.toml pi-3 --to /dev/sdb --yes
  edgetrain devices flash cluster.toml --image-out cards   files in place of cards

Writes the image to all cards at once, reads every block back, puts each device's settings, worker,
job and one-time token on its boot partition, reads those back, and makes the card bootable last. A
card that was written in part does not boot; the same command goes on with it. Cards that have the
image already are written only where they differ.

Tokens are made here if this machine has the hub's keys; otherwise on the hub's machine by
`edgetrain keys enroll --cluster cluster.toml --out tokens.json`, and given with --tokens.

exit status: 0 all cards are done, 1 some are not, 2 nothing was begun.
"""
_WORKER = """\
examples:
  edgetrain devices worker --for raspberry-pi-os-13
  edgetrain devices worker --for ubuntu-24.04 -o worker.tar

Fetches the packages of a hash-locked list with pip, builds edgetrain for the device's processor
(package gcc-aarch64-linux-gnu), and packs both into one file. The same list gives the same bytes.
"""
_DAY = 24 * 60.0
MINUTES = 7 * _DAY
"""Lifetime of a token on a card, by default: a card may lie for a while."""


def add_verbs(add: AddVerb) -> None:
    flash = add("flash", _flash, "write cards that join a hub by themselves", _FLASH)
    flash.add_argument("cluster", type=Path, metavar="CLUSTER", help="a cluster file")
    flash.add_argument("devices", nargs="*", metavar="DEVICE", help="which (default: all)")
    where = flash.add_mutually_exclusive_group()
    where.add_argument(
        "--to", action="append", metavar="/dev/sdX", help="a card, once for each device, in order"
    )
    where.add_argument("--image-out", type=Path, metavar="FOLDER", help="files instead of cards")
    flash.add_argument("--worker", type=Path, metavar="FILE", help="the worker archive to use")
    flash.add_argument("--tokens", type=Path, metavar="FILE", help="made on the hub's machine")
    flash.add_argument(
        "--minutes", type=float, default=MINUTES, help="a token holds (default: %(default)g)"
    )
    flash.add_argument(
        "--replace", action="store_true", help="take these devices' old keys off the hub's list"
    )
    flash.add_argument("--larger", action="store_true", help="allow cards of more than 256 GiB")
    flash.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
    flash.add_argument("--yes", action="store_true", help="do not ask (wants --to or --image-out)")
    worker = add("worker", _worker, "make the archive that devices run", _WORKER)
    worker.add_argument("--for", dest="release", required=True, metavar="SYSTEM")
    worker.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: where flash looks")
    worker.add_argument("--wheel", type=Path, metavar="FILE", help="edgetrain's, for that machine")
    common.add_keys(flash)
    for each in (flash, worker):
        common.add_json(each, "print one JSON object at the end")


def archive_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "edgetrain" / "workers"


def _worker(arguments: argparse.Namespace) -> int:
    from edgetrain.provisioning.cards import archive, making

    sudo.use_callers_home()
    out: Path = arguments.out or archive_folder() / f"{arguments.release}.tar"
    workers = archive.workers()
    workers.lock(arguments.release)
    with explain_os_errors(f"cannot write {out}"):
        with sudo.as_owner_of(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
        made = making.make(workers, arguments.release, out, arguments.wheel, common.warn)
        sudo.give_to_owner_of(out.parent, out)
    size = out.stat().st_size
    return common.answer(
        arguments,
        {"file": str(out), "bytes": size, **dataclasses.asdict(made)},
        f"{out}  {size / 1e6:.0f} MB, {made.unpacked / 1e6:.0f} MB on the device\n"
        f"Python {made.python}, {made.machine}, edgetrain {made.packages['edgetrain']}, "
        f"torch {made.packages['torch']}",
    )


def _flash(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import cluster
    from edgetrain.provisioning import outfit
    from edgetrain.provisioning.cards import archive, flashing, looking

    sudo.use_callers_home()
    found = cluster.load(arguments.cluster)
    job = outfit.job_of(found)
    devices = found.chosen(tuple(arguments.devices))
    if not devices:
        raise ConfigError(f"{found.path} has no [[device]]")
    for each in found.devices:
        if each.role != "member":
            raise ConfigError(
                f"{each.name} has the {each.role}, and its key stays there: cards cannot enrol",
                "boot the devices with the image as it is, then edgetrain devices provision",
            )
    if arguments.yes and not (arguments.to or arguments.image_out):
        raise ConfigError("--yes without --to: which card?", "--to /dev/sdX says it")
    if not 0 < arguments.minutes <= 30 * _DAY:
        raise ConfigError(f"--minutes {arguments.minutes:g}: allowed are more than 0 to 43200")
    looking.check_tools()
    for line in cluster.warnings(found):
        common.warn(f"warning: {line}")
    workers = archive.workers()
    for device in devices:
        outfit.check_profile(workers, device)
    archives = flashing.Archives(workers, arguments.worker, archive_folder())
    image = flashing.image_of(found)
    if image.look:
        for device in devices:
            archives.for_card(image.look, device)
    candidates = archives.candidates(image.look)
    settings = outfit.settings_of(found, job, 60 * arguments.minutes, _ask_secret)
    tokens = _tokens(arguments, devices)
    user = sudo.caller()
    owner = None if user is None else (user.pw_uid, user.pw_gid)
    if unknown := outfit.check_task(found, job, settings, candidates, owner):
        common.warn(f"warning: whether cards can train was not tried: {unknown}")

    def write(targets: Sequence[Target], told: Callable[[CardProgress], None]) -> Written:
        drawn = tokens.draw([target.device.name for target in targets])
        ready = dataclasses.replace(settings, tokens=drawn)
        finish = {}
        for device in (target.device for target in targets):
            me = flashing.person(found, device, ready, secrets.token_bytes(6))
            load = flashing.load_for(found, device, ready, archives)
            finish[device.name] = flashing.finisher(me, load)
        return flashing.flash(image, targets, finish, tokens.open, told)

    return _Session(arguments, image, devices, write).run()


def _tokens(arguments: argparse.Namespace, devices: Sequence[DeviceEntry]) -> Tokens:
    from edgetrain.exchange.keys.keyring import Keyring
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.provisioning import outfit

    names = [device.name for device in devices]
    if arguments.tokens:
        return outfit.GivenTokens(arguments.tokens, names)
    ring = Keyring(keys_folder(arguments.keys))
    roots = Keyring(sudo.roots_home() / ".config/edgetrain")
    refuse_first(
        (not ring.exists and not arguments.keys and sudo.caller() and roots.exists,
         f"the hub's keys are not in {ring.path}, but root's own are in {roots.path}",
         f"--keys {roots.path}, if the hub runs with those: two hubs have two identities"),
        (not ring.exists, f"the hub's keys are not on this machine (in {ring.path})",
         "here: edgetrain keys init, without sudo; or on the hub's machine: edgetrain keys "
         f"enroll --cluster {arguments.cluster} --out tokens.json, and give it with --tokens"),
    )  # fmt: skip
    ring.pair()
    listed = sorted(set(ring.members().values()) & set(names))
    if listed and not arguments.replace:
        raise ConfigError(
            f"{', '.join(listed)} may join the hub already, with the key of an older card",
            "--replace takes that key off the list when the new card is written; or name the "
            "devices that are new",
        )
    return outfit.DrawnTokens(ring, arguments.minutes, sudo.as_owner_of)


# -- which cards ---------------------------------------------------------------------------------


class _Session:
    """Cards for all devices, in as many turns as there are cards at a time."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        image: Image,
        devices: Sequence[DeviceEntry],
        write: Callable[[Sequence[Target], Callable[[CardProgress], None]], Written],
    ) -> None:
        self._arguments = arguments
        self._image = image
        self._left = list(devices)
        self._write = write
        self._results: list[dict[str, Any]] = []

    def run(self) -> int:
        from edgetrain.exchange.keys.pairs import keys_folder
        from edgetrain.provisioning.cards import flashing

        arguments = self._arguments
        name = self._image.look.describe() if self._image.look else "packed: looked into later"
        common.warn(f"image  {self._image.path.name} ({name})")
        if not arguments.tokens:
            common.warn(f"keys   {keys_folder(arguments.keys)}")
        if not arguments.worker:
            common.warn(f"worker {archive_folder()}")
        if not self._image.sha256:
            common.warn("warning: no SHA-256 is known for this image; image.sha256 checks it")
        while self._left:
            targets = self._targets()
            for target in targets:
                self._left.remove(target.device)
            if arguments.dry_run:
                if self._image.sha256 and not self._results:  # the wrong image, which writing finds
                    flashing.read_whole(self._image)
                for target in targets:
                    name = target.device.name
                    common.warn(f"{name}  would be written to {target.path}")
                    self._results.append(
                        {"device": name, "card": target.path, "ok": True, "planned": True}
                    )
                continue
            done = self._write(targets, _Bar())
            for target, card in zip(targets, done.cards, strict=True):
                said = f"done: {card.written / 1e6:.0f} MB written" if card.ok else card.error
                if card.skipped and card.ok:
                    said += f", {card.skipped / 1e6:.0f} MB were there"
                common.warn(f"{target.device.name}  {target.path}  {said}")
                if arguments.image_out:
                    sudo.give_to_owner_of(arguments.image_out, Path(target.path))
                figures = {key: getattr(card, key) for key in ("ok", "error", "written", "skipped")}
                figures |= {key: round(getattr(card, key), 3) for key in ("write_s", "check_s")}
                name, path = target.device.name, target.path
                self._results.append({"device": name, "card": path, **figures})
            if arguments.to or not self._left:
                break
        self._results += [
            {"device": device.name, "ok": False, "error": "no card was left for it"}
            for device in self._left
        ]
        if arguments.json:
            common.say(json.dumps({"image": str(self._image.path), "cards": self._results}))
        good = sum(bool(result["ok"]) for result in self._results)
        if not arguments.dry_run and good:
            common.warn("next: put the cards into the devices, and start `edgetrain hub`")
        return 0 if good == len(self._results) else 1

    def _targets(self) -> list[Target]:
        """The next cards to write, agreed with the user. Raises ConfigError."""
        from edgetrain.provisioning.cards.flashing import Target

        arguments = self._arguments
        if arguments.image_out:
            folder = arguments.image_out
            with explain_os_errors(f"cannot write to --image-out {folder}", "the name of a folder"):
                above = (folder, *folder.absolute().parents)
                there = next(path for path in above if path.exists())
                if not there.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, f"{there} is a file")
                if not os.access(there, os.W_OK):
                    raise PermissionError(errno.EACCES, f"{there} is not writable")
                if not arguments.dry_run and not folder.is_dir():
                    with sudo.as_owner_of(folder):  # nobody else may read it
                        folder.mkdir(mode=0o700, parents=True)
            size = self._image.size or 0
            return [Target(d, str(folder / f"{d.name}.img"), size) for d in self._left]
        disks = self._disks()
        targets = [Target(d, disk.path) for d, disk in zip(self._left, disks, strict=False)]
        for target, disk in zip(targets, disks, strict=False):
            common.warn(f"{target.device.name}  <-  {disk.describe()}")
        if not arguments.yes and not arguments.dry_run:
            _confirm(f"everything on {len(targets)} card(s) will be lost")
        return targets

    def _disks(self) -> list[Disk]:
        from edgetrain.provisioning.cards import disks

        arguments, need = self._arguments, self._image.size or 0
        while True:
            listing = disks.disks(disks.listing())
            if arguments.to:
                if len(set(arguments.to)) != len(arguments.to):
                    raise ConfigError("--to names a card twice")
                if len(arguments.to) > len(self._left):
                    raise ConfigError(
                        f"--to names {len(arguments.to)} cards for {len(self._left)} devices"
                    )
                named = [disks.disk_at(str(Path(to).resolve()), listing) for to in arguments.to]
                for disk in named:
                    if reason := disks.why_not(disk, need, larger=arguments.larger):
                        raise ConfigError(f"{disk.path} {reason}")
                return named
            found = disks.cards(listing, need, larger=arguments.larger)
            if found:
                return found
            reasons = [
                f"{d.path} {disks.why_not(d, need, larger=arguments.larger)}" for d in listing
            ]
            if arguments.dry_run or not sys.stdin.isatty():
                raise ConfigError(f"no card was found ({'; '.join(reasons) or 'no disk at all'})")
            names = ", ".join(device.name for device in self._left)
            _confirm(f"put in cards for {names} ({'; '.join(reasons)})")


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}, and nobody can be asked", "--yes, with --to")
    if _answer(lambda: input(f"{what}. Go on? [y/N] ")).strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was written", "as you wished")


def _ask_secret(question: str) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(
            'wifi.secret = "ask", and nobody can be asked', "file:NAME or env:NAME, or a terminal"
        )
    return _answer(lambda: getpass.getpass(question))


def _answer(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except EOFError:
        return ""


class _Bar:
    """Progress on stderr: one line that changes on a terminal, a line at each tenth elsewhere."""

    def __init__(self) -> None:
        self._last: tuple[str, int] = ("", -1)
        self._begin: dict[str, float] = {}
        self._live = sys.stderr.isatty()

    def __call__(self, now: CardProgress) -> None:
        begin = self._begin.setdefault(now.phase, now.seconds)
        step = (now.phase, int(now.share * (1000 if self._live else 10)))
        if step == self._last:
            return
        self._last = step
        spent = now.seconds - begin
        left = f", {spent / now.share - spent:.0f} s left" if 0.02 < now.share < 1 else ""
        failed = sum(bool(card.error) for card in now.cards)
        text = f"{now.phase} {now.share:4.0%}{left}{f', {failed} failed' if failed else ''}"
        end = "\r" if self._live and now.share < 1 else "\n"
        sys.stderr.write(f"\r{text:60}{end}" if self._live else f"{text}\n")
        sys.stderr.flush()
