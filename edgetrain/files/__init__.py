"""Files that may be anything, read within limits; TOML, read and written.

Doors: reading, toml.
"""
