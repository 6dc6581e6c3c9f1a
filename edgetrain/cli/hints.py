"""What to write in place of a verb, choice or flag that does not exist."""

from __future__ import annotations

import argparse
import re

from edgetrain.errors import did_you_mean, nearest

_OF_OTHERS = {
    "edgetrain run": (("--simulate", "--simulated", "--vmap"), "simulate"),
    "edgetrain simulate": (("--cluster", "--resume", "--keys", "--emulate"), "run"),
}
"""Flags that one verb has and another does not, and the other."""


def hint_for(parser: argparse.ArgumentParser, message: str) -> str:
    """What to write in place of a verb, choice or flag that does not exist; "": not known."""
    if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        return did_you_mean(choice[1], re.findall(r"[^\s',]+", choice[2]))
    if unknown := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
        flags, other = _OF_OTHERS.get(parser.prog, ((), ""))
        if unknown[1] in flags:
            return f"`edgetrain {other}` does that"
        key, keys = unknown[1][2:].replace("-", "_"), _keys(parser)
        options = [f for action in parser._actions for f in action.option_strings if f[1] == "-"]
        if key in keys and not any(f.startswith(unknown[1][:-1]) for f in options):
            return f"a key of the job has no dashes: {key}=…"
        if near := nearest(unknown[1], options):
            return near
        near = nearest(key, keys)
        return f"{near} (a key of the job has no dashes)" if near else did_you_mean("", options)
    return ""


def _keys(parser: argparse.ArgumentParser) -> set[str]:
    """Last parts of the keys of a job, where a job is an argument."""
    from edgetrain.jobs.reading import keys

    takes_job = any(action.dest in ("job", "overrides") for action in parser._actions)
    last = {"lr", "strategy", "privacy", "rtt", *(full.rpartition(".")[2] for full in keys())}
    return last if takes_job else set()
