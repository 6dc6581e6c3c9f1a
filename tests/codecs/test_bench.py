"""What `edgetrain bench codecs` measures; that it runs is tested with the command line."""

from edgetrain.codecs import bench


def test_a_goal_is_met_or_missed() -> None:
    assert bench.Row("x", 2.0, "u").met is None
    assert bench.Row("x", 2.0, "u", 1.0).met
    assert bench.Row("x", 2.0, "u", 1.0, at_most=True).met is False


def test_a_goal_is_shown_only_at_the_size_it_holds_for() -> None:
    speed = bench.Row("int8 encode", 0.1, "of r += g", 0.8)
    bound = bench.Row("index, uniform, 1.0%", 1.5, "of bound", 1.02, at_most=True)
    assert bench.judged(speed, bench.GOALS_FROM).met is False
    assert bench.judged(speed, bench.GOALS_FROM - 1).met is None
    assert bench.judged(bound, 1_000_000).met is False
    assert bench.judged(bound, 50_000).met is None
