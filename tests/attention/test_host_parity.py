"""A chain is ordinary causal attention: there our kernels must agree with the host's own."""

from __future__ import annotations

import pytest
import torch
from steps import Step
from test_attention import needs, tolerance
from torch import Tensor

from vllm_medusa.attention.cpu import Kernel
from vllm_medusa.tree.topology import Tree


def host_attention(step: Step, sliding_window: int = -1, softcap: float = 0.0) -> Tensor:
    """The host's causal kernel on the same cache."""
    from vllm import _custom_ops as ops

    key_cache, value_cache, table = step.store(unused=0.0)  # the host's kernel reads beyond the last token
    starts = step.query_start_loc.to(torch.int32)
    lengths = torch.tensor([len(keys) for keys in step.keys], dtype=torch.int32)
    _, heads, head_size = step.query.shape
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=heads,
        num_kv_heads=key_cache.shape[1],
        head_dim=head_size,
        seq_lens=lengths,
        dtype=step.query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=sliding_window,
        isa=step.isa,
        enable_kv_split=True,
    )
    out = torch.empty_like(step.query)
    ops.cpu_attention_with_kv_cache(
        query=step.query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=out,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=head_size**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=sliding_window,
        block_table=table,
        softcap=softcap,
        scheduler_metadata=metadata,
        s_aux=None,
    )
    return out


@pytest.mark.parametrize("options", [{}, {"sliding_window": 1}, {"sliding_window": 40}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "isa", "block_size"),
    [(torch.float32, "vec", 128), (torch.bfloat16, "amx", 128), (torch.bfloat16, "vec", 32)],
    ids=str,
)
def test_chains(dtype: torch.dtype, isa: str, block_size: int, options: dict[str, float], kernel: Kernel) -> None:
    needs(isa)
    step = Step.random(
        [Tree.chain(8), Tree.chain(1), Tree.chain(63), Tree(())],
        [70, 0, 500, 127],
        dtype=dtype,
        isa=isa,
        block_size=block_size,
    )
    host = host_attention(step, **options)
    ours = step.run(kernel=kernel, **options)
    # Each may be off by its own share.
    allowed = 2 * tolerance(step, **options)
    assert ((ours.double() - host.double()).abs() <= allowed).all()
