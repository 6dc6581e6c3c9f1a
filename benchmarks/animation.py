"""How DGA works, as an animated SVG: two simulated members, with synchronous SGD and with DGA.

    python benchmarks/animation.py                  # writes docs/images/dga.svg

Boxes are steps, lines are contributions on their way to the mean and back, as two simulated runs
have them: a round trip of 200 ms, steps of 50 ms, rounds of two steps. A browser plays it; where
nothing is played, all of it is shown.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import edgetrain

FROM_S, SHOWN_S = 2.0, 2.0
"""The seconds that are shown: TCP's windows are open by then."""
PLAYED_S = 12
LEFT, WIDTH, LANE, BOX = 92, 760, 46, 20
PANEL = 4 * LANE - 16
WORDS: dict[str, Any] = {"network": "rtt-200ms", "pace_s": 0.05, "members": 2, "steps": 120}
RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("synchronous SGD: each step waits for the mean", {"strategy": "sync-sgd"}),
    ("DGA: members go on, and take the mean in when it comes",
     {"strategy": "dga", "local_steps": 2, "delay": 4, "final_sync": 0}),
)  # fmt: skip
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2933 }
.small { font-size: 11px; fill: #62707d }
.step { fill: #3d7bd9 } .trip { fill: none; stroke: #d9822b; stroke-width: 1.6 }
.lane { stroke: #c8d0d8 } .now { stroke: #1f2933; stroke-dasharray: 3 3 }
.mean { fill: #d9822b }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ec } .small { fill: #9aa7b4 } .lane { stroke: #44505c } .now { stroke: #e4e8ec }
}
"""


def main() -> None:
    """Simulate both, and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("docs/images/dga.svg"), metavar="FILE"
    )
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        panels: list[str] = []
        for number, (title, words) in enumerate(RUNS):
            run = edgetrain.simulate(runs=folder, **WORDS, **words)
            panels += panel(run, title, 8 + number * (PANEL + 14))
    output.write_text(picture(panels), "utf-8")
    print(f"picture: {output}")


def panel(run: edgetrain.Run, title: str, top: float) -> Iterator[str]:
    """One run: the lane of the hub, and one for each member."""
    steps, trips = run.steps, run.exchanges
    first, hub, second = (top + n * LANE for n in (1, 2, 3))
    ended = steps["t"][steps["member"] == "m0"] - FROM_S
    done = int(((ended > 0) & (ended <= SHOWN_S)).sum())
    yield f'<text x="8" y="{top + 14}">{title}: {done} steps in {SHOWN_S:g} s</text>'
    for name, y in (("m0", first), ("hub", hub), ("m1", second)):
        called = "the mean" if name == "hub" else name
        yield f'<text class="small" x="8" y="{y + 4}">{called}</text>'
        yield f'<line class="lane" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>'
    yield '<g clip-path="url(#played)">'
    for name, y in (("m0", first), ("m1", second)):
        mine = steps["member"] == name
        ends = steps["t"][mine]
        rest = steps["wait_s"][mine] + steps["overhead_s"][mine]
        for end, took, waited in zip(ends, steps["compute_s"][mine], rest, strict=True):
            began = end - took - waited  # a step computes, and then waits
            if not FROM_S <= began < FROM_S + SHOWN_S:
                continue
            x, width = at(began), at(began + took) - at(began) - 1.5
            yield (
                f'<rect class="step" x="{x:.1f}" y="{y - BOX / 2}" width="{width:.1f}" '
                f'height="{BOX}" rx="2"/>'
            )
        theirs = trips["member"] == name
        for sent, back in zip(
            trips["submitted_t"][theirs], trips["arrived_t"][theirs], strict=True
        ):
            if FROM_S <= sent < FROM_S + SHOWN_S:
                middle = at((sent + back) / 2)
                edge = y + (BOX if y < hub else -BOX) / 2
                yield (
                    f'<path class="trip" d="M{at(sent):.1f} {edge} L{middle:.1f} {hub} '
                    f'L{at(back):.1f} {edge}"/><circle class="mean" cx="{middle:.1f}" '
                    f'cy="{hub}" r="3"/>'
                )
    yield "</g>"


def at(seconds: float) -> float:
    """Where a time stands."""
    return LEFT + WIDTH * float(seconds - FROM_S) / SHOWN_S


def picture(panels: list[str]) -> str:
    """The whole SVG: what is played is uncovered from the left."""
    width, height = LEFT + WIDTH + 8, 2 * (PANEL + 14) + 26
    played = f'dur="{PLAYED_S}s" repeatCount="indefinite"'
    ticks = "".join(
        f'<text class="small" x="{at(FROM_S + t / 2):.0f}" y="{height - 8}">{t / 2:g} s</text>'
        for t in range(int(2 * SHOWN_S))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img"><title>Synchronous SGD and Delayed Gradient Averaging</title>'
        f'<style>{STYLE}</style><defs><clipPath id="played">'
        f'<rect x="0" y="0" width="{LEFT + WIDTH}" height="{height}">'
        f'<animate attributeName="width" from="{LEFT}" to="{LEFT + WIDTH}" {played}/></rect>'
        f"</clipPath></defs>{''.join(panels)}{ticks}"
        f'<line class="now" x1="{LEFT + WIDTH}" x2="{LEFT + WIDTH}" y1="24" y2="{height - 24}">'
        f'<animate attributeName="x1" from="{LEFT}" to="{LEFT + WIDTH}" {played}/>'
        f'<animate attributeName="x2" from="{LEFT}" to="{LEFT + WIDTH}" {played}/></line></svg>\n'
    )


if __name__ == "__main__":
    main()
