"""The tables of jobs.md and wire.md, from the code: `make tables` writes them into the pages.

Names, defaults and allowed values come from the job's fields and the messages' types. The last
column, the meaning, is the page's own: a row keeps it, and a new row has "…" for it.
"""

from __future__ import annotations

import math
import re
import tomllib
import typing
from dataclasses import Field
from pathlib import Path

import edgetrain.exchange.further_messages  # noqa: F401
from edgetrain.exchange.messages import CODES, KINDS
from edgetrain.jobs.grid import text_of
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import keys

REFERENCE = Path(__file__).parents[2] / "docs/reference"
UNKNOWN = "…"


def number(value: float) -> str:
    """A bound, short: 0.5, 1,000, 10^9, 2^63 - 1, 2^-20."""
    for base, least in ((10, 6), (2, 20)):
        for short in (0, 1):
            whole = value + short
            exponent = round(math.log(whole, base)) if whole > 0 else 0
            if exponent >= least and base**exponent == whole:
                return f"{base}^{exponent}" + (" - 1" if short else "")
    if value == 2.0**-20:
        return "2^-20"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}".replace("e-0", "e-")


def allowed(field: Field[typing.Any], shown: str) -> str:
    """The allowed values of a key; `shown`: if the code has them neither as a type nor a range."""
    about, hint = field.metadata, str(field.type)
    if "low" in about:
        word = re.search(r"Literal\['(\w+)'\]", hint)
        bounds = f"{number(about['low'])} to {number(about['high'])}"
        return bounds + (f', `"{word[1]}"`' if word else "")
    if hint == "bool":
        return "true, false"
    return ", ".join(filter(None, about["choices"])) if "choices" in about else shown


def default(key: str) -> typing.Any:
    value: typing.Any = Job().to_dict()
    for part in key.split("."):
        value = value[part]
    return value


def with_job_keys(page: str) -> str:
    """jobs.md with a row for each key, in the page's order; new keys last."""
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| (.*?) \| (.*) \|$", page, re.M)
    known, fields = {key: rest for key, *rest in rows}, keys()
    lines = []
    for key in [*(key for key in known if key in fields), *(k for k in fields if k not in known)]:
        shown, allows, meaning = known.get(key, ["", UNKNOWN, UNKNOWN])
        value = default(key)
        if not shown or tomllib.loads(f"v = {shown}")["v"] != value:
            shown = text_of(value)
        lines.append(f"| `{key}` | `{shown}` | {allowed(fields[key], allows)} | {meaning} |")
    return re.sub(
        r"(?:^\| `[\w.]+` \| `.*\n)+", lambda _: "\n".join(lines) + "\n", page, flags=re.M
    )


def with_fields(page: str) -> str:
    """wire.md with a row for each field of a message, and for each code of a refusal."""
    for cls in KINDS.values():
        head = f"### `{cls.kind.decode()}` {cls.__name__}\n"
        before, _, rest = page.partition(head)
        chapter, border, after = rest.partition("\n##")
        known = dict(re.findall(r"^\| \d+ \| `(\w+)` \| .*? \| (.*) \|$", chapter, re.M))
        rows = "".join(
            f"| {i} | `{name}` | {domain.said.replace('e+', 'e')} | {known.get(name, UNKNOWN)} |\n"
            for i, (name, domain) in enumerate(cls.header.items())
        )
        chapter = re.sub(
            r"(?:^\| \d+ \| .*\n)+", lambda _, new=rows: new, chapter + "\n", flags=re.M
        )
        page = before + head + chapter[:-1] + border + after
    codes = "".join(f"| `{code}` | {meaning} |\n" for code, meaning in CODES.items())
    before, head, rest = page.partition("## Codes of a refusal\n")
    return before + head + re.sub(r"(?:^\| `.*\n)+", lambda _: codes, rest, count=1, flags=re.M)


PAGES = {"jobs.md": with_job_keys, "wire.md": with_fields}

if __name__ == "__main__":
    for name, rewrite in PAGES.items():
        path = REFERENCE / name
        path.write_text(rewrite(path.read_text("utf-8")), "utf-8")
