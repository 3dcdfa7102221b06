"""Fixtures of the in-process cache tests.

Owns: `make_rig`, which checks at the end of every test that nothing leaked, whatever the
test was about. Must never import sglang while tests are being collected.
"""

import pytest


@pytest.fixture
def make_rig():
    """Factory of `harness_cache.Rig`s; afterwards each is idle, balanced and sane."""
    pytest.importorskip("sglang")
    from sam.platform import shims

    if not shims.is_active():
        pytest.skip("needs the sam CPU platform")
    from harness_cache import Rig

    rigs = []

    def make(**settings):
        rigs.append(Rig(**settings))
        return rigs[-1]

    yield make
    try:
        for rig in rigs:
            rig.check_idle()
    finally:
        for rig in reversed(rigs):
            rig.close()
