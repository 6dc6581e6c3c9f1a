"""A flashed card boots under QEMU, enrols, joins and trains to the end of its job.

On demand, since all instructions are emulated: `make test-boot-qemu`, `test-boot-qemu-arm64`,
`test-boot-qemu-raspi3b`. Prints how long it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import boot_card
import boot_qemu
import card_job
import pytest

from edgetrain.exchange.keys.host_keys import fingerprint
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.runs.folder import read_summary

pytestmark = [pytest.mark.boot_qemu, pytest.mark.timeout(4 * 3600)]
STEPS = {"amd64": 40, "arm64": 40, "raspi3b": 20}


@pytest.mark.parametrize("machine", STEPS)
def test_a_flashed_card_boots_under_qemu_and_trains(machine, tmp_path, capsys):
    if why_not := boot_qemu.missing(machine):
        pytest.skip(why_not)
    built = boot_card.build(tmp_path / "built", boot_qemu.MACHINES[machine].system)
    folder = tmp_path / "cluster"
    folder.mkdir()
    card_job.make_folder(folder, built.image, STEPS[machine])
    card, words, _ = card_job.flashed(folder, built.worker)
    run = boot_qemu.runner(machine, built.early)
    ring = Keyring(folder / "keys")
    with (
        boot_card.network() as space,
        boot_card.Guest(card, space, folder / "console", words, run) as guest,
        card_job.Hub(folder, space) as hub,
    ):
        began = time.monotonic()
        stages: dict[str, Callable[[], bool]] = {
            "systemd has started": lambda: "WATCH up=" in guest.said,
            "it has enrolled": lambda: list(ring.members().values()) == ["pi-0"],
            "the hub has welcomed it": lambda: "ActiveState=active" in guest.said,
            "its job is done": lambda: "StatusText=done" in guest.said,
            "torch was loaded once more": lambda: "TORCH " in guest.said,
        }
        for what, met in stages.items():
            guest.wait(met, what, 7200)
            spent = time.monotonic() - began
            with capsys.disabled():
                print(f"\n{machine}: after {spent:.0f} s {what}, {guest.cpu_s:.0f} CPU seconds")
        assert hub.process.wait(60) == 0, guest.said[-3000:]
    (finished,) = (folder / "runs").iterdir()
    assert read_summary(finished)["rounds"] == STEPS[machine] // 5
    assert fingerprint(ring.hosts()["pi-0"]) in guest.said, "its own host key"
    if machine != "amd64":
        assert "TORCH 2.9.1+cpu" in guest.said
        assert "C with NEON: built with the package" in guest.said
