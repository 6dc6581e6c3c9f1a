"""What `edgetrain bench codecs` measures; that it runs is tested with the command line."""

from edgetrain.codecs import bench


def test_a_goal_is_met_or_missed() -> None:
    assert bench.Row("x", 2.0, "u").met is None
    assert bench.Row("x", 2.0, "u", 1.0).met
    assert bench.Row("x", 2.0, "u", 1.0, at_most=True).met is False
