"""What all tests share: hypothesis' profile."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "edgetrain",
    deadline=None,  # shared machines are noisy
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("edgetrain")
