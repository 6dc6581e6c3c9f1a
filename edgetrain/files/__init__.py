"""Files that may be anything, read within limits; files written whole; TOML, both ways.

Doors: reading, tables, toml, writing.
"""
