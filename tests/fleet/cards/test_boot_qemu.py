"""A flashed card boots under QEMU, enrols, joins and trains to the end of its job.

On demand, since all instructions are emulated: `make test-boot-qemu`, `test-boot-qemu-arm64`,
`test-boot-qemu-raspi3b`. Prints how long it took.
"""

from __future__ import annotations

import time

import boot_card
import boot_qemu
import card_job
import pytest

pytestmark = [pytest.mark.boot_qemu, pytest.mark.timeout(5400)]
STEPS = 40


@pytest.mark.parametrize("machine", ["amd64", "arm64", "raspi3b"])
def test_a_flashed_card_boots_under_qemu_and_trains(machine, tmp_path, capsys):
    if why_not := boot_qemu.missing(machine):
        pytest.skip(why_not)
    built = boot_card.build(tmp_path / "built", boot_qemu.SYSTEM)
    folder = tmp_path / "cluster"
    folder.mkdir()
    card_job.make_folder(folder, built.image, STEPS)
    card, words, _ = card_job.flashed(folder, built.worker)
    run = boot_qemu.runner(*boot_qemu.kernel_of(built.root, tmp_path))
    began = time.monotonic()
    with (
        boot_card.network() as space,
        boot_card.Guest(card, space, folder / "console", words, run) as guest,
        card_job.Hub(folder, space) as hub,
    ):
        guest.until("StatusText=training:_", 3600)
        trains_s = time.monotonic() - began
        assert hub.process.wait(1800) == 0, guest.said[-3000:]
        guest.until("StatusText=done", 300)
        done_s, cpu_s = time.monotonic() - began, guest.cpu_s
    with capsys.disabled():
        print(
            f"\n{machine}: from power-on it trains after {trains_s:.0f} s, is done after "
            f"{done_s:.0f} s, {cpu_s:.0f} CPU seconds"
        )
