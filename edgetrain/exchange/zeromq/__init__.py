"""Messages over ZeroMQ: the only package that imports zmq."""
