"""What one more row costs on this processor: our product of few rows beside torch's."""

from __future__ import annotations

from vllm_medusa.doctor.finding import Finding

OUTPUTS, INPUTS, ROWS = 3072, 576, 8  # a matrix of a small model


def check_product() -> Finding:
    """Whether rows of a tree share a read of the weights here, and by whose product."""
    import torch
    from torch.nn import functional

    from vllm_medusa.linear.measure import compare
    from vllm_medusa.linear.operator import linear

    if linear() is None:
        detail = "vLLM's products serve; ours, which reads each weight once for all rows of a step, cannot be built"
        return Finding("linear layers", "note", detail, "see the line on tree attention for what is missing")
    weight = torch.randn(OUTPUTS, INPUTS).bfloat16()
    found = compare(weight, lambda copy: lambda rows: functional.linear(rows, copy))

    def milliseconds(seconds: dict[int, float]) -> str:
        return f"{seconds[1] * 1e3:.2f} ms for one row and {seconds[ROWS] * 1e3:.2f} for {ROWS}"

    return Finding(
        "linear layers",
        "ok",
        f"our product takes {milliseconds(found.own)}, torch's {milliseconds(found.other)} ({OUTPUTS} × {INPUTS}, "
        "bfloat16); ours serves where it is quicker than vLLM's, measured at start-up",
    )
