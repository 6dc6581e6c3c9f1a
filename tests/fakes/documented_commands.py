"""What README, docs, examples and every verb's --help tell people to type."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgetrain.cli.parser import parser

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for pattern in ("*.md", "docs/*/*.md", "examples/*.py")
    for path in sorted(ROOT.glob(pattern))
]


@dataclass(frozen=True)
class Command:
    page: str
    line: str
    answer: str
    """What the page shows below it."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)[1:]


def _typed(page: str, text: str) -> Iterator[tuple[str, str]]:
    """Every line of the code blocks that is typed, without what follows to explain it, and the
    line below it. `$` before it, `\\` and `&&` behind it are known."""
    if page.endswith(".py"):
        blocks = [text.split('"""')[1]]
    else:
        fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        known = ("", "console", "text", "sh", "bash")
        blocks = [block for language, block in fenced if language in known]
    for block in blocks:
        lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
        for at, line in enumerate(lines):
            line = line.strip()
            if re.match(r"\$ |edgetrain [a-z-]", line):
                shown = lines[at + 1] if line[0] == "$" and at + 1 < len(lines) else ""
                without = re.split(r"\s{3,}", line.removeprefix("$ "))[0]
                for part in re.split(r"&&|\s[#>]\s", without):
                    yield " ".join(part.split()), shown


def commands_in(page: str, text: str) -> Iterator[Command]:
    """Every `edgetrain …` that is typed."""
    for line, shown in _typed(page, text):
        if line.startswith("edgetrain "):
            yield Command(page, line, shown)


def verbs(
    found: argparse.ArgumentParser | None = None, path: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every verb, and every verb of a verb, by what is typed for it."""
    for action in (found or parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, verb in action.choices.items():
                yield f"{path} {name}".strip(), verb
                yield from verbs(verb, f"{path} {name}".strip())


_HELPS = [(f"{name} --help", f"```\n{verb.epilog}\n```") for name, verb in verbs()]
_TEXTS = [(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in PAGES]

COMMANDS = [command for page, text in (*_TEXTS, *_HELPS) for command in commands_in(page, text)]

OTHERS = sorted(
    {
        line
        for page, text in _TEXTS
        for line, _ in _typed(page, text)
        if re.match(r"(python|pip|make|git|torchrun) ", line)
    }
)
"""What else is typed at a `$`."""
