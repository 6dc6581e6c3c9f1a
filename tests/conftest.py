"""What all tests share: hypothesis' profile, and no keys but their own."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "edgetrain",
    deadline=None,  # shared machines are noisy
    max_examples=60,
    # CI's verdict on a commit is always the same; everyone else's runs look for new examples.
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("edgetrain")

# A shell that runs the tests in the background has told them to ignore Ctrl-C, and what tests start
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_keys(tmp_path_factory):
    """The keys of whoever runs the tests are not used, and not changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("no-keys")))
        yield
