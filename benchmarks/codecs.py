"""How fast and how small the codecs are on this machine: `edgetrain bench codecs` without the CLI.

python benchmarks/codecs.py                          the best kernels, about two minutes
python benchmarks/codecs.py --kernels numpy          the fallback
python benchmarks/codecs.py --gradients char.npz     also on gradients of codecs_gradients.py
"""

from __future__ import annotations

import argparse
import sys

from edgetrain.codecs import bench


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_arguments(parser)
    return bench.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
