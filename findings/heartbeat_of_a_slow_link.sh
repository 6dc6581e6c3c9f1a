#!/usr/bin/env bash
# pyzmq 27.3.0 (libzmq 4.3.5): ZMQ_HEARTBEAT_TIMEOUT is said to be how long to wait, after a PING,
# for any traffic. What counts is a whole message: while one is on its way, bytes that arrive all
# the time do not. A message that takes longer than interval and timeout has its connection closed
# under it, by the side that receives it, and is lost: nothing sends it again on the next connection.
# Here 300 kB at 100 kB/s, with heartbeats of a second; 20 kB arrive, and so do 300 kB without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet pyzmq==27.3.0
cd "$folder"
env/bin/python - <<'PYTHON'
import itertools
import socket
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

RATE, PIECE = 100_000, 2_000
assert zmq.zmq_version() == "4.3.5"


def relay(port, carried):
    """A link of RATE bytes a second to this port: its own port, and what each connection carried."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source, sink, number):
        while data := source.recv(PIECE):
            if number is not None:
                carried[number] = carried.get(number, 0) + len(data)
                time.sleep(len(data) / RATE)
            try:
                sink.sendall(data)
            except OSError:
                break
        for each in source, sink:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def serve():
        for number in itertools.count():
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=pump, args=(near, far, number), daemon=True).start()
            threading.Thread(target=pump, args=(far, near, None), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def sent(size, heartbeat_ms):
    """Whether a message of `size` arrives before its connection closes, and the first one's bytes."""
    carried = {}
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        if heartbeat_ms:
            pull.heartbeat_ivl = pull.heartbeat_timeout = heartbeat_ms
        events = pull.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        port = relay(pull.bind_to_random_port("tcp://127.0.0.1"), carried)
        push.linger, push.sndbuf = 0, 8192
        push.connect(f"tcp://127.0.0.1:{port}")
        push.send(bytes(size))
        poller = zmq.Poller()
        poller.register(pull, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        ready = dict(poller.poll())
        arrived = pull in ready
        if not arrived:
            assert recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED
            push.send(b"the next one")
            (found,) = pull.recv_multipart()
            assert found == b"the next one", "the lost message came again"
        pull.disable_monitor()
    return arrived, carried[0]


for size, heartbeat_ms, expected in ((300_000, 0, True), (20_000, 1000, True), (300_000, 1000, False)):
    arrived, carried = sent(size, heartbeat_ms)
    every = f"heartbeats of {heartbeat_ms} ms" if heartbeat_ms else "no heartbeats"
    what = "arrived" if arrived else f"lost: disconnected after {carried} bytes or fewer; the next one arrived"
    print(f"{size} bytes, {every}: {what}")
    assert arrived == expected
PYTHON
