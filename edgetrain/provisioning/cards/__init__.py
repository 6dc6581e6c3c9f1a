"""Cards: from an image file and one `cluster.toml` to cards whose devices train by themselves.

Knows neither jobs nor keys: a token, a job file and a worker archive are bytes here.
"""
