"""The way out of a missing extra is a command for the copy that is here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from edgetrain import extras

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_a_checkout_is_installed_by_its_path():
    assert extras.install_command("lab") == f"pip install -e '{ROOT}[lab]'"


@pytest.mark.parametrize("extra", sorted({*EXTRAS} - {"dev"}))
def test_a_wheel_names_the_packages_of_the_extra_and_no_distribution_of_its_own(extra, tmp_path):
    command = extras.install_command(extra, tmp_path)
    named = re.findall(r"'([\w-]+)", command)
    assert sorted(named) == sorted({re.match(r"[\w-]+", each)[0] for each in EXTRAS[extra]})
    assert "edgetrain" not in named


def test_without_metadata_the_extra_is_named(tmp_path, monkeypatch):
    def missing(_):
        raise extras.PackageNotFoundError

    monkeypatch.setattr(extras, "requires", missing)
    assert extras.install_command("lab", tmp_path) == "pip install 'edgetrain[lab]'"
