"""Put one device's files on a card that was written and does not boot yet, and check them there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.provisioning.cards import looking, personal
from edgetrain.provisioning.cards.bootfiles import BootFiles, Content
from edgetrain.provisioning.cards.looking import ImageDescription
from edgetrain.provisioning.cards.personal import FOLDER, Personal
from edgetrain.provisioning.cards.writing import CardState, Finish

PROGRAM = Path(__file__).with_name("first_boot.py")
COMMAND_LINE = "cmdline.txt"


@dataclass(frozen=True)
class Load:
    """The files of a device besides its settings: those below FOLDER, and config.json for them."""

    files: Mapping[str, Content]
    """Files by their names in FOLDER: "worker.tar", "token", "job.toml", …"""
    config: Mapping[str, Any] = field(default_factory=dict)


def placed(
    device: Personal, load: Load, look: ImageDescription, before: bytes
) -> dict[str, Content]:
    """All files that go onto the boot partition. `before` is what is in cmdline.txt."""
    ours: dict[str, Content] = {f"{FOLDER}/{name}": data for name, data in load.files.items()}
    ours[f"{FOLDER}/first_boot.py"] = PROGRAM.read_bytes()
    ours[f"{FOLDER}/config.json"] = json.dumps(load.config, indent=1).encode() + b"\n"
    settings = personal.files(device, look.first_boot)
    line = personal.command_line(before.decode(errors="replace"), device, look.first_boot)
    return {**ours, **settings, COMMAND_LINE: line.encode()}


def finisher(device: Personal, load_for: Callable[[ImageDescription], Load]) -> Finish:
    """The function that writes a device's files to its card, for `writing.write` to call.

    load_for: what the device gets on the system that was found; may raise EdgetrainError. After
    any error the card does not boot.
    """

    def finish(card: CardState, head: memoryview) -> None:
        medium = card.medium
        look = looking.look(medium.name, head, medium.size)
        boot = BootFiles(medium.name, look.boot)
        before = boot.read(COMMAND_LINE)
        if before is None:
            raise ConfigError(
                f"partition {look.boot.number} has no {COMMAND_LINE}: the image is not for a "
                "Raspberry Pi, or it boots from another partition"
            )
        files = placed(device, load_for(look), look, before)
        boot.write(files)
        medium.flush()
        medium.forget()
        boot.check(files)

    return finish
