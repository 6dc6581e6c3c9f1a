"""`edgetrain bundle`: pack a task's code into one file; list which code may run on this device."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgetrain.cli import common
from edgetrain.cli.parser import add_verbs

HELP = "a task's code as one file: make, show, allow, list, revoke"
ABOUT = "Job code whose digest a device's owner allows before any of it is imported."
EXAMPLES = """\
who wrote the task:
  edgetrain bundle make mytask/ -o mytask.bundle      prints its digest
  scp mytask.bundle pi-3:                             nothing is sent by the hub
on the device, by its owner, who has looked into it:
  edgetrain bundle show mytask.bundle
  edgetrain bundle allow mytask.bundle                or: allow DIGEST, as the author told it
  edgetrain bundle list
  edgetrain bundle revoke 3fa9c1
in the job:
  task = "mytask.bundle#mytask:Sine"                  any content that the device allows
  task = "mytask.bundle@3fa9c1d2e4f5a6b7#mytask:Sine"   this content, on all members
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_verbs(parser)
    make = add("make", _make, "put a file, or all files of a folder, into a bundle")
    make.add_argument("source", type=Path, metavar="FOLDER|FILE")
    make.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    show = add("show", _show, "check a bundle and list what is in it; nothing is run")
    show.add_argument("bundle", type=Path, metavar="FILE")
    allow = add("allow", _allow, "let this code run here")
    allow.add_argument("bundle", metavar="DIGEST|FILE")
    listing = add("list", _list, "the bundles whose code may run here")
    revoke = add("revoke", _revoke, "let this code run here no longer")
    revoke.add_argument("digest", metavar="DIGEST", help="or its first digits")
    for each in (make, show, allow, listing, revoke):
        common.add_json(each)
    for each in (allow, listing, revoke):
        common.add_keys(each)


def _make(arguments: argparse.Namespace) -> int:
    from edgetrain.errors import explain_os_errors
    from edgetrain.jobs import bundles

    archive = bundles.make(arguments.source)
    with explain_os_errors(f"cannot write {arguments.output}"):
        arguments.output.write_bytes(archive)
    digest, files = bundles.digest_of(archive), sorted(bundles.unpack(archive))
    return common.answer(
        arguments,
        {"digest": digest, "bytes": len(archive), "files": files, "bundle": str(arguments.output)},
        f"{digest}  {arguments.output} ({len(files)} files)",
    )


def _show(arguments: argparse.Namespace) -> int:
    from edgetrain.jobs import bundles

    archive = bundles.read(arguments.bundle)
    files = {name: len(content) for name, content in bundles.unpack(archive).items()}
    digest = bundles.digest_of(archive)
    lines = [digest, *(f"{size:10d}  {name}" for name, size in files.items())]
    return common.answer(arguments, {"digest": digest, "files": files}, "\n".join(lines))


def _allow(arguments: argparse.Namespace) -> int:
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.jobs import bundles

    path = Path(arguments.bundle)
    if path.is_file():
        archive = bundles.read(path)
        bundles.unpack(archive)
        digest, note = bundles.digest_of(archive), path.name
    else:
        digest, note = bundles.checked(arguments.bundle), ""
    bundles.Allowed(keys_folder(arguments.keys)).allow(digest, note)
    return common.answer(arguments, {"digest": digest}, f"{digest} may run on this device")


def _list(arguments: argparse.Namespace) -> int:
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.jobs import bundles

    found = bundles.Allowed(keys_folder(arguments.keys)).all()
    lines = [f"{digest}  {note}".rstrip() for digest, note in found.items()]
    return common.answer(
        arguments, found, "\n".join(lines) or "no bundle is allowed on this device"
    )


def _revoke(arguments: argparse.Namespace) -> int:
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.jobs import bundles

    digest = bundles.Allowed(keys_folder(arguments.keys)).revoke(arguments.digest)
    said = f"{digest} may run here no longer (a member that runs has it in memory)"
    return common.answer(arguments, {"digest": digest}, said)
