"""The command line: one module per verb, each a thin layer over the library.

Verbs print; other rooms return values or call a function that the verb passes in. Exceptions: the
live view (runs/reports/live) writes to the stream it is given, tasks report downloads on stderr,
and programs that run as processes of their own (a network probe) print for
the process that started them.

Heavy libraries are imported when a verb runs: `edgetrain --help` loads neither torch nor zmq nor
numpy.
"""
