"""What holds after 200 rounds holds after 20,000, and on every code path of NumPy's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import codec_cases as cases
import pytest

from edgetrain.codecs.kernels.native import instruction_sets
from edgetrain.strategies import find
from endurance import long_laws, same_bits

ROUNDS = int(os.environ.get("ROUNDS", "20000"))
ELEMENTS = os.environ.get("ELEMENTS", "3000000")

TWINS = {"as found": "", "AVX2": "X86_V4 AVX512_ICL", "SSE": "X86_V3 X86_V4 AVX512_ICL"}
"""What NumPy's loops may use, and the features (of NumPy 2.4) that are then switched off."""
OUTER = ("sgd(0.5)", "nesterov", "adam", "yogi", "adagrad")


def test_codecs_lose_nothing_and_leave_no_direction_out(printed):
    for spec, kind, lost, early, late in printed(long_laws.table_of_codecs, ROUNDS):
        if not spec.startswith("dgc(0.02)"):  # momentum adds up to more than the gradients
            assert lost <= ROUNDS, (spec, kind)
        if (spec, kind) != ("randk(0.02) | fp16", "half"):  # 65,504 in fifty rounds are too few
            assert late <= 1.5 * early + 0.3, (spec, kind)


def test_members_end_equal_where_their_steps_led(printed):
    for name, kind, lost, aside in printed(long_laws.table_of_strategies, ROUNDS):
        strategy = find(name)
        if not strategy.outer and strategy.is_synchronous:
            assert lost < 1e-4, (name, kind)
        if not strategy.outer.startswith(("ada", "yogi")):
            assert aside < 0.01, (name, kind)


def test_every_code_path_gives_the_same_bits(printed):
    names = [s for s in cases.ALL if "low-rank" not in s and not s.startswith("powersgd")]
    names += ["factors 1", "factors 3", *(f"outer {rule}" for rule in OUTER)]
    paths = [(kernels, "") for kernels in instruction_sets()]
    paths += [("numpy", features) for features in TWINS.values()]
    found = [printed(digests, kernels, features, names) for kernels, features in paths]
    for path, digest in zip(paths, found, strict=True):
        assert digest == found[0], path


def digests(kernels: str, features: str, names: list[str]) -> dict[str, str]:
    """What `same_bits` prints of these kernels, without these features of the processor."""
    env = dict(os.environ, EDGETRAIN_KERNELS=kernels, NPY_DISABLE_CPU_FEATURES=features)
    if not features:
        del env["NPY_DISABLE_CPU_FEATURES"]
    words = [sys.executable, str(Path(same_bits.__file__)), ELEMENTS, *names]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    if "during runtime" in done.stderr:
        pytest.skip(done.stderr)
    print(f"{kernels}, without {features or None}: {len(names)} digests")
    said: dict[str, dict[str, str]] = json.loads(done.stdout)
    return said["digests"]
