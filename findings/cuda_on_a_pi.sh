#!/usr/bin/env bash
# torch 2.13.0: pip install torch on a Raspberry Pi. Until 2.10 the wheel for ARM wanted nothing of
# CUDA; this one wants all of it on any Linux, and pip reads no machine's accelerator. Only metadata
# are read here, by pip itself, for the wheels that it would take on ARM with Python 3.11 and 3.13.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cd "$folder"
for version in 2.9.1 2.10.0 2.13.0; do
    for python in 3.11 3.13; do
        env/bin/pip install --quiet --dry-run --ignore-installed --no-deps --target none --only-binary=:all: \
            --platform manylinux_2_28_aarch64 --python-version $python --report "$version-$python.json" \
            "torch==$version" 2> said || { cat said; exit 1; }
    done
done
env/bin/python - <<'PYTHON'
import json
import re
from pathlib import Path

for path in sorted(Path().glob("*.json"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)]):
    (item,) = json.loads(path.read_text())["install"]
    wants = item["metadata"]["requires_dist"]
    wheel = item["download_info"]["url"].rsplit("/", 1)[1]
    cuda = [each for each in wants if each.startswith(("nvidia", "cuda", "triton"))]
    on_arm = [each for each in cuda if "x86_64" not in each]
    print(f"{wheel}: {len(on_arm)} packages of CUDA on ARM")
    assert (len(on_arm) == 7) if "2.13.0" in wheel else (cuda and not on_arm), on_arm
print("torch 2.13.0 on ARM:", *(re.split(r"[\[<=]", each)[0] for each in on_arm))
PYTHON
