"""The CPU platform and its HiCache shims: what is set, and that transfers move every bit."""

import random
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base, common, mha, mla

from sam.platform import cpu, shims, transfers

LAYERS, HEADS, DIM = 3, 2, 16
LAYOUTS = ("layer_first", "page_first_direct")

needs_platform = pytest.mark.skipif(
    not shims.is_active(), reason="an accelerator is present: the CPU platform is not active"
)


@pytest.fixture(scope="module", autouse=True)
def installed():
    shims.install()


def make_pools(layout, page_size, dtype=torch.float32):
    device = MHATokenToKVPool(
        size=16 * page_size,
        page_size=page_size,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    host = mha.MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        host_to_device_ratio=2,
        host_size=0,
        page_size=page_size,
        layout=layout,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
    )
    for buffer in (*device.k_buffer, *device.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    return device, host


def random_slots(rng, capacity, page_size, pages):
    picked = rng.sample(range(1, capacity // page_size), pages)
    return torch.tensor([p * page_size + i for p in picked for i in range(page_size)])


def rows(device, slots):
    return [b[slots].clone() for b in (*device.k_buffer, *device.v_buffer)]


@needs_platform
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backup_and_load_are_exact(layout, page_size, dtype):
    rng = random.Random(page_size)
    device, host = make_pools(layout, page_size, dtype)
    source = random_slots(rng, device.size, page_size, 5)
    target = random_slots(rng, device.size, page_size, 5)
    host_slots = random_slots(rng, host.size, page_size, 5)
    kept = rows(device, source)
    host.backup_from_device_all_layer(device, host_slots, source, "direct")
    for buffer in (*device.k_buffer, *device.v_buffer):
        buffer.zero_()
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, host_slots, target, layer, "direct")
    for got, want in zip(rows(device, target), kept, strict=True):
        assert torch.equal(got, want)
    untouched = sorted(set(range(device.size)) - set(target.tolist()))
    assert all(bool((b[untouched] == 0).all()) for b in device.k_buffer)


@needs_platform
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_storage_pages_are_exact(layout, page_size):
    """What an L3 backend reads and writes: flat pages, through the unpinned dummy page."""
    device, host = make_pools(layout, page_size)
    source = torch.arange(page_size, 3 * page_size)
    host.backup_from_device_all_layer(device, source, source, "direct")
    pages = [host.get_data_page(i * page_size, flat=True).clone() for i in (1, 2)]
    for i, page in zip((4, 3), pages, strict=True):
        buffer = host.get_dummy_flat_data_page()
        buffer.copy_(page)
        host.set_from_flat_data_page(i * page_size, buffer)
    loaded = torch.cat([torch.arange(i * page_size, (i + 1) * page_size) for i in (4, 3)])
    target = torch.arange(8 * page_size, 10 * page_size)
    kept = rows(device, source)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, loaded, target, layer, "direct")
    for got, want in zip(rows(device, target), kept, strict=True):
        assert torch.equal(got, want)


@needs_platform
def test_host_pools_are_not_pinned():
    _, host = make_pools("layer_first", 1)
    assert host.pin_memory is False
    assert not host.kv_buffer.is_pinned()
    assert common.ALLOC_MEMORY_FUNCS["cpu"] is shims.alloc_unpinned
    assert base.HICACHE_HOST_MEMORY_RESERVE_BYTES == shims.HOST_RESERVE_BYTES


@needs_platform
def test_kernel_transfers_say_what_to_do():
    device, host = make_pools("layer_first", 1)
    slots = torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match="--hicache-io-backend direct"):
        host.backup_from_device_all_layer(device, slots, slots, "kernel")


@needs_platform
def test_streams_can_be_synchronized():
    assert torch.cpu.Stream().synchronize() is None


@needs_platform
def test_direct_operators_are_ours():
    for module in (mha, mla):
        assert module.transfer_kv_direct is transfers.transfer_kv_direct
    assert shims.install() is True


@needs_platform
def test_attention_backend_is_known():
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.platforms import current_platform

    assert current_platform.get_default_attention_backend() == cpu.ATTENTION_BACKEND
    assert ATTENTION_BACKEND_CHOICES.count(cpu.ATTENTION_BACKEND) == 1
    assert cpu.ATTENTION_BACKEND in ATTENTION_BACKENDS


def test_mla_pages_are_exact():
    """One latent buffer per layer, as the MLA host pool hands it over."""
    page, width = 4, 24
    layers = [torch.randn(8 * page, 1, width) for _ in range(LAYERS)]
    host = torch.zeros(6, LAYERS, page, 1, width)
    source, slots = torch.arange(4, 12), torch.tensor([20, 21, 22, 23, 8, 9, 10, 11])
    transfers.transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=layers, dst_ptrs=[host], src_indices=source, dst_indices=slots, page_size=page
    )
    for i, layer in enumerate(layers):
        out = torch.zeros_like(layer)
        transfers.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=[host], dst_ptrs=[out], src_indices=slots, dst_indices=source,
            layer_id=i, page_size=page,
        )  # fmt: skip
        assert torch.equal(out[source], layer[source])


def test_bad_transfers_are_refused():
    layer, host = torch.zeros(8, 1, 4), torch.zeros(2, 1, 4, 1, 4)
    one, two = torch.tensor([1]), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="slots"):
        transfers.transfer_kv_direct(
            src_layers=[layer],
            dst_layers=[layer],
            src_indices=one,
            dst_indices=two,
            page_size=1,
        )
    with pytest.raises(ValueError, match="pages hold 4"):
        transfers.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=[host], dst_ptrs=[layer], src_indices=one, dst_indices=one,
            layer_id=0, page_size=2,
        )  # fmt: skip


def test_missing_upstream_symbol_is_named():
    with pytest.raises(shims.ShimTargetMissing, match=r"common\.NO_SUCH.*sglang==0\.5\.23"):
        shims._require(common, "NO_SUCH")


@pytest.mark.parametrize("accelerator", ["cuda", "npu"])
def test_never_competes_with_an_accelerator(monkeypatch, accelerator):
    monkeypatch.setattr(cpu, "find_accelerator", lambda: accelerator)
    assert cpu.activate() is None


def test_leaves_the_in_tree_cpu_engine_alone(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu.activate() is None


def test_probe_finds_plugged_in_devices(monkeypatch):
    class Npu:
        @staticmethod
        def is_available():
            return True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    assert cpu.find_accelerator() == "npu"


@needs_platform
@pytest.mark.parametrize(
    "first", ["sam.platform.cpu", "sam.platform.shims", "sam.platform.attention", "sglang"]
)
def test_platform_is_found_whatever_is_imported_first(first):
    code = f"import {first}; from sam.platform import shims; assert shims.is_active()"
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "Failed to load plugin sam_cpu" not in result.stderr


def test_entry_point_does_not_import_sglang():
    code = "import sys, sam.platform.cpu as c; c.activate(); assert 'sglang' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
