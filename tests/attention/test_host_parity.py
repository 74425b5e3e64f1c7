"""A chain is ordinary causal attention: there our kernels must agree with the host's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import FLOAT8, SCALES, Step, float8_step, float8_writer
from test_attention import needs, tolerance
from torch import Tensor

from vllm_medusa.attention.cpu import Kernel, learn_layout
from vllm_medusa.attention.inputs import LayerInputs
from vllm_medusa.tree.topology import Tree


def host_attention(
    step: Step,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kind: str = "auto",
    caches: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """The host's causal kernel on the same cache."""
    from vllm import _custom_ops as ops

    # The host's kernel reads beyond the last token.
    key_cache, value_cache, table = caches or step.store(unused=0.0)
    scales = {} if kind == "auto" else {"k_scale": SCALES[0], "v_scale": SCALES[1], "kv_cache_dtype": kind}
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
        kv_cache_dtype=kind,
    )
    out = torch.empty_like(step.query)
    ops.cpu_attention_with_kv_cache(
        query=step.query,
        key_cache=key_cache if kind == "auto" else key_cache.view(torch.uint8),
        value_cache=value_cache if kind == "auto" else value_cache.view(torch.uint8),
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
        s_aux=sinks,
        **scales,
    )
    return out


SINKS = torch.tensor([0.0, 2.0, -3.0, 5.0, -80.0, 9.0, 60.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 1}, {"sliding_window": 40}, {"softcap": 3.0}, {"sinks": SINKS, "sliding_window": 40}],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize(
    ("dtype", "isa", "block_size"),
    [(torch.float32, "vec", 128), (torch.bfloat16, "amx", 128), (torch.bfloat16, "vec", 32)],
    ids=str,
)
def test_chains(dtype: torch.dtype, isa: str, block_size: int, options: dict[str, Any], kernel: Kernel) -> None:
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


@pytest.mark.parametrize("kind", FLOAT8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chains_over_float8(dtype: torch.dtype, kind: str, kernel: Kernel) -> None:
    needs("avx512")
    trees = [Tree.chain(8), Tree.chain(63), Tree(())]
    step, caches = float8_step(trees, [70, 300, 127], dtype, kind)
    host = host_attention(step, kind=kind, caches=caches)
    layout = learn_layout(float8_writer(step.isa, kind), step.block_size, 64, FLOAT8[kind], dtype)
    plan = step.plan(caches[2], kernel=kernel, layout=layout)
    ours = plan.run(step.query, *caches[:2], torch.empty_like(step.query), LayerInputs(None, *SCALES))
    assert ((ours.double() - host.double()).abs() <= 2 * tolerance(step)).all()
