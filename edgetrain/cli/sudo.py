"""The user who called `sudo`: writing cards needs root, and the files beside them are the user's.

sudo gives root's home to the command. What the user has made without it (keys, SSH keys, worker
archives) lies in the user's own, and what is made there must stay the user's.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path


def caller() -> pwd.struct_passwd | None:
    """The user who called sudo; None without sudo, and for root's own."""
    if os.geteuid() != 0:
        return None
    try:
        found = pwd.getpwnam(os.environ.get("SUDO_USER", ""))
    except KeyError:
        return None
    return found if found.pw_uid else None


def roots_home() -> Path:
    """The home of root, where commands under sudo keep their files."""
    return Path(pwd.getpwuid(0).pw_dir)


def use_callers_home() -> None:
    """From here on "~" is the home of the user who called sudo, in this process."""
    user = caller()
    if user is not None:
        os.environ["HOME"] = user.pw_dir


@contextlib.contextmanager
def as_owner_of(folder: Path) -> Iterator[None]:
    """Within: what root makes in a user's folder is the user's. The ids are the whole process's."""
    uid, gid = owner_of(folder)
    group = os.getegid()
    if os.geteuid() != 0 or not uid:
        yield
        return
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def give_to_owner_of(folder: Path, file: Path) -> None:
    """Make the owner of a folder the owner of a file that root made there, if it is there."""
    uid, gid = owner_of(folder)
    if os.geteuid() == 0 and uid and file.exists():
        os.chown(file, uid, gid, follow_symlinks=False)


def owner_of(folder: Path) -> tuple[int, int]:
    """User and group of a folder, or of the nearest one above that is there."""
    absolute = folder.absolute()
    found = next(path for path in (absolute, *absolute.parents) if path.exists()).stat()
    return found.st_uid, found.st_gid
