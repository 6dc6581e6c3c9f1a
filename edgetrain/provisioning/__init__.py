"""From a fleet on paper to devices that train by themselves: cards, later SSH.

Stands above jobs and keys. Nothing that trains may need it.
"""
