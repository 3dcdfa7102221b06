"""KV copies between the device pool and the HiCache host pool, in plain torch.

Owns: CPU replacements for the `direct` transfer operators that SGLang takes from CUDA kernels
(`sgl_kernel.kvcacheio`), same names, same keyword arguments. Must never touch cache state: it
moves rows between the tensors it is handed, exactly, whatever their dtype.

Shapes: a *layer* tensor is `[tokens, heads, dim]`; a *page-first* host tensor is
`[pages, layers, page_size, heads, dim]`. Indices are token slots, one per row to move.
"""

from collections.abc import Sequence

import torch


def transfer_kv_direct(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows `src_indices` of each source layer to rows `dst_indices` of its destination.

    `page_size` is part of upstream's contract; rows are moved one by one, so any alignment works.
    """
    _check_lengths(src_indices, dst_indices)
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst.index_copy_(0, dst_indices, src.index_select(0, src_indices))


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Load one layer: page-first host tensors (e.g. K and V) into layer tensors."""
    _check_lengths(src_indices, dst_indices)
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        rows, base = _page_first_rows(host, src_indices, page_size)
        device.index_copy_(0, dst_indices, rows.index_select(0, base + layer_id * page_size))


def transfer_kv_all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Back up all layers: layer tensors into page-first host tensors.

    `src_ptrs` holds the layers of the first host tensor, then those of the second, and so on.
    """
    _check_lengths(src_indices, dst_indices)
    layers = len(src_ptrs) // len(dst_ptrs)
    if layers * len(dst_ptrs) != len(src_ptrs):
        raise ValueError(
            f"{len(src_ptrs)} layer tensors do not divide among {len(dst_ptrs)} host tensors"
        )
    for part, host in enumerate(dst_ptrs):
        rows, base = _page_first_rows(host, dst_indices, page_size)
        for layer_id in range(layers):
            layer = src_ptrs[part * layers + layer_id]
            rows.index_copy_(0, base + layer_id * page_size, layer.index_select(0, src_indices))


def _page_first_rows(
    host: torch.Tensor, indices: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`host` as one row per (page, layer, slot), and the rows of `indices` in layer 0."""
    layers = host.shape[1]
    if host.shape[2] != page_size:
        raise ValueError(f"host pages hold {host.shape[2]} tokens, transfer says {page_size}")
    pages = torch.div(indices, page_size, rounding_mode="floor")
    base = pages * (layers * page_size) + (indices - pages * page_size)
    return host.view(-1, *host.shape[3:]), base


def _check_lengths(src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
    if src_indices.shape != dst_indices.shape:
        raise ValueError(f"{tuple(src_indices.shape)} rows to {tuple(dst_indices.shape)} slots")
