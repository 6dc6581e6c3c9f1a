"""The tables of jobs.md and wire.md are those of the code, and follow its changes."""

from __future__ import annotations

import re

import page_tables
import pytest

JOBS, WIRE = ((page_tables.REFERENCE / name).read_text("utf-8") for name in ("jobs.md", "wire.md"))


@pytest.mark.parametrize("name", page_tables.PAGES)
def test_a_page_has_the_tables_of_the_code(name):
    page = (page_tables.REFERENCE / name).read_text("utf-8")
    assert page_tables.PAGES[name](page) == page, "run `make tables`"
    assert page_tables.UNKNOWN not in re.findall(r"\| ([^|]*) \|$", page, re.M)


def test_a_row_that_lags_behind_is_written_anew_and_keeps_its_meaning():
    old = re.sub(r"\| `seed` \| `0` \| .*? \|", "| `seed` | `7` | any |", JOBS)
    assert old != JOBS == page_tables.with_job_keys(old)
    old = re.sub(r"(?m)^\| `seed` .*\n", "", JOBS)
    assert "| `seed` | `0` | 0 to 2^63 - 1 | … |\n" in page_tables.with_job_keys(old)
    gone = JOBS.replace("| `seed` |", "| `every` | `1` | any | gone |\n| `seed` |")
    assert page_tables.with_job_keys(gone) == JOBS


def test_a_field_that_lags_behind_is_written_anew_and_keeps_its_meaning():
    old = WIRE.replace("| 1 | `reason` | printable text of at most 512", "| 7 | `reason` | text of")
    assert old != WIRE == page_tables.with_fields(old)
    assert page_tables.with_fields(re.sub(r"(?m)^\| `ended` \|.*\n", "", WIRE)) == WIRE


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"), (0.5, "0.5"), (1e-9, "1e-9"), (2.0**-20, "2^-20"), (1000, "1,000"),
        (10**9, "10^9"), (2**63 - 1, "2^63 - 1"), (2**20, "2^20"), (100_000, "100,000"),
    ],
)  # fmt: skip
def test_bounds_are_short(value, said):
    assert page_tables.number(value) == said
