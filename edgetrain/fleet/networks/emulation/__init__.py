"""Emulated links: one interface, four backends, and what tells how true they are."""
