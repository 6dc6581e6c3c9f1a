"""The C kernels where no Python runs: cross-compiled for ARM and replayed under qemu, and under
the address sanitizer. Each is skipped where its tools are missing.
"""

import hashlib
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import codec_cases as cases
import numpy as np
import pytest

from edgetrain.codecs.kernels import compiler, wire
from edgetrain.codecs.kernels.contract import Blocks
from edgetrain.codecs.kernels.numpy_twin import NumpyTwin
from edgetrain.errors import BadPayload

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
FLAGS = [f for f in compiler.FLAGS if f not in ("-shared", "-fPIC", "-Wl,-Bsymbolic")]
CODES = [Blocks(127, 8), Blocks(7, 4), Blocks(3, 4, stochastic=True), Blocks(1, 5, stochastic=True)]


class Recorder:
    """Runs the NumPy kernels and writes down what went in and what came out."""

    def __init__(self) -> None:
        self.run = NumpyTwin()
        self.records = bytearray()

    def record(
        self, operation: int, ints: list[int], ins: list, outs: list, floats: tuple = (0, 0)
    ) -> None:
        for tier in (0, 1):
            self.records += struct.pack("<II", operation, tier)
            self.records += struct.pack("<6q", *(ints + [0] * 6)[:6])
            self.records += struct.pack("<2f", *floats)
            for array in (ins + [None] * 3)[:3] + (outs + [None] * 3)[:3]:
                data = b"" if array is None else np.asarray(array).tobytes()
                self.records += struct.pack("<Q", len(data)) + data

    def selection(self, x, g) -> None:  # type: ignore[no-untyped-def]
        rank = max(1, x.size // 20)
        for add in (None, g):
            bound = max(1, self.run.threshold_of(x, add, rank)[0])
            for zero in (0, 1):
                r = x.copy()
                positions, values, _ = self.run.select(r, add, bound, bool(zero))
                self.record(0, [x.size, bound, zero], [x, add], [positions, values, r])
        for stride in (1, 3):
            if x.size >= 64 * stride:
                bits, hits = self.run.threshold(x, g, 1 + rank // stride, stride, 7)
                ints = [x.size, 1 + rank // stride, stride, 7]
                self.record(1, ints, [x, g], [np.int64(bits), np.int64(hits)])
        self.sparse(positions, values, x)

    def sparse(self, positions, values, x) -> None:  # type: ignore[no-untyped-def]
        rng = np.random.default_rng(x.size)
        for bits in (1, 2, 3, 4, 32):
            r = x.copy()
            payload = self.run.sparse_encode(r, positions, values, x.size, bits)
            ints = [positions.size, x.size, bits]
            self.record(2, ints, [positions, values, x], [np.frombuffer(payload, np.uint8), r])
            for i in range(6):
                content = np.frombuffer(payload, np.uint8).copy()
                if i:
                    content[rng.integers(content.size)] ^= 1 << rng.integers(8)
                if i > 3:
                    content = content[: rng.integers(1, content.size + 1)]
                self.decoding(content, x.size, bits)

    def decoding(self, content, elements: int, bits: int) -> None:  # type: ignore[no-untyped-def]
        try:
            positions, values = self.run.sparse_decode(content, elements, bits)
        except BadPayload:
            self.record(3, [elements, bits, elements, 0], [content], [], (0.3, 0))
        else:
            scaled = values * np.float32(0.3)
            ints = [elements, bits, positions.size, 1]
            self.record(3, ints, [content], [positions, scaled], (0.3, 0))
            if positions.size:
                self.some_at_a_time(content, positions, elements, bits)

    def some_at_a_time(self, content, positions, elements: int, bits: int) -> None:  # type: ignore[no-untyped-def]
        at = len(wire.put_varint(positions.size))
        used = self.run.gaps_decode(content[at:], positions.size, elements)[1]
        ints = [positions.size, elements, at, used]
        self.record(11, ints, [content], [positions])
        if bits < 32:
            total = np.ones(positions.size, np.float32)
            self.run.levels_read(content[at + used :], total.size, 0, bits, total, 0.7)
            ints = [total.size, bits]
            self.record(12, ints, [content[at + used :]], [total], (0.7, 0))

    def dense(self, x, g) -> None:  # type: ignore[no-untyped-def]
        for add in (None, g):
            for code in CODES:
                r, scales = x.copy(), code.scale_bytes(x.size)
                out = np.zeros(scales + code.code_bytes(x.size), np.uint8)
                self.run.blocks_encode(r, add, code, 99, out)
                ints = [x.size, code.levels, code.width, int(code.stochastic), 99, scales]
                self.record(4, ints, [x, add], [out, r])
                total = g.copy()
                self.run.blocks_read(out, x.size, 0, code, total, 0.7)
                ints = [x.size, code.levels, code.width, 1, 1, scales]
                self.record(5, ints, [g, None, out], [total], (0.7, 0))
            r, scales = x.copy(), 4 * -(-x.size // 512)
            out = np.zeros(scales + -(-x.size // 8), np.uint8)
            self.run.signs_encode(r, add, out)
            self.record(6, [x.size, scales], [x, add], [out, r])
            for weight in (None, -0.2):
                total = g.copy()
                self.run.signs_read(out, x.size, 0, total, weight)
                add_flag = int(weight is not None)
                self.record(
                    7, [x.size, scales, add_flag], [g, None, out], [total], (weight or 0, 0)
                )
            for bits in (1, 2, 3):
                r = x.copy()
                out = np.zeros(4 + 2 * -(-x.size // 128) + bits * -(-x.size // 8), np.uint8)
                self.run.planes_encode(r, add, bits, out)
                self.record(9, [x.size, bits], [x, add], [out, r])
            for brain in (0, 1):
                r, out, total = x.copy(), np.zeros(2 * x.size, np.uint8), g.copy()
                self.run.halves_encode(r, add, bool(brain), out)
                self.run.halves_read(out, total.size, 0, bool(brain), total, 0.3)
                ins, outs = [x, add, g], [out, r, total]
                self.record(10, [x.size, brain], ins, outs, (0.3, 0))
        u = x.copy()
        self.run.momentum(u, g, 0.9, 0.3)
        self.record(8, [x.size], [x, g], [u], (0.9, 0.3))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recorder = Recorder()
    for i, kind in enumerate(k for k in cases.KINDS if k != "zeros"):
        for elements in (1, 7, 63, 300, 1031, 20_000 + i):
            x, g = cases.make(kind, elements, i), cases.make("normal", elements, i + 100)
            recorder.selection(x, g)
            recorder.dense(x, g)
    path = tmp_path_factory.mktemp("replay") / "records"
    path.write_bytes(recorder.records)
    return path


def build(argv: list[str]) -> str:
    """The program, compiled unless it was kept for these sources, these flags and this compiler."""
    if not shutil.which(argv[0]):
        pytest.skip(f"{argv[0]} is not installed")
    source = HERE / "replay.c"
    command = [*argv, f"-I{compiler.SOURCE.parent}", str(source), "-lm"]
    version = subprocess.run([argv[0], "--version"], capture_output=True, check=True).stdout
    texts = [source.read_bytes(), compiler.SOURCE.read_bytes(), version, "\n".join(argv).encode()]
    folder = compiler.cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / f"replay-{hashlib.sha256(b'|'.join(texts)).hexdigest()[:16]}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            subprocess.run([*command, "-o", f"{scratch}/replay"], check=True)
            Path(scratch, "replay").replace(target)
    return str(target)


def replay(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_neon_gives_the_same_bits(recording: Path) -> None:
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not qemu:
        pytest.skip("qemu-user is not installed")
    program = build(["aarch64-linux-gnu-gcc", "-static", *FLAGS])
    assert "up to 1" in replay([qemu, program, str(recording)])


def test_the_address_sanitizer_finds_nothing(recording: Path, tmp_path: Path) -> None:
    checks = "-fsanitize=address,undefined"
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    argv = [*compiler.find_compiler(), checks, str(probe), "-o", str(tmp_path / "probe")]
    if subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("this compiler has no sanitizers")
    # Unoptimised, every access of the source is looked at, and compiling takes a quarter.
    flags = [checks, "-fno-sanitize-recover=all", *FLAGS, "-O0"]
    replay([build([*compiler.find_compiler(), *flags]), str(recording)])
