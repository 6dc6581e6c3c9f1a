"""Emulated links: one interface, four backends, and measurements of how accurate they are."""
