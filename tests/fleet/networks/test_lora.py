"""Time on air of LoRa, and the refusal to train over it."""

from __future__ import annotations

import pytest

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks import load
from edgetrain.fleet.networks.lora import Radio


def test_lora_is_refused_with_its_time_on_air() -> None:
    with pytest.raises(NetworkError, match="348 ms on air per 222 bytes, 44 hours"):
        load("lora").refuse_training()


def test_time_on_air_is_the_data_sheets() -> None:
    # Semtech's LoRa calculator: SF12, 125 kHz, 4/5, 8 symbols, 10 bytes: 991.23 ms.
    assert Radio(spreading_factor=12).time_on_air_seconds(10) == pytest.approx(0.99123, abs=1e-5)
