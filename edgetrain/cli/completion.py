"""`edgetrain completion`: a script that completes verbs, flags, keys of a job and their names."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

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

Then TAB knows verbs, flags, keys and names: edgetrain run network=wan-<TAB>. The script holds all
of them and starts nothing; write it again after an update.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Print the script for all commands of `arguments.top`, the parser of the whole command."""
    if arguments.shell not in SHELLS:
        raise ConfigError(
            f"no completion for the shell '{arguments.shell}'",
            did_you_mean(arguments.shell, SHELLS),
        )
    commands = list(commands_of(arguments.top))
    common.say(fish(commands) if arguments.shell == "fish" else bash(commands, arguments.shell))
    return 0


@dataclass
class Command:
    """A command and what may follow it. `path` is empty for `edgetrain` itself."""

    path: str
    verbs: dict[str, str] = field(default_factory=dict)
    """Verbs by name, with what they do."""
    flags: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)
    """What may follow a flag, where that is known."""
    words: list[str] = field(default_factory=list)
    """Choices of an argument that has no flag."""
    takes_job: bool = False


def commands_of(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Command]:
    command = Command(path)
    inner: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {each.dest: each.help or "" for each in action._choices_actions}
            command.verbs = {name: said.get(name, "") for name in action.choices}
            inner = [(f"{path} {name}".strip(), each) for name, each in action.choices.items()]
            continue
        for flag in action.option_strings:
            if flag.startswith("--"):
                command.flags[flag] = action.help or ""
                if found := _values_of(flag, action):
                    command.values[flag] = found
        if not action.option_strings and action.choices:
            command.words += map(str, action.choices)
        command.takes_job |= action.dest in ("job", "overrides")
    if path in _WORDS:
        command.words += names()[_WORDS[path]]
    if path == "completion":
        command.words += SHELLS
    yield command
    for name, each in inner:
        yield from commands_of(each, name)


_WORDS = {"networks show": "network", "networks check": "network", "devices show": "device"}
"""Commands with an argument that is a name of the catalog, or a path."""


def _values_of(flag: str, action: argparse.Action) -> list[str]:
    if action.choices:
        return [str(each) for each in action.choices]
    singular = flag.removeprefix("--").removesuffix("s")
    singular = {"strategie": "strategy", "uplink": "network"}.get(singular, singular)
    return names().get(singular, []) if action.nargs != 0 else []


@functools.cache
def names() -> dict[str, list[str]]:
    """The names that a job can give to its keys, by key."""
    from edgetrain import strategies
    from edgetrain.codecs.table import TABLE as CODECS
    from edgetrain.fleet import devices, networks
    from edgetrain.jobs.optimizers import optimizers
    from edgetrain.strategies import merging, outer

    return {
        "network": sorted(networks.names()),
        "device": [*devices.names(), devices.HOST],
        "strategy": sorted(strategies.TABLE),
        "codec": sorted(CODECS),
        "reply_codec": sorted(CODECS),
        "optimizer": sorted(set(optimizers())),
        "merge": sorted(merging.TABLE),
        "outer": sorted(outer.TABLE),
        "task": [f"edgetrain.tasks:{name}" for name in ("char_lm", "cifar10", "digits", "mnist")],
        "delay": ["auto"],
        "secure": ["true", "false"],
    }


def keys() -> list[str]:
    from edgetrain.jobs import reading

    full = reading.keys()
    last = [key.rpartition(".")[2] for key in full]
    short = {name if last.count(name) == 1 else key for key, name in zip(full, last, strict=True)}
    return sorted(short | {"strategy", "privacy"})


# -- bash and zsh ------------------------------------------------------------------------------

_BASH = r"""# completion of edgetrain, written by `edgetrain completion {shell}`
_edgetrain() {
    local line="${COMP_LINE:0:$COMP_POINT}" cur prev before path="" word typed values lead=""
    cur="${line##*[[:space:]]}"
    before="${line%"$cur"}"
    typed=($before)
    prev="${typed[${#typed[@]}-1]}"
    for word in "${typed[@]:1}"; do
        case " $(_edgetrain_verbs "$path") " in
            *" $word "*) path="${path:+$path }$word" ;;
        esac
    done
    COMPREPLY=()
    if [[ $cur == --*=* ]]; then
        prev="${cur%%=*}"; cur="${cur#*=}"
    fi
    values="$(_edgetrain_values "$path" "$prev")"
    if [[ -n $values ]]; then
        [[ $cur == *,* ]] && lead="${cur%,*},"
        COMPREPLY=($(compgen -P "$lead" -W "$values" -- "${cur##*,}"))
        return
    fi
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$(_edgetrain_flags "$path")" -- "$cur"))
        return
    fi
    if [[ $cur == *=* ]] && _edgetrain_takes_job "$path"; then
        local key="${cur%%=*}"
        [[ $COMP_WORDBREAKS == *"="* ]] || lead="$key="
        COMPREPLY=($(compgen -P "$lead" -W "$(_edgetrain_names "${key##*.}")" -- "${cur#*=}"))
        return
    fi
    COMPREPLY=($(compgen -W "$(_edgetrain_verbs "$path") $(_edgetrain_words "$path")" -- "$cur"))
    if _edgetrain_takes_job "$path"; then
        COMPREPLY+=($(compgen -S = -W "{keys}" -- "$cur") $(compgen -f -X '!*.toml' -- "$cur"))
        [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == *= ]] && compopt -o nospace 2> /dev/null
    fi
}
"""


def bash(commands: list[Command], shell: str = "bash") -> str:
    """The script for bash; for zsh, which can use scripts for bash, with a line before it."""
    verbs = {each.path: list(each.verbs) for each in commands}
    flags = {each.path: list(each.flags) for each in commands}
    words = {each.path: each.words for each in commands}
    values = {
        f"{each.path} {flag}".strip(): found
        for each in commands
        for flag, found in each.values.items()
    }
    job = "|".join(shlex.quote(each.path) for each in commands if each.takes_job)
    main = _BASH.replace("{keys}", " ".join(keys())).replace("{shell}", shell)
    parts = [
        main,
        _table("_edgetrain_verbs", '"$1"', verbs),
        _table("_edgetrain_flags", '"$1"', flags),
        _table("_edgetrain_words", '"$1"', words),
        _table("_edgetrain_values", '"${1:+$1 }$2"', values),
        _table("_edgetrain_names", '"$1"', names()),
        f'_edgetrain_takes_job() {{ case "$1" in {job}) return 0 ;; esac; return 1; }}',
        "complete -o default -F _edgetrain edgetrain",
    ]
    if shell == "zsh":
        parts = ["autoload -U +X bashcompinit && bashcompinit", *parts]
    return "\n".join(parts)


def _table(name: str, key: str, rows: dict[str, list[str]]) -> str:
    cases = "".join(
        f"        {shlex.quote(row)}) echo {shlex.quote(' '.join(found))} ;;\n"
        for row, found in rows.items()
        if found
    )
    return f"{name}() {{\n    case {key} in\n{cases}    esac\n}}"


# -- fish ---------------------------------------------------------------------------------------


def fish(commands: list[Command]) -> str:
    lines = ["# completion of edgetrain, written by `edgetrain completion fish`"]
    for command in commands:
        seen = _fish_condition(command)
        start = f"complete -c edgetrain -n {shlex.quote(seen)}"
        for verb, said in command.verbs.items():
            lines.append(f"{start} -f -a {verb} -d {shlex.quote(said)}")
        lines += [f"{start} -f -a {word}" for word in command.words]
        for flag, said in command.flags.items():
            words = " ".join(command.values.get(flag, []))
            takes = f" -x -a {shlex.quote(words)}" if words else ""
            told = shlex.quote(said.replace("%(default)s", "").split(" (default")[0])
            lines.append(f"{start} -l {flag[2:]}{takes} -d {told}")
        if command.takes_job:
            known = [f"{key}={name}" for key, found in names().items() for name in found]
            words = " ".join([*(f"{key}=" for key in keys()), *known])
            lines.append(f"{start} -a {shlex.quote(words)}")
    return "\n".join(lines)


def _fish_condition(command: Command) -> str:
    """When a command's words are offered: its verbs were typed, and none of its own yet."""
    typed = [f"__fish_seen_subcommand_from {word}" for word in command.path.split()]
    if command.verbs:
        typed.append(f"not __fish_seen_subcommand_from {' '.join(command.verbs)}")
    return "; and ".join(typed)
