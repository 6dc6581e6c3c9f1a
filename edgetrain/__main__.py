"""The command: `edgetrain VERB …`, also `python -m edgetrain`.

Errors raised on purpose become one clear line and exit status 2, or 75 where a verb that a service
manager starts may be started again (`hub`, `member`, `keys`). So do errors in the user's own code,
with its frames below. Ctrl-C is 130, SIGTERM 143. Only this module turns an exception into an exit
status.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_TAKE_WHILE = ("run", "simulate", "compare", "sweep", "capacity")
"""Verbs that read a job and load torch."""
_TAKE_KEYS = ("--key", "--hub-key")

_PLAIN = str.maketrans({"…": "...", "×": "x", "–": "-", "→": "->", "±": "+-", "·": "-"})


def _spell_plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(each if each.isascii() else "?" for each in text), error.end


class _Output(io.FileIO):
    """The standard output, which remembers that a write failed: argparse goes on without a word."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _Output.failure = error
            raise


def _print_in_any_encoding() -> None:
    """Let Latin-1 and ASCII streams take any text, and watch the standard output."""
    codecs.register_error("edgetrain", _spell_plainly)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        encoding, lines = sys.stdout.encoding, sys.stdout.line_buffering
        binary = io.BufferedWriter(_Output(1, "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(binary, encoding, line_buffering=lines)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="edgetrain")


def _joined(argv: list[str]) -> list[str]:
    """Join an option that takes a public key with a key that begins with "-"."""
    import re

    key = re.compile(r"-[A-Za-z0-9_-]{42}\Z")
    words: list[str] = []
    for word in argv:
        if words and words[-1] in _TAKE_KEYS and key.match(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. KEY=VALUE words may be anywhere; argparse takes them in one place."""
    from edgetrain.cli.parser import chosen, parser_for

    words = _joined(sys.argv[1:] if argv is None else argv)
    top = parser_for(words)
    arguments, more = top.parse_known_args(words)
    keys = all("=" in word and word[0] != "-" for word in more)
    if more and keys and hasattr(arguments, "job"):
        arguments.job += more
    elif more and keys and hasattr(arguments, "overrides"):
        arguments.overrides += more
    elif more and hasattr(arguments, "devices") and all(w[0] != "-" for w in more):
        arguments.devices += more
    elif more:
        chosen(top, arguments).error(f"unrecognized arguments: {' '.join(more)}")
    return arguments


def _say_error(text: str) -> None:
    """Print an error without control characters: it names files, and what is in them."""
    from edgetrain.runs.reports.units import printable_lines

    print(f"edgetrain: {printable_lines(text)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 74 if the standard output takes nothing (a full
    disk, or closed), 141 if it is a pipe that nobody reads."""
    if sys.stdout is None:
        print("edgetrain: the standard output is closed", file=sys.stderr)
        return 74
    _print_in_any_encoding()
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except (OSError, SystemExit):
        if (failure := _Output.failure) is None:
            raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left is not tried again
    if isinstance(failure, BrokenPipeError):
        return 141
    print(f"edgetrain: the standard output: {failure.strerror}", file=sys.stderr)
    return 74


def _main(argv: list[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from edgetrain.cli.completion import answer_tab

        answer_tab()
    # On a terminal, say what goes on before the first import: these can take seconds
    silent = {"-h", "--help", "--json", "--print-commands"} & set(words)
    if words and words[0] in _TAKE_WHILE and not silent and sys.stdout.isatty():
        print("reading the job …", flush=True)
    if not words:
        from edgetrain.cli.parser import parser

        parser().print_help()
        return 0
    arguments = parse_arguments(argv)
    return carry_out(lambda: arguments.run(arguments), arguments)


def carry_out(run: Callable[[], int], arguments: argparse.Namespace) -> int:
    """Do what was asked for, and turn what it raises into a line and an exit status."""
    from importlib.util import find_spec

    from edgetrain.errors import EdgetrainError, Stopped, in_words, own_frames

    ended: list[int] = []
    before, here = signal.getsignal(signal.SIGTERM), os.getpid()

    def end(signum: int, _: object) -> None:
        if os.getpid() != here:  # a fork of this process
            os._exit(128 + signum)
        ended.append(signum)
        raise KeyboardInterrupt

    if is_ours := before == signal.SIG_DFL and current_thread() is main_thread():
        signal.signal(signal.SIGTERM, end)
    try:
        return run()
    except EdgetrainError as error:
        if arguments.debug:
            raise
        _say_error(str(error))
        return getattr(arguments, "passing_status", 2) if error.passing else 2
    except Stopped as stopped:
        name = signal.Signals(stopped.signum).name
        print(f"edgetrain: stopped, as asked ({name})", file=sys.stderr)
        return 128 + stopped.signum
    except KeyboardInterrupt:
        said = "stopped, as asked (SIGTERM)" if ended else "interrupted"
        print(f"edgetrain: {said}", file=sys.stderr)
        return 128 + (ended[0] if ended else signal.SIGINT)
    except Exception as error:
        lacks = isinstance(error, ImportError) and (error.name or "").split(".")[0] == "torch"
        if arguments.debug or not (lacks or own_frames(error)):
            raise
        said = f"the torch here lacks what this needs: {error} (another torch: README says which)"
        if lacks and find_spec("torch") is None:
            said = "torch is not installed, and this needs it (README says which build to take)"
        _say_error(said if lacks else in_words(error))
        return 2
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
