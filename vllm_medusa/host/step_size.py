"""The size of steps that compute prompts beside drafts."""

from __future__ import annotations

from typing import Any

EVEN = 16  # tokens


def even_out(plan: Any) -> None:
    """Cut the drafts of a step that also computes prompts so that its tokens are a multiple of EVEN.

    The host builds and keeps something, about a MiB on a CPU, for every number of tokens that it meets. Prompts come in
    all lengths, so drafts beside them would multiply the sizes met; cut, they make fewer than plain decoding has. Steps
    of decoding alone keep the size that the budget chose; drafts that are fewer than what is over stay as they are.

    Args:
        plan: the host's SchedulerOutput, before it is counted as computed. The longest drafts lose their last nodes,
            which are the least likely to be reached.
    """
    drafts, scheduled = plan.scheduled_spec_decode_tokens, plan.num_scheduled_tokens
    if all(count == 1 + len(drafts.get(name, ())) for name, count in scheduled.items()):
        return
    over = plan.total_num_scheduled_tokens % EVEN
    if over > sum(map(len, drafts.values())):
        return
    for _ in range(over):
        longest = max(drafts, key=lambda name: len(drafts[name]))
        drafts[longest] = drafts[longest][:-1]
        scheduled[longest] -= 1
    plan.total_num_scheduled_tokens -= over
    for name in [name for name, tokens in drafts.items() if not tokens]:
        del drafts[name]
