"""CPU attention that pays only for what it computes.

Owns: the scaled-dot-product part of the `sam_cpu` attention backend. Must never change what is
computed: outputs equal those of SGLang's `torch_native` backend (float32, up to rounding), and
each request's result does not depend on the other requests of the batch. Cross attention,
encoder lengths and sliding windows stay with the stock implementation.

Two things differ from `torch_native`. In extend the query keeps its own length (upstream pads it
to prefix + query, so that a cache hit costs almost a recompute). And the slots of a request's KV
are looked up once per forward, not once per layer and request.
"""

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 256


@dataclass(frozen=True)
class RequestKv:
    """Where one request's KV lies: `slots` [len]; `run_start` if they are consecutive."""

    slots: torch.Tensor
    run_start: int | None


@dataclass(frozen=True)
class KvPlan:
    """Where the KV of a batch lies, one entry per request. Valid for one forward."""

    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    requests: list[RequestKv]

    def serves(self, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor) -> bool:
        """Whether the plan was made from these very tensors."""
        return self.seq_lens is seq_lens and self.req_pool_indices is req_pool_indices


def make_plan(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> KvPlan:
    """Plan for requests `req_pool_indices` [b] with KV lengths `seq_lens` [b].

    `req_to_token` [requests, context] holds each request's token slots.
    """
    requests = []
    for row, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        slots = req_to_token[row, :length]
        requests.append(RequestKv(slots, _run_start(slots)))
    return KvPlan(seq_lens, req_pool_indices, requests)


def _run_start(slots: torch.Tensor) -> int | None:
    if slots.numel() == 0:
        return None
    first, last = int(slots[0]), int(slots[-1])
    if last - first != slots.numel() - 1:
        return None
    return first if bool((slots[1:] - slots[:-1] == 1).all()) else None


class Gather:
    """Rows of a cache, through one buffer that every layer and request uses again.

    Request by request, so that the rows are still in the CPU's cache when they are used: gathering
    a whole batch first costs more than it saves.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def __call__(self, cache: torch.Tensor, where: RequestKv, dtype: torch.dtype) -> torch.Tensor:
        """Rows [len, heads, dim] as `dtype`; valid until the next call."""
        length = where.slots.numel()
        if where.run_start is not None:
            return cache.narrow(0, where.run_start, length).to(dtype)
        buffer, width = self._buffer, cache.shape[1] * cache.shape[2]
        if buffer.numel() < length * width or buffer.dtype != cache.dtype:
            self._buffer = buffer = cache.new_empty(length * width * 5 // 4)
        rows = buffer[: length * width].view(length, *cache.shape[1:])
        torch.index_select(cache, 0, where.slots, out=rows)
        return rows.to(dtype)


class CausalMask:
    """Additive lower-right causal masks of any size, as views of one growing tensor."""

    def __init__(self) -> None:
        self._mask = torch.empty(0)
        self._prefix = -1

    def view(self, rows: int, prefix: int, dtype: torch.dtype, device) -> torch.Tensor:
        """Mask [rows, prefix + rows]: row r sees columns up to prefix + r."""
        if rows > QUERY_BLOCK:
            raise ValueError(f"mask of {rows} rows asked, at most {QUERY_BLOCK}")
        mask = self._mask
        if prefix > self._prefix or mask.dtype != dtype or mask.device != torch.device(device):
            self._prefix = max(prefix, self._prefix, 1023) * 5 // 4
            shape = (QUERY_BLOCK, self._prefix + QUERY_BLOCK)
            full = torch.full(shape, float("-inf"), dtype=dtype, device=device)
            self._mask = mask = full.triu_(diagonal=self._prefix + 1)
        first = self._prefix - prefix
        return mask[:rows, first : self._prefix + rows]


class SamCpuAttnBackend(TorchNativeAttnBackend):
    """`torch_native` with its two inner functions replaced (names fixed by SGLang 0.5.23)."""

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self._plan: KvPlan | None = None
        self._mask = CausalMask()
        self._keys, self._values = Gather(), Gather()

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan = None

    def _plan_for(self, req_to_token, req_pool_indices, seq_lens) -> KvPlan:
        plan = self._plan
        if plan is None or not plan.serves(seq_lens, req_pool_indices):
            self._plan = plan = make_plan(req_to_token, req_pool_indices, seq_lens)
        return plan

    def _run_sdpa_forward_extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_prefix_lens,
        extend_seq_lens,
        encoder_lens=None,
        scaling=None,
        enable_gqa=False,
        causal=False,
        is_cross_attn=False,
        sliding_window_size=None,
    ):
        """Fill `output` [tokens, heads, v_dim] from `query` [tokens, heads, dim].

        Caches are [slots, kv_heads, dim]; the lengths are [requests].
        """
        if _stock_only(encoder_lens, is_cross_attn, sliding_window_size):
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens, scaling=scaling,
                enable_gqa=enable_gqa, causal=causal, is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )  # fmt: skip
        plan, start = self._plan_for(req_to_token, req_pool_indices, seq_lens), 0
        for where, rows in zip(plan.requests, extend_seq_lens.tolist(), strict=True):
            end = start + rows
            key, value = self._kv_of(where, k_cache, v_cache, query.dtype)
            self._extend_one(query[start:end], output[start:end], key, value, scaling, causal)
            start = end
        return output

    def _kv_of(self, where: RequestKv, k_cache, v_cache, dtype) -> tuple:
        """Keys and values of one request, [kv_heads, 1, len, dim] each."""
        keys, values = self._keys(k_cache, where, dtype), self._values(v_cache, where, dtype)
        return keys.transpose(0, 1).unsqueeze(1), values.transpose(0, 1).unsqueeze(1)

    def _extend_one(self, query, output, key, value, scaling, causal) -> None:
        """One request: `query` [n, heads, dim], `key` [kv_heads, 1, len, dim], `value` alike."""
        rows, length = query.shape[0], key.shape[2]
        prefix = length - rows
        if rows == 0:
            return
        if not causal or rows == 1 or prefix == 0:
            _sdpa(query, output, key, value, scaling, is_causal=causal and rows > 1)
            return
        for start in range(0, rows, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, rows)
            seen = prefix + end
            mask = self._mask.view(end - start, prefix + start, query.dtype, query.device)
            block_key, block_value = key[:, :, :seen], value[:, :, :seen]
            _sdpa(query[start:end], output[start:end], block_key, block_value, scaling, mask)

    def _run_sdpa_forward_decode(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        encoder_lens=None,
        scaling=None,
        enable_gqa=False,
        causal=False,
        is_cross_attn=False,
        sliding_window_size=None,
    ):
        """Fill `output` [requests, heads, v_dim] from `query` [requests, heads, dim]."""
        if _stock_only(encoder_lens, is_cross_attn, sliding_window_size):
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                encoder_lens, scaling=scaling, enable_gqa=enable_gqa, causal=causal,
                is_cross_attn=is_cross_attn, sliding_window_size=sliding_window_size,
            )  # fmt: skip
        plan = self._plan_for(req_to_token, req_pool_indices, seq_lens)
        for i, where in enumerate(plan.requests):
            key, value = self._kv_of(where, k_cache, v_cache, query.dtype)
            _sdpa_single(query[i], output[i], key, value, scaling)
        return output


def _stock_only(encoder_lens, is_cross_attn: bool, sliding_window_size: int | None) -> bool:
    windowed = sliding_window_size is not None and sliding_window_size > -1
    return encoder_lens is not None or is_cross_attn or windowed


def _sdpa(query, output, key, value, scaling, mask=None, is_causal=False) -> None:
    """Attention of `query` [n, heads, dim]; a KV head serves its group without being copied."""
    kv_heads = key.shape[0]
    group = query.shape[1] // kv_heads
    grouped = query.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    out = scaled_dot_product_attention(
        grouped,
        key.expand(-1, group, -1, -1),
        value.expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
    )
    output.unflatten(1, (kv_heads, group)).copy_(out.permute(2, 0, 1, 3))


def _sdpa_single(query, output, key, value, scaling) -> None:
    """Attention of one token `query` [heads, dim]: the group of a KV head is its query length."""
    grouped = query.unflatten(0, (key.shape[0], -1)).unsqueeze(1)
    out = scaled_dot_product_attention(grouped, key, value, scale=scaling)
    output.copy_(out.flatten(0, 2))
