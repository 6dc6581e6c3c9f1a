"""Instructions an element of the NEON kernels, beside plain C: counted under qemu, not timed.

    python benchmarks/neon.py            needs qemu-aarch64 and aarch64-linux-gnu-gcc

Compiles kernels.c for aarch64 with the package's own flags, runs each kernel that has NEON code of
its own on the same numbers with that code and with plain C (what gcc makes of it at -O3, its own
vectors included), and counts the instructions that qemu executes, without those that prepare the
numbers. What the two leave is compared by a checksum: a kernel whose bits differ ends this with an
error. Instructions are no seconds, but they are what a board is not needed for.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edgetrain.codecs.kernels import compiler

ELEMENTS = 8192
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"

KERNELS = {
    **{
        f"select + feedback, {share:g}%": "used = select_all(r, g, n, bits_of("
        f"{1 - math.sqrt(share / 100):.6f}f), (u32 *)a, (float *)b, 1);"
        for share in (0.1, 1, 10)
    },
    "select, 1%": "used = select_all(r, 0, n, bits_of(0.495f), (u32 *)a, (float *)b, 0);",
    "q1 encode + feedback": "planes_drain(r, g, n, 1, a);",
    "q2 encode + feedback": "planes_drain(r, g, n, 2, a);",
    "sign encode": "signs_encode(r, n, a, b);",
    "sign encode + feedback": "signs_drain(r, g, n, a, b);",
    "sign decode": "signs_decode((u8 *)g, (u8 *)g, n, 0, 1.0f, r);",
    "sign decode + add": "signs_decode((u8 *)g, (u8 *)g, n, 1, 0.3f, r);",
}
"""The call of each, on r and g of n floats from -0.5 to 0.5, evenly distributed, with room for its
results at a and b."""
PROGRAM = """
#include "kernels.c"
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words)
{
    int kernel = atoi(words[1]), n = atoi(words[3]), used = n;
    u32 state = 1, sum = 2166136261u;
    float *r = calloc(n, 4), *g = calloc(n, 4);
    u8 *a = calloc(n, 8), *b = calloc(n, 8);
    kernels_use(atoi(words[2]));
    for (int i = 0; i < 2 * n; i++) {
        state = state * 1664525u + 1013904223u;
        (i < n ? r : g)[i % n] = ((int)(state >> 8) - (1 << 23)) * 0x1p-24f;
    }
    switch (kernel) {
CASES
    }
    memset(a + 4 * used, 0, 8 * n - 4 * used); /* what is behind the entries may be anything */
    memset(b + 4 * used, 0, 8 * n - 4 * used);
    for (int i = 0; i < n; i++)
        sum = (sum ^ bits_of(r[i]) ^ ((u32 *)a)[i] ^ ((u32 *)b)[i]) * 16777619u;
    printf("%u\\n", sum);
}
"""


def counted(program: Path, kernel: int, tier: int) -> tuple[int, str]:
    """(instructions executed, checksum) of a kernel; kernel -1 only prepares."""
    one = "-one-insn-per-tb" if "-one-insn-per-tb" in said("--help") else "-singlestep"
    words = [EMULATOR, one, "-d", "exec,nochain", str(program)]
    with subprocess.Popen(
        [*words, str(kernel), str(tier), str(ELEMENTS)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as run:  # fmt: skip
        assert run.stderr is not None
        assert run.stdout is not None
        lines = sum(line.startswith(b"Trace") for line in run.stderr)
        checksum = run.stdout.read().decode().strip()
    if run.returncode:
        raise SystemExit(f"neon: {' '.join(words)} ended with {run.returncode}")
    return lines, checksum


def said(word: str) -> str:
    """What the emulator says."""
    return subprocess.run([EMULATOR, word], capture_output=True, text=True).stdout


def build(folder: Path) -> Path:
    """The program, for aarch64."""
    cases = "\n".join(f"    case {i}: {call} break;" for i, call in enumerate(KERNELS.values()))
    source, program = folder / "neon.c", folder / "neon"
    source.write_text(PROGRAM.replace("CASES", cases))
    flags = [f for f in compiler.FLAGS if f not in ("-shared", "-fPIC", "-Wl,-Bsymbolic")]
    words = [COMPILER, *flags, "-static", f"-I{compiler.SOURCE.parent}", str(source), "-lm"]
    subprocess.run([*words, "-o", str(program)], check=True)
    return program


def kernels() -> Iterator[tuple[str, float, float]]:
    """(kernel, instructions an element with NEON, in plain C)."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            raise SystemExit(f"neon: no {tool} (Debian: qemu-user, gcc-aarch64-linux-gnu)")
    with tempfile.TemporaryDirectory() as name:
        program = build(Path(name))
        bare, _ = counted(program, -1, 0)
        for number, kernel in enumerate(KERNELS):
            (neon, ours), (plain, theirs) = (counted(program, number, tier) for tier in (1, 0))
            if ours != theirs:
                raise SystemExit(f"neon: {kernel}: not the bits of plain C")
            yield kernel, (neon - bare) / ELEMENTS, (plain - bare) / ELEMENTS


def main() -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found = []
    if not arguments.json:
        print(f"{'instructions an element':26} {'NEON':>7} {'plain C':>8} {'ratio':>6}")
    for kernel, neon, plain in kernels():
        found.append({"kernel": kernel, "neon": neon, "plain": plain})
        if not arguments.json:
            print(f"{kernel:26} {neon:7.2f} {plain:8.2f} {neon / plain:6.3f}", flush=True)
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
