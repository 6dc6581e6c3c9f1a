"""What stands at an address that is not the hub's, and sockets of hubs with keys and without.

Each is served by a thread of the test.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.messages import Refuse, pack
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.hub_socket import HubSocket

NOBODY = "tcp://127.0.0.1:1"


class Serving:
    """A hub's socket with keys, served by a thread, that can lose its answers."""

    def __init__(self, folder, pair=None, device=None):
        self.ring = Keyring(folder / "hub")
        self.ring.init(lambda: pair or new_pair())
        if device is not None:
            self.ring.allow(device.public, "pi-1")
        self.loses = 0
        self._begin(Gate(self.ring))

    def _begin(self, gate):
        self.socket, self.heard = HubSocket("tcp://127.0.0.1:0", gate=gate), []
        self.address = self.socket.address
        self._send, self.socket.send = self.socket.send, self._answer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _answer(self, to, frames):
        if self.loses:
            self.loses -= 1
            return True
        return self._send(to, frames)

    def _serve(self):
        while not self._over.is_set():
            for sender, frames in self.socket.poll(0.02):
                self.heard.append([bytes(frame) for frame in frames])
                self.accept(sender)

    def accept(self, sender):
        """A message that is no enrolment."""

    def close(self):
        self._over.set()
        self._thread.join()
        self.socket.close()


class Plain(Serving):
    """A hub without keys, which refuses all with this code; "": none."""

    def __init__(self, code):
        self.code, self.loses = code, 0
        self._begin(None)

    def accept(self, sender):
        if self.code:
            self.socket.send(sender, pack(Refuse(self.code, "why")))


@contextlib.contextmanager
def at_first(what, folder):
    """The address of something that is not the hub."""
    if what == "closed":
        yield NOBODY
    elif what == "no name":
        yield "tcp://no-such-name.invalid:5"
    elif what in ("silent", "talks"):
        with socket.create_server(("127.0.0.1", 0)) as server:
            if what == "talks":  # HTTP, SSH, …
                threading.Thread(target=talk, args=[server], daemon=True).start()
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
            server.shutdown(socket.SHUT_RDWR)
    else:
        other = Plain("") if what == "plain" else Serving(folder / "other")
        with contextlib.closing(other):
            yield other.address


def talk(server):
    with contextlib.suppress(OSError):
        while True:
            with server.accept()[0] as caller:
                caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 20)


FIRST = ("closed", "no name", "silent", "talks", "other key", "plain")
