"""Real `tc`, in kernels that have it: Debian's user-mode-linux, and Debian's kernel under QEMU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import tc_qemu
import user_mode_linux

pytestmark = [pytest.mark.uml, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("machine", "guest"),
    [
        (user_mode_linux, "guard"),
        (user_mode_linux, "words"),
        (user_mode_linux, "backend"),
        (tc_qemu, "guard"),
        (tc_qemu, "words"),  # the backend starts processes within 20 s, which is too soon there
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_in_a_kernel_with_netem(machine: ModuleType, guest: str, tmp_path: Path) -> None:
    if why_not := machine.why_not():
        pytest.skip(why_not)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        # pytest's folders are closed to the user who boots; one of them may be /tmp itself
        folder.chmod(folder.stat().st_mode | 0o055)
    status, said = machine.run(Path(__file__).parent / "guests" / f"{guest}.py", tmp_path)
    print(said)
    assert status == 0, said
    assert "FAILED" not in said
    assert said.count("ok ") >= 3
