"""`edgetrain completion`: TAB completes verbs, flags, keys of a job and their names.

argcomplete does it: its script starts this command at each TAB, which `answer_tab` answers.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from edgetrain import extensions
from edgetrain.cli import common
from edgetrain.errors import ConfigError, did_you_mean

SHELLS = ("bash", "zsh", "fish")

HELP = "print a script with which bash, zsh or fish complete this command"
ABOUT = "Print a completion script for a shell."
EXAMPLES = """\
examples:
  edgetrain completion bash > ~/.local/share/bash-completion/completions/edgetrain
  edgetrain completion zsh > ~/.edgetrain.zsh    and in ~/.zshrc, after compinit: . ~/.edgetrain.zsh
  edgetrain completion fish > ~/.config/fish/completions/edgetrain.fish

Then TAB knows verbs, flags, keys and names: edgetrain run network=wan-<TAB>. It is argcomplete's
script, which asks the command itself (pip install argcomplete).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    if arguments.shell not in SHELLS:
        raise ConfigError(
            f"no completion for the shell '{arguments.shell}'",
            did_you_mean(arguments.shell, SHELLS),
        )
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        from edgetrain.extras import install_command

        raise ConfigError("completion needs argcomplete", install_command("completion")) from None
    common.say(shellcode(["edgetrain"], shell=arguments.shell))
    return 0


def answer_tab() -> None:
    """Answer a shell that has pressed TAB, and end this process."""
    from argcomplete import autocomplete

    from edgetrain.cli.parser import parser_for

    typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    top = parser_for(typed.rpartition(" ")[0].split()[1:])  # a verb is typed when a blank follows
    _know_names(top, "")
    autocomplete(top, always_complete_options=False)


_WORDS = {"networks show": "network", "networks check": "network", "devices show": "device",
          "completion": "shell"}  # fmt: skip
"""Commands with an argument that is a name of the catalog, or a path."""
_FLAGS = {"--strategies": "strategy", "--uplink": "network"}


def _know_names(parser: argparse.ArgumentParser, path: str) -> None:
    """Let arguments whose names are known complete them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                _know_names(each, f"{path} {name}".strip())
        elif action.dest in ("job", "overrides"):
            action.completer = _job_words  # type: ignore[attr-defined]
        elif not action.choices and action.nargs != 0:
            flag = next(iter(action.option_strings), "")
            kind = _FLAGS.get(flag) or flag.removeprefix("--").removesuffix("s") or _WORDS.get(path)
            if kind in KINDS:
                action.completer = partial(_listed, kind)  # type: ignore[attr-defined]


def _listed(kind: str, prefix: str, **_: object) -> list[str]:
    """Names, one behind the other with commas between them."""
    before, comma, _last = prefix.rpartition(",")
    return [f"{before}{comma}{name}" for name in names(kind)]


def _job_words(prefix: str, **_: object) -> list[str]:
    """The words of a job: its file, keys, and the names that a key takes."""
    from edgetrain.jobs import reading

    key, equals, _value = prefix.partition("=")
    if equals:
        return [f"{key}={name}" for name in names(key.rpartition(".")[2])]
    full = reading.keys()
    last = [each.rpartition(".")[2] for each in full]
    short = {name if last.count(name) == 1 else each for each, name in zip(full, last, strict=True)}
    files = (each for each in Path().glob(f"{prefix}*") if each.is_dir() or each.suffix == ".toml")
    return [f"{each}=" for each in sorted(short | {"strategy", "privacy"})] + [*map(str, files)]


KINDS = ("network", "device", "strategy", "merge", "outer", "codec", "reply_codec", "optimizer",
         "task", "delay", "secure", "shell")  # fmt: skip
"""Keys of a job, and an argument, whose names are known."""


def names(kind: str) -> list[str]:
    """The names that this one of KINDS can have, looked up when they are asked for."""
    match kind:
        case "network":
            from edgetrain.fleet import networks

            return sorted([*networks.names(), *extensions.names("network profile")])
        case "device":
            from edgetrain.fleet import devices

            return [*devices.names(), devices.HOST, *extensions.names("device profile")]
        case "codec" | "reply_codec":
            from edgetrain.codecs.table import TABLE

            return sorted([*TABLE, *extensions.names("codec")])
        case "optimizer":
            from edgetrain.jobs.optimizers import optimizers

            return sorted(set(optimizers()))
        case "strategy" | "merge" | "outer":
            from edgetrain import strategies
            from edgetrain.strategies import merging, outer

            table = {"strategy": strategies, "merge": merging, "outer": outer}[kind].TABLE
            what = kind if kind == "strategy" else f"{kind} rule"
            return sorted([*table, *extensions.names(what)])
        case "task":
            return [f"edgetrain.tasks:{name}" for name in ("char_lm", "cifar10", "digits", "mnist")]
    return {"delay": ["auto"], "secure": ["true", "false"], "shell": [*SHELLS]}.get(kind, [])
