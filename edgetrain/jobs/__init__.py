"""A job on paper: the file, its rules, its names looked up, what it costs and promises.

Nothing is started here; torch is not imported before a task is loaded.
"""
