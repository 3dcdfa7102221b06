"""The CPU attention backend computes what SGLang's `torch_native` computes, in float32."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from sam.platform import attention, shims
from sam.platform.attention import CausalMask, Gather, SamCpuAttnBackend, make_plan

CONTEXT = 1024
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}

pytestmark = pytest.mark.skipif(
    not shims.is_active(), reason="an accelerator is present: the CPU platform is not active"
)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Batch:
    """Random requests in real pools, and both backends on them."""

    def __init__(self, seed, *, heads, kv_heads, head_dim, page_size, lengths, extends=None):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.lengths = lengths
        self.extends = extends or [1] * len(lengths)
        pages = [-(-n // page_size) for n in lengths]
        capacity = (sum(pages) + 3) * page_size
        self.kv = MHATokenToKVPool(
            size=capacity,
            page_size=page_size,
            dtype=torch.float32,
            head_num=kv_heads,
            head_dim=head_dim,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        self.kv.k_buffer[0].normal_()
        self.kv.v_buffer[0].normal_()
        self.reqs = ReqToTokenPool(len(lengths), CONTEXT, "cpu", False)
        free = list(range(1, capacity // page_size + 1))
        if rng.random() < 0.7:
            rng.shuffle(free)
        self.rows = rng.sample(range(1, len(lengths) + 1), len(lengths))
        out = []
        for row, length, extend, count in zip(self.rows, lengths, self.extends, pages, strict=True):
            mine = [free.pop(0) for _ in range(count)]
            slots = [p * page_size + i for p in mine for i in range(page_size)][:length]
            self.reqs.req_to_token[row, :length] = torch.tensor(slots, dtype=torch.int32)
            out += slots[length - extend :]
        self.out_slots = torch.tensor(out)
        self.layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=heads,
            tp_k_head_num=kv_heads,
            tp_v_head_num=kv_heads,
            qk_head_dim=head_dim,
            v_head_dim=head_dim,
            head_dim=head_dim,
            scaling=head_dim**-0.5,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            sliding_window_size=None,
            k_scale=None,
            v_scale=None,
        )
        tokens = sum(self.extends)
        self.q = torch.randn(tokens, heads * head_dim)
        self.k = torch.randn(tokens, kv_heads, head_dim)
        self.v = torch.randn(tokens, kv_heads, head_dim)

    def forward_batch(self, picked=None):
        picked = range(len(self.lengths)) if picked is None else picked
        lengths = torch.tensor([self.lengths[i] for i in picked])
        extends = torch.tensor([self.extends[i] for i in picked])
        return SimpleNamespace(
            req_pool_indices=torch.tensor([self.rows[i] for i in picked]),
            seq_lens=lengths,
            extend_seq_lens=extends,
            extend_prefix_lens=lengths - extends,
            out_cache_loc=self.out_slots,
            encoder_lens=None,
            encoder_out_cache_loc=None,
        )

    def backend(self, cls):
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=self.reqs, token_to_kv_pool=self.kv
        )
        return cls(runner)

    def run(self, cls, mode):
        backend, forward_batch = self.backend(cls), self.forward_batch()
        backend.init_forward_metadata(forward_batch)
        forward = getattr(backend, f"forward_{mode}")
        return forward(self.q.clone(), self.k, self.v, self.layer, forward_batch)

    def assert_same(self, mode):
        stock, ours = self.run(TorchNativeAttnBackend, mode), self.run(SamCpuAttnBackend, mode)
        assert ours.shape == stock.shape
        torch.testing.assert_close(ours, stock, **TOLERANCE)


SHAPES = [(4, 4, 16), (8, 4, 64), (8, 2, 32), (6, 1, 16), (7, 7, 80)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_extend_equals_stock(seed, shape, page_size):
    rng = random.Random(1000 * seed + page_size)
    lengths = [rng.choice([1, 2, 17, 64, rng.randint(1, 700)]) for _ in range(rng.randint(1, 5))]
    extends = [rng.choice([1, n, rng.randint(1, n)]) for n in lengths]
    heads, kv_heads, head_dim = shape
    Batch(
        seed,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        lengths=lengths,
        extends=extends,
    ).assert_same("extend")


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_decode_equals_stock(seed, shape, page_size):
    rng = random.Random(2000 * seed + page_size)
    lengths = [rng.choice([1, 16, 33, rng.randint(1, 900)]) for _ in range(rng.randint(1, 8))]
    heads, kv_heads, head_dim = shape
    Batch(
        seed,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        lengths=lengths,
    ).assert_same("decode")


def test_extend_longer_than_one_query_block():
    rows = 2 * attention.QUERY_BLOCK + 37
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 16}
    Batch(3, lengths=[rows + 100, rows], extends=[rows, rows], **shape).assert_same("extend")


def test_encoder_only_layer_sees_the_future():
    batch = Batch(5, heads=4, kv_heads=2, head_dim=16, page_size=1, lengths=[20, 9], extends=[7, 9])
    batch.layer.attn_type = AttentionType.ENCODER_ONLY
    batch.assert_same("extend")


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_sliding_window_stays_with_stock(mode):
    extends = [30, 5] if mode == "extend" else None
    batch = Batch(
        6, heads=4, kv_heads=2, head_dim=16, page_size=1, lengths=[50, 12], extends=extends
    )
    batch.layer.sliding_window_size = 8
    batch.assert_same(mode)


def test_result_does_not_depend_on_the_batch():
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 32, "page_size": 1}
    batch = Batch(7, lengths=[300, 5, 511, 64], **shape)
    together = batch.run(SamCpuAttnBackend, "decode")
    for i in range(4):
        backend, one = batch.backend(SamCpuAttnBackend), batch.forward_batch([i])
        backend.init_forward_metadata(one)
        alone = backend.forward_decode(
            batch.q[i : i + 1], None, None, batch.layer, one, save_kv_cache=False
        )
        assert torch.equal(alone[0], together[i])


def test_bfloat16_cache_with_float32_query():
    batch = Batch(8, heads=4, kv_heads=2, head_dim=16, page_size=1, lengths=[33, 8], extends=[4, 8])
    for buffers in (batch.kv.k_buffer, batch.kv.v_buffer):
        buffers[0] = buffers[0].bfloat16()
    batch.kv.dtype = batch.kv.store_dtype = torch.bfloat16
    batch.assert_same("extend")


def test_consecutive_slots_are_read_in_place():
    table = torch.zeros((3, 8), dtype=torch.int32)
    table[1, :4] = torch.tensor([5, 6, 7, 8])
    table[2, :3] = torch.tensor([9, 11, 10])
    run, scattered = make_plan(table, torch.tensor([1, 2]), torch.tensor([4, 3])).requests
    assert (run.run_start, scattered.run_start) == (5, None)
    cache, gather = torch.arange(40.0).reshape(20, 1, 2), Gather()
    assert gather(cache, run, torch.float32).data_ptr() == cache[5].data_ptr()
    assert torch.equal(gather(cache, scattered, torch.float32), cache[[9, 11, 10]])
    assert gather(cache, scattered, torch.bfloat16).dtype == torch.bfloat16


def test_new_forward_makes_a_new_plan():
    batch = Batch(9, heads=2, kv_heads=2, head_dim=16, page_size=1, lengths=[10])
    backend, forward_batch = batch.backend(SamCpuAttnBackend), batch.forward_batch()
    for length in (10, 4):
        forward_batch.seq_lens[0] = length
        backend.init_forward_metadata(forward_batch)
        backend.forward_decode(batch.q, None, None, batch.layer, forward_batch, False)
        assert [r.slots.numel() for r in backend._plan.requests] == [length]


@pytest.mark.parametrize(("rows", "prefix"), [(1, 0), (3, 5), (256, 2000), (2, 4000), (5, 0)])
def test_causal_mask_is_lower_right(rows, prefix):
    mask = CausalMask()
    mask.view(4, 10, torch.float32, "cpu")
    seen = mask.view(rows, prefix, torch.float32, "cpu")
    expected = torch.ones(rows, prefix + rows, dtype=torch.bool).tril_(prefix)
    assert torch.equal(seen == 0, expected)
    assert torch.equal(torch.isinf(seen), ~expected)
