"""The parts of the simulator: virtual time, links in it, and many members' gradients at once.

`simulation` puts them together. Not for use on a device: needs greenlet
(pip install edgetrain[lab]).
"""
