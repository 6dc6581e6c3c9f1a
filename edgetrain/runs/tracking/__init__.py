"""Runs in the trackers that people have already: lines of metrics as points, and who takes them."""
