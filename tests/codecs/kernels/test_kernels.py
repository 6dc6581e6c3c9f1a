"""C and NumPy give the same bits, on every instruction set that this machine has."""

import contextlib

import codec_cases as cases
import numpy as np
import pytest
from codec_mutations import mutate
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.codecs import Feedback, parse
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels import compiler, native, wire
from edgetrain.codecs.kernels.chosen import Kernels
from edgetrain.codecs.kernels.contract import ENTRIES, Blocks, Bytes, Indices
from edgetrain.codecs.kernels.gaps import encode_gaps
from edgetrain.errors import BadPayload, ConfigError, EdgetrainError
from edgetrain.vectors.vector import Vector

SOME = settings(max_examples=30, deadline=None)
SETS = native.instruction_sets()
compiled = pytest.mark.skipif(not SETS, reason="no C library, so nothing to compare")


def same(first: object, second: object) -> bool:
    """Equal bit for bit, through tuples and lists."""
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and first.tobytes() == second.tobytes()
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(same, first, second))  # type: ignore[arg-type]
    return first == second


def on_all(run) -> list:  # type: ignore[no-untyped-def]
    """What `run(kernels)` returns with NumPy, then with each instruction set."""
    results = []
    for choice in ["numpy", *SETS]:
        with kernels.using(choice) as chosen:
            results.append(run(chosen))
    return results


def assert_same_on_all(run) -> None:  # type: ignore[no-untyped-def]
    first, *others = on_all(run)
    for choice, other in zip(SETS, others, strict=True):
        assert same(first, other), choice


@compiled
@pytest.mark.parametrize("spec", cases.ALL)
@settings(max_examples=15, deadline=None)
@given(x=cases.vectors, seed=st.integers(0, 2**32 - 1))
def test_codecs_give_the_same_bits(spec: str, x: Vector, seed: int) -> None:
    def run(_: object) -> list:
        codec = cases.bound(spec, x.size)
        feedback = Feedback(codec, x.size)
        rounds = [
            [bytes(p) for p in feedback.encode(v)] for v in (x, cases.make("cubed", x.size, seed))
        ]
        decoded = cases.decode(codec, rounds[-1], x.size)
        codec.add_many([rounds[0][0], rounds[1][0]], [0.25, -3.0], decoded)
        return [rounds, feedback.residual.copy(), decoded]

    assert_same_on_all(run)


@compiled
@SOME
@given(x=cases.vectors, seed=st.integers(0, 2**32 - 1), share=st.floats(0.001, 1.0))
def test_selection(x: Vector, seed: int, share: float) -> None:
    g = cases.make("normal", x.size, seed)
    rank = max(1, round(share * x.size))

    def run(chosen: Kernels) -> list:
        found = []
        for add in (None, g):
            bound, hits = chosen.threshold_of(x, add, rank)
            found += [bound, hits]
            for zero in (False, True):
                r = x.copy()
                positions, values, stopped = chosen.select(r, add, max(bound, 1), zero)
                assert stopped == x.size
                positions, values = positions.copy(), values.copy()
                found += [positions.copy(), values.copy(), r.copy()]
            for back in (None, r):
                kept = chosen.trim(back, positions.copy(), values.copy(), max(bound, 1), rank // 2)
                found += [*kept, r]
        return found

    assert_same_on_all(run)


@compiled
@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(cases.KINDS),
    elements=st.integers(64 * 64, 300_000),
    stride=st.sampled_from([1, 2, 16, 64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sampled_thresholds(kind: str, elements: int, stride: int, seed: int) -> None:
    x, g = cases.make(kind, elements, seed), cases.make("normal", elements, seed + 1)
    sample = elements // 64 // stride * 64

    def run(chosen: Kernels) -> list:
        ranks = {1, max(1, sample // 100), max(1, sample // 2), sample}
        return [
            chosen.threshold(x, add, r, stride, seed) for r in sorted(ranks) for add in (None, g)
        ]

    assert_same_on_all(run)


@compiled
@SOME
@given(
    gaps=st.lists(st.integers(0, 3) | st.integers(0, 200) | st.integers(0, 2**20), min_size=1),
    room=st.integers(0, 2**20),
)
def test_positions(gaps: list[int], room: int) -> None:
    positions = (np.cumsum(np.array(gaps) + 1) - 1).astype(np.uint32)
    elements = int(positions[-1]) + 1 + room

    def run(chosen: Kernels) -> list:
        coded = chosen.gaps_encode(positions, elements)
        back, used = chosen.gaps_decode(coded, positions.size, elements)
        assert used == coded.size
        assert (back == positions).all()
        with pytest.raises(BadPayload):
            chosen.gaps_decode(coded[:-1], positions.size, elements)
        return [coded, back]

    assert_same_on_all(run)


def clustered(kind: str, count: int, seed: int) -> Indices:
    """Ascending positions that stand together, as those of embeddings and of columns do."""
    rng = np.random.default_rng(seed)
    if kind == "full rows":
        gaps = np.where(np.arange(count) % 16 == 0, 16 * rng.integers(0, 90, count), 0)
    elif kind == "torn rows":
        gaps = np.where(rng.random(count) < 0.15, rng.integers(0, 5000, count), 0)
    elif kind == "columns":
        gaps = np.where(rng.random(count) < 0.9, np.arange(count) % 2 * 48 + 7, 300)
    elif kind == "far apart":
        gaps = rng.choice([0, 1, 300, 9000, 2**19], count)
    else:
        gaps = np.zeros(count, np.int64)
    return (np.cumsum(gaps + 1) - 1).astype(np.uint32)


KINDS = ["full rows", "torn rows", "columns", "far apart", "all"]


@compiled
@SOME
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(64, 6000),
    seed=st.integers(0, 99),
    room=st.integers(0, 200),
)
def test_tokens_are_chosen_where_they_are_shorter(
    kind: str, count: int, seed: int, room: int
) -> None:
    positions = clustered(kind, count, seed)
    elements = int(positions[-1]) + 1 + room
    rice = encode_gaps(positions, elements)

    def run(chosen: Kernels) -> list:
        coded = chosen.gaps_encode(positions, elements)
        assert coded.size <= rice.size
        reader = chosen.gaps(np.concatenate([coded, coded]), count, elements)
        taken = [reader.next_positions().copy() for _ in range(0, count, ENTRIES)]
        assert np.array_equal(np.concatenate(taken), positions)
        assert reader.finish() == coded.size
        back, used = chosen.gaps_decode(rice, count, elements)  # what older versions wrote
        assert used == rice.size
        assert np.array_equal(back, positions)
        return [coded]

    assert_same_on_all(run)


@pytest.mark.parametrize(
    ("kind", "share"), [("full rows", 0.2), ("torn rows", 0.8), ("columns", 0.45), ("all", 0.1)]
)
def test_positions_that_stand_together_take_fewer_bytes(kind: str, share: float) -> None:
    positions = clustered(kind, 2000, 0)
    elements = int(positions[-1]) + 1
    coded = kernels.current().gaps_encode(positions, elements)
    assert coded[0] == 0
    assert coded.size < share * encode_gaps(positions, elements).size


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_tokens_are_refused_by_all_or_none(kind: str) -> None:
    """Positions stay ascending and inside, whatever the bytes say."""
    rng = np.random.default_rng(len(kind))
    positions = clustered(kind, 300, 1)
    elements = int(positions[-1]) + 1
    coded = bytes(kernels.current().gaps_encode(positions, elements))
    assert coded[0] == 0

    def outcome(chosen: Kernels, payload: Bytes) -> object:
        try:
            back, used = chosen.gaps_decode(payload, positions.size, elements)
        except BadPayload:
            return None
        assert int(back[-1]) < elements
        assert np.all(np.diff(back.astype(np.int64)) > 0)
        return used, back.tobytes()

    with kernels.using("numpy") as twin:
        pass
    for number in range(400):
        damaged = bytearray(mutate(coded, rng))
        if number % 2:
            damaged[:1] = b"\0"
        payload = np.frombuffer(bytes(damaged), np.uint8)
        assert outcome(kernels.current(), payload) == outcome(twin, payload), damaged.hex()


@compiled
@pytest.mark.parametrize("count", [1, 4096, 4097, 9000])
def test_positions_come_some_at_a_time(count: int) -> None:
    rng = np.random.default_rng(count)
    gaps = np.where(rng.random(count) < 0.01, 5000, rng.integers(0, 9, count))
    positions = (np.cumsum(gaps + 1) - 1).astype(np.uint32)
    elements = int(positions[-1]) + 1

    def run(chosen: Kernels) -> list:
        coded = chosen.gaps_encode(positions, elements)
        reader = chosen.gaps(np.concatenate([coded, coded]), count, elements)
        taken = [reader.next_positions().copy() for _ in range(0, count, ENTRIES)]
        assert np.array_equal(np.concatenate(taken), positions)
        assert reader.finish() == coded.size
        return [coded]

    assert_same_on_all(run)


@pytest.mark.parametrize("spec", [s for s in cases.DENSE if "powersgd" not in s])
@pytest.mark.parametrize("weight", [None, 0.3])
def test_any_range_can_be_read(spec: str, weight: float | None) -> None:
    codec, x = parse(spec), cases.make("clusters", 10_007, 1)
    payload = np.frombuffer(bytes(codec.encode(x)[0]), np.uint8)

    def run(_: object) -> list:
        whole, pieces = cases.make("normal", x.size, 2), cases.make("normal", x.size, 2)
        codec.apply(payload.data, weight, whole)  # type: ignore[attr-defined]
        for first in range(0, x.size, ENTRIES):
            here = pieces[first : first + ENTRIES]
            codec.read(payload, x.size, first, here, weight)  # type: ignore[attr-defined]
        assert pieces.tobytes() == whole.tobytes()
        return [whole]

    assert_same_on_all(run)


@compiled
@SOME
@given(x=cases.vectors, seed=st.integers(0, 2**32 - 1))
def test_blocks_and_signs(x: Vector, seed: int) -> None:
    g = cases.make("normal", x.size, seed)
    codes = [Blocks(127, 8), Blocks(7, 4), Blocks(3, 4, stochastic=True)]
    codes += [Blocks(100, 8, stochastic=True), Blocks(1, 5, stochastic=True)]

    def run(chosen: Kernels) -> list:
        found = []
        for add in (None, g):
            for code in codes:
                r = x.copy()
                out = np.zeros(code.scale_bytes(x.size) + code.code_bytes(x.size), np.uint8)
                chosen.blocks_encode(r, add, code, seed, out)
                y = np.empty_like(x)
                chosen.blocks_check(out, x.size, code)
                chosen.blocks_read(out, x.size, 0, code, y, None)
                found += [out, r, y.copy()]
                chosen.blocks_read(out, x.size, 0, code, y, 0.7)
                found.append(y)
            r = x.copy()
            out = np.zeros(4 * -(-x.size // 512) + -(-x.size // 8), np.uint8)
            chosen.signs_encode(r, add, out)
            found += [out, r]
            chosen.signs_check(out, x.size)
            chosen.signs_read(out, x.size, 0, r, -0.1)
            for brain in (False, True):
                r, out = 1e3 * x, np.zeros(2 * x.size, np.uint8)
                chosen.halves_encode(r, add, brain, out)
                found += [out, r]
                chosen.halves_read(out, r.size, 0, brain, r, 0.3)
            for bits in (1, 2, 4):
                r = x.copy()
                out = np.zeros(4 + 2 * -(-x.size // 128) + bits * -(-x.size // 8), np.uint8)
                chosen.planes_encode(r, add, bits, out)
                found += [out, r]
        u = x.copy()
        chosen.momentum(u, g, 0.9, 0.3)
        return [*found, u]

    assert_same_on_all(run)


@compiled
def test_alignment_and_long_runs() -> None:
    big = cases.make("clusters", 70_000, 1)
    room = np.zeros(70_016, np.float32)
    for shift in (0, 1, 5, 15):
        r = room[shift : shift + 70_000]

        def run(chosen: Kernels, r: Vector = r) -> list:
            found = []
            for bound in (1, 2.0, 30.0, 1e9):
                r[:] = big
                bits = int(np.float32(bound).view(np.uint32)) if bound != 1 else 1
                positions, values, _ = chosen.select(r, big, bits, True)
                found += [positions.copy(), values.copy(), r.copy()]
            return found

        assert_same_on_all(run)


@compiled
def test_dense_messages_are_added_without_room_for_all_of_them() -> None:
    codec = parse("topk(1.0) | q2")
    payloads = [bytes(codec.encode(cases.make("normal", 5000, i))[0]) for i in range(5)]

    def run(_: object) -> Vector:
        out = cases.make("normal", 5000, 9)
        codec.add_many(payloads, [0.1, 0.2, 0.3, 0.4, 0.5], out)
        before = out.copy()
        with pytest.raises(BadPayload):
            codec.add_many([*payloads, payloads[0][:-1]], [1.0] * 6, out)
        assert np.array_equal(out, before)
        return out

    assert_same_on_all(run)


def test_both_refuse_what_is_not_finite() -> None:
    for value in (np.nan, np.inf, 2.0**100):
        x = cases.make("normal", 600, 0)
        x[100] = value

        def run(chosen: Kernels, x: Vector = x) -> bool:
            out = np.zeros(1000, np.uint8)
            for attempt in (
                lambda: chosen.levels_encode(x, 0.0, 2),
                lambda: chosen.blocks_encode(x.copy(), None, Blocks(127, 8), 0, out),
                lambda: chosen.sparse_encode(None, np.arange(600, dtype=np.uint32), x, 600, 32),
                lambda: chosen.sparse_encode(None, np.arange(600, dtype=np.uint32), x, 600, 2),
            ):
                with pytest.raises(EdgetrainError, match="diverged"):
                    attempt()
            return True

        assert all(on_all(run))


def test_a_choice_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'avx2'"), kernels.using("avx3"):
        pass
    missing = "neon" if "neon" not in SETS else "avx512"
    with pytest.raises(ConfigError, match="no kernels"), kernels.using(missing):
        pass


def test_without_a_compiler_numpy_does_the_work(tmp_path: object) -> None:
    kernels.current()  # what is used from here on, and after this test
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "no-such-compiler")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setattr(native, "PACKAGED", native.PACKAGED.with_name("absent.so"))
        patch.setattr(native, "load", native.load.__wrapped__)
        stack.enter_context(kernels.using("auto"))
        assert kernels.backend().name == "numpy"
        assert "no-such-compiler" in kernels.backend().reason
        assert kernels.choices() == ["numpy"]


def test_a_cache_that_others_can_write_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "edgetrain"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(compiler.CannotCompile, match="written by others"):
        compiler.cached_library()


@pytest.mark.real
def test_a_compiler_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("CC", "false")
    with pytest.raises(compiler.CannotCompile, match="false failed"):
        compiler.compile_kernels(tmp_path / "kernels.so")
    assert list(tmp_path.iterdir()) == []


def test_the_backend_in_words_says_what_and_why() -> None:
    for choice in kernels.choices():
        with kernels.using(choice):
            sentence = kernels.backend().sentence
        assert "(" not in sentence.split(":")[0]
        assert sentence.startswith("NumPy" if choice == "numpy" else "C with")
        assert choice == "numpy" or kernels.backend().path in sentence
    asked = kernels.Backend("numpy", "-", "-", "asked for").sentence
    assert asked == "NumPy, several times slower than C and the same bits: asked for"
    arm = kernels.Backend("c", "neon", "/x/kernels.so", "built with the package").sentence
    assert arm == "C with NEON: built with the package (/x/kernels.so)"


@pytest.mark.parametrize(
    "spec", ["topk(0.1) | q2", "topk(0.1)", "topk(0.9) | q2", "topk(0.1) | int8"]
)
def test_a_head_is_read_once_and_by_the_chosen_kernels(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, out, heads = parse(spec), np.zeros(5000, np.float32), []
    payload = bytes(codec.encode(cases.make("normal", 5000, 0))[0])
    read_varint = wire.get_varint

    def get_varint(content: Bytes, at: int) -> tuple[int, int]:
        heads.append(content.tobytes() == payload)
        return read_varint(content, at)

    monkeypatch.setattr(wire, "get_varint", get_varint)
    for choice in ("numpy", *native.instruction_sets()[-1:]):
        for number, work in (
            (1, lambda: codec.decode(payload, out)),
            (1, lambda: codec.add(payload, 0.5, out)),
            (3, lambda: codec.add_many([payload] * 3, [0.5] * 3, out)),
        ):
            heads.clear()
            with kernels.using(choice):
                work()
            assert sum(heads) == (number if choice == "numpy" else 0)


@pytest.mark.parametrize("spec", ["q1", "q2", "q3", "q4", "randk(0.5) | q1", "randk(0.5) | q4",
                                  "topk(0.5) | q2"])  # fmt: skip
@pytest.mark.parametrize("share", [1.0, 0.999, 0.9])
def test_just_below_the_limit_what_is_written_can_be_read(spec: str, share: float) -> None:
    most = np.nextafter(np.float32(2.0**100), np.float32(0)) * np.float32(share)
    x = np.full(300, most, np.float32)
    x[::2] *= -1

    def run(_: object) -> list:
        codec = cases.bound(spec, x.size)
        feedback = Feedback(codec, x.size)
        payloads = [bytes(part) for part in feedback.encode(x)]
        return [payloads, cases.decode(codec, payloads, x.size), feedback.residual.copy()]

    for payloads, decoded, _ in on_all(run):
        assert payloads
        assert np.isfinite(decoded).all()
    assert_same_on_all(run)


@pytest.mark.parametrize("spec", ["topk(0.5)", "topk(0.5, exact)", "topk(0.5) | q2", "randk(0.5)"])
def test_of_nothing_nothing_is_sent(spec: str) -> None:
    nothing = np.zeros(0, np.float32)
    assert list(parse(spec).drain(nothing.copy(), nothing)) == []
