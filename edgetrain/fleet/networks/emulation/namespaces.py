"""A network namespace that an emulator's process holds, and how another process enters it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks.emulation import linux


@dataclass(frozen=True, slots=True)
class Namespace:
    """The namespace `inode`, which process `pid` holds open as its descriptor `fd`."""

    pid: int
    fd: int
    inode: int

    def enter(self) -> None:
        """Move this process into the namespace, after its user namespace if it is not root.

        Raises NetworkError if the emulator has ended, or if this process has several threads: only
        a process with a single thread can change its user namespace.
        """
        try:
            network = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            raise NetworkError(f"the network emulator (process {self.pid}) has ended") from None
        try:
            if os.fstat(network).st_ino != self.inode:
                raise NetworkError(f"the network emulator (process {self.pid}) has ended")
            self._enter(network)
        finally:
            os.close(network)

    def _enter(self, network: int) -> None:
        try:
            linux.setns(network, linux.CLONE_NEWNET)
            return
        except PermissionError:
            pass
        user = os.open(f"/proc/{self.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            linux.setns(user, linux.CLONE_NEWUSER)
            linux.setns(network, linux.CLONE_NEWNET)
        except OSError as error:
            raise NetworkError(
                f"this process cannot enter its emulated network: {error.strerror} "
                f"({threading.active_count()} Python threads)",
                "enter before starting a thread, or use backend 'stream'",
            ) from None
        finally:
            os.close(user)
