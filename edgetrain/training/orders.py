"""Orders to a hub that is running, over a socket in its run folder that only its owner can open.

One line of JSON each way: `{"order": ["hubs", "add", "tcp://c:5555"]}`, and the answer, which may
take as long as the order. What an order means is the hub's to know: this module moves words.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.hub.orders import Answer, Order
from edgetrain.runs.folder import JOB, ORDERS, SUMMARY, remove_dead_socket, socket_path

MOST_BYTES = 1 << 16
"""Bytes of an order."""

MOST_ANSWER = 1 << 24
"""Bytes of an answer."""

MOST_WAITING = 16
"""Connections at a time."""


class Orders:
    """Listens in a run folder. Owns the socket, which `close` removes. One thread uses it."""

    def __init__(self, folder: Path) -> None:
        """The folder's journal is this process's. Raises ConfigError."""
        self._path = folder / ORDERS
        self._waiting: dict[socket.socket, bytes] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        os.fchmod(self._listener.fileno(), 0o600)  # before anybody can find it
        draft = folder / f".{ORDERS}.part"  # whoever finds the socket itself finds it listening
        try:
            draft.unlink(missing_ok=True)
            with socket_path(folder, draft.name) as path:
                self._listener.bind(path)
            draft.chmod(0o600)
            self._listener.listen(MOST_WAITING)
            draft.replace(self._path)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"cannot listen at {self._path}: {error.strerror}") from None

    def poll(self) -> Iterator[Order]:
        """The orders that have come. Each is answered over its own connection."""
        with contextlib.suppress(OSError):  # none waits, or this process is out of descriptors
            for _ in range(MOST_WAITING):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._waiting[connection] = b""
        for connection in [*self._waiting]:
            try:
                received = connection.recv(MOST_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                received = b""
            said = self._waiting[connection] + received
            self._waiting[connection] = said
            if received and b"\n" not in said and len(said) <= MOST_BYTES:
                continue
            del self._waiting[connection]
            answer = partial(_answer, connection)
            words = _words_of(said)
            if words is None:
                answer({"error": "an order is one line of JSON", "hint": ""})
            else:
                yield Order(words, answer)
        for silent in [*self._waiting][:-MOST_WAITING]:  # the oldest: whoever orders speaks at once
            del self._waiting[silent]
            silent.close()

    def close(self) -> None:
        """Listen no longer. Works twice."""
        for connection in self._waiting:
            connection.close()
        self._waiting = {}
        self._listener.close()
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def taking_orders(folder: Path) -> Iterator[Callable[[], Iterable[Order]]]:
    """The orders that come to the hub of this run folder."""
    orders = Orders(folder)
    try:
        yield orders.poll
    finally:
        orders.close()


def _words_of(line: bytes) -> tuple[str, ...] | None:
    try:
        words = json.loads(line)["order"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return tuple(words)


def _answer(connection: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(OSError), connection:
        connection.setblocking(True)
        connection.settimeout(1.0)
        connection.sendall(json.dumps(dict(answer)).encode() + b"\n")


def _no_hub_in(folder: Path) -> ConfigError:
    if not (folder / JOB).exists():
        return ConfigError(f"{folder} is no run folder: it has no {JOB}", "name the hub's")
    ended = (folder / SUMMARY).exists() or (folder / ORDERS).exists()
    remove_dead_socket(folder)
    why = "its hub has ended" if ended else "it is a member's, or its hub has ended"
    return ConfigError(
        f"no hub runs in {folder}: {why}",
        "name the run folder of the hub (of several, the lead's), on its machine, while it runs",
    )


def give_order(folder: Path, words: list[str], patience_s: float | None = None) -> dict[str, Any]:
    """Give an order to the hub that runs in this run folder, and wait for its answer. Raises
    ConfigError if none runs there, or it refuses; EdgetrainError if it ends before, or has not
    answered after `patience_s` (None: it may take as long as it likes)."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no run folder", "name the hub's, on its machine")
    said = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience_s)
        try:
            with socket_path(folder) as path:
                connection.connect(path)
        except PermissionError:
            raise ConfigError(
                f"{folder} is another user's: only its owner may tell its hub anything",
                "be that user, as the hub is",
            ) from None
        except OSError:
            raise _no_hub_in(folder) from None
        try:
            connection.sendall(json.dumps({"order": words}).encode() + b"\n")
            while (more := connection.recv(MOST_BYTES)) and len(said) <= MOST_ANSWER:
                said += more
        except TimeoutError:
            raise EdgetrainError(
                f"the hub has not answered within {patience_s:g} s",
                "it may still do it: look again",
            ) from None
        except ConnectionError:
            pass
    if not said:
        raise EdgetrainError(
            "the hub ended before that was done", "the job is over, or --resume it"
        )
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError:
        raise EdgetrainError(f"what listens in {folder} is no hub of this edgetrain") from None
    if "error" in answer:
        raise ConfigError(answer["error"], answer["hint"])
    return answer
