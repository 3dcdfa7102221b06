"""Fixtures of the in-process cache tests.

Owns: `make_rig` and `make_shadow`, which check at the end of every test that nothing leaked,
whatever the test was about. Must never import sglang while tests are being collected.
"""

import pytest


def _rig_maker(new):
    """A factory of rigs; afterwards each is idle, balanced and sane."""
    rigs = []

    def make(**settings):
        rigs.append(new(**settings))
        return rigs[-1]

    yield make
    try:
        for rig in rigs:
            rig.check_idle()
    finally:
        for rig in reversed(rigs):
            rig.close()


def _need_cpu_platform():
    pytest.importorskip("sglang")
    from sam.platform import shims

    if not shims.is_active():
        pytest.skip("needs the sam CPU platform")


@pytest.fixture(params=["python", "rust"])
def make_rig(request):
    """Factory of `harness_cache.Rig`s over each tree core."""
    _need_cpu_platform()
    from harness_cache import Rig

    yield from _rig_maker(lambda **settings: Rig(**{"core": request.param} | settings))


@pytest.fixture
def make_shadow():
    """Factory of `harness_shadow.ShadowRig`s."""
    _need_cpu_platform()
    from harness_shadow import ShadowRig

    yield from _rig_maker(ShadowRig)
