"""A hub's half of the protocol: pure parts, its journal, and the driver that serves it."""
