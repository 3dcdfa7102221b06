"""Without sessions sam on the Rust core is SGLang's Rust core: same victims in the same order
on both tiers, same frees, matches, sizes and tree, in long random runs of real caches. The
shadow equals its core after every few operations. `SAM_SHADOW_OPS`: operations per case.
"""

import os

import pytest

pytest.importorskip("sglang")

N_OPS = int(os.environ.get("SAM_SHADOW_OPS", "3000"))


@pytest.mark.parametrize(
    "hicache, host_ratio",
    [
        ("off", 0.0),
        ("write_through", 1.5),
        ("write_through_selective", 1.5),
        ("write_back", 1.5),
        ("write_back", 0.3),
    ],
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_order_without_sessions_is_the_rust_core_s(make_shadow, page_size, hicache, host_ratio):
    from harness_shadow import run_twin

    seed = f"{page_size}{hicache}{host_ratio}"
    case = {"hicache": hicache, "page_size": page_size, "host_ratio": host_ratio}
    twin = run_twin(make_shadow, N_OPS, seed, **case)
    core = twin.sam.cache.tree_core
    assert core.n_mismatches == 0
    assert twin.n_host_ops > N_OPS / 30 or hicache == "off"


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_write_policy_may_change_under_way(make_shadow, page_size):
    """As when storage is attached with another policy; redundant copies keep their turn."""
    from harness_shadow import run_twin

    case = {"hicache": "write_through", "page_size": page_size, "host_ratio": 1.2}
    twin = run_twin(make_shadow, N_OPS, f"switch{page_size}", switches=True, **case)
    assert twin.sam.cache.tree_core.n_mismatches == 0
