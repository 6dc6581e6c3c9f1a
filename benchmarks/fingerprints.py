"""What a change of structure must not change: print it before and after, and compare.

    python benchmarks/fingerprints.py > before.json
    python benchmarks/fingerprints.py --package /path/to/another/checkout > after.json
    diff before.json after.json

Simulated jobs run in virtual time: their metrics are the same wherever they run, but for CPU
seconds and memory, so a digest of all lines, sorted, is printed beside the checksum of the last
base. Of emulated jobs, which run on the wall clock, only that checksum is printed. Help texts and
encoded messages are printed as digests, the wheel as the list of its files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIMULATED = {
    "dga": "strategy=dga(paper) members=4 steps=60 delay=12 codec=topk(0.05)|q2 network=wan-200ms "
    "final_sync=0",
    "dga by itself": "strategy=dga(paper) members=3 steps=60 network=4g-good final_sync=0",
    "sync-sgd": "strategy=sync-sgd members=3 steps=20 codec=int8",
    "fedavg, momentum": "strategy=fedavg members=5 steps=40 optimizer.momentum=0.9",
    "secure": "strategy=fedavg members=4 steps=20 secure=true",
    "private": "strategy=local-sgd members=4 steps=20 "
    "privacy=member privacy.clip=1 privacy.noise=0.5",
    "median": "strategy=dga(paper) members=5 steps=30 delay=5 merge=median codec=int8 final_sync=0",
}
EMULATED = {
    "dga": "strategy=dga(paper) members=3 steps=40 delay=10 codec=int8 network=wan-50ms pace_s=0 "
    "final_sync=0",
    "sync-sgd": "strategy=sync-sgd members=2 steps=20 codec=powersgd(2) network=wan-50ms pace_s=0",
    "fedavg": "strategy=fedavg members=2 steps=40 network=ethernet pace_s=0",
}
UNSTEADY = ("cpu_s", "peak_bytes")
MESSAGES = """
import dataclasses, hashlib, json, typing
try:
    from edgetrain.exchange import messages
except ImportError:
    from edgetrain import messages
VALUES = {int: 5, float: 0.5, bool: True, str: "m1", bytes: b"ab"}
def value(name, kind):
    if name == "job" or name == "model":
        return "0" * 64
    return VALUES.get(kind, b"ab")
found = {}
for name, kind in sorted(vars(messages).items()):
    if dataclasses.is_dataclass(kind) and kind.__module__ == messages.__name__:
        hints = typing.get_type_hints(kind, localns={"Buffer": bytes})
        told = [f for f in dataclasses.fields(kind) if "optional" not in f.metadata]
        fields = {f.name: value(f.name, hints[f.name]) for f in told}
        try:
            frames = messages.pack(kind(**fields))
        except Exception as error:
            continue
        letter = kind.kind.decode()
        found[letter] = hashlib.sha256(b"|".join(bytes(frame) for frame in frames)).hexdigest()[:16]
print(json.dumps(found, sort_keys=True))
"""


def digest(text: str) -> str:
    """Sixteen hexadecimal digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Checkout:
    """Runs code and commands of one checkout, in a throw-away folder."""

    def __init__(self, package: Path, folder: Path) -> None:
        self._package, self._folder = package, folder

    def python(self, *words: str) -> str:
        """What the interpreter prints."""
        environment = os.environ | {"PYTHONPATH": str(self._package), "COLUMNS": "100"}
        done = subprocess.run(
            [sys.executable, *words], cwd=self._folder, env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{words}: {done.stderr}")
        return done.stdout

    def edgetrain(self, *words: str) -> str:
        """What a verb prints."""
        return self.python("-m", "edgetrain", *words)

    def lines(self, answer: str) -> Iterator[dict[str, Any]]:
        """The metrics of the run that a verb's `--json` answer tells of."""
        folder = self._folder / json.loads(answer)["folder"]
        for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
            yield json.loads(line)

    def job(self, verb: str, words: str) -> dict[str, str]:
        """The bases that members ended with, the bytes they sent, and a digest of every line."""
        lines = list(self.lines(self.edgetrain(verb, *words.split(), "--json")))
        for line in lines:
            for name in UNSTEADY:
                line.pop(name, None)
        ends = [str(line) for line in lines if "base " in str(line.get("detail", line))]
        bases = sorted({end.split("base ")[1][:16] for end in ends})
        found = {"base": " ".join(bases)}
        if verb == "simulate":
            found["lines"] = digest(
                "\n".join(sorted(json.dumps(line, sort_keys=True) for line in lines))
            )
        return found

    def verbs(self) -> list[list[str]]:
        """Every verb, and every verb's verbs."""
        top = self.python(
            "-c",
            "import argparse, json\n"
            "try:\n    from edgetrain.cli.parser import parser\n"
            "except ImportError:\n    from edgetrain.__main__ import parser\n"
            "def walk(p, path):\n"
            "    yield path\n"
            "    for a in p._actions:\n"
            "        if isinstance(a, argparse._SubParsersAction):\n"
            "            for name, below in a.choices.items():\n"
            "                yield from walk(below, [*path, name])\n"
            "print(json.dumps(list(walk(parser(), []))))",
        )
        found: list[list[str]] = json.loads(top)
        return found

    def wheel(self) -> list[str]:
        """The names of the files in its wheel, without their folders."""
        self.python("-m", "pip", "wheel", "--quiet", "--no-deps", "-w", "dist", str(self._package))
        (path,) = (self._folder / "dist").glob("*.whl")
        return sorted(zipfile.ZipFile(path).namelist())


def fingerprints(checkout: Checkout, wheel: bool) -> dict[str, Any]:
    """All of them."""
    found: dict[str, Any] = {
        "simulated": {name: checkout.job("simulate", words) for name, words in SIMULATED.items()},
        "emulated": {name: checkout.job("run", words) for name, words in EMULATED.items()},
        "help": {
            " ".join(verb): digest(checkout.edgetrain(*verb, "--help")) for verb in checkout.verbs()
        },
        "messages": json.loads(checkout.python("-c", MESSAGES)),
    }
    if wheel:
        found["wheel"] = checkout.wheel()
    return found


def main() -> None:
    """Print the fingerprints of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--wheel", action="store_true", help="list the files of its wheel, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(arguments.package.resolve(), Path(folder))
        print(json.dumps(fingerprints(checkout, arguments.wheel), indent=1))


if __name__ == "__main__":
    main()
