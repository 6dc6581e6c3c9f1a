"""Messages over ZeroMQ: the only package that imports zmq.

A hub's end is a ROUTER socket, a member's a DEALER. Both send and receive lists of frames; only
`exchange.messages` knows what is in them. libzmq's own I/O thread moves the bytes and the kernel
watches the connection, so a member is alive while it computes, without a Python thread. Large
payloads are not copied: do not write to a buffer that was sent.
"""
