"""Real `tc`, in a kernel that has it: Debian's user-mode-linux, booted by an ordinary user."""

from __future__ import annotations

from pathlib import Path

import pytest
import user_mode_linux as uml

WHY_NOT = uml.why_not()
pytestmark = [pytest.mark.uml, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.mark.parametrize("guest", ["guard", "backend"])
def test_in_user_mode_linux(guest: str, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # pytest's folders are closed to the user who boots
    status, said = uml.run(Path(__file__).parent / "guests" / f"{guest}.py", tmp_path)
    assert status == 0, said
    assert "FAILED" not in said
    assert said.count("ok ") >= 3
