"""The command line: thin verbs over the library. One verb, one module; only these print.

Nothing heavy is imported until a verb runs: `edgetrain --help` loads neither torch nor zmq nor
numpy.
"""
