"""What a step has room for beside the tokens that plain decoding would compute in it: so much may be drafted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any


class DraftRoom:
    """Cuts drafts before vLLM plans a step, so that they take from nobody.

    vLLM's scheduler lets the drafts of requests that run first take what others need: tokens of the step, and blocks of
    the cache, for which it then preempts. So drafts are cut first, each to a prefix, those of most nodes most:

    - A request that decodes has its token in any case, and so has whoever comes before one of them.
    - A prompt that fits into what is left has all of it. Longer ones have at least half of it in each step, and are
      never more than half a step behind plain decoding; so every prompt takes at most one step more.
    - Blocks that running requests or the first of the waiting need are not for drafts.
    """

    def __init__(self, scheduler: Any) -> None:
        """Watch a scheduler of vLLM's, of either kind."""
        self._scheduler = scheduler
        self._behind = 0  # prompt tokens that plain decoding would have computed by now
        self._held: str | None = None  # the first of the waiting, if tokens are not what it waits for

    def cut_drafts(self) -> None:
        """Before a step is planned: cut what running requests have drafted."""
        scheduler = self._scheduler
        drafted = [request for request in scheduler.running if request.spec_token_ids]
        waiting = self._waiting()
        prompts, room, spare = self._token_room(waiting)
        sizes = [len(request.spec_token_ids) for request in drafted]
        level = even_level(sizes, room)
        used = sum(min(size, level) for size in sizes)
        self._behind = min(self._behind + max(0, used - spare), prompts)
        if not drafted:
            return
        own = not self._blocks_suffice(waiting, level)
        for request in drafted:
            size = min(level, self._room_in_own_blocks(request)) if own else level
            if len(request.spec_token_ids) > size:
                request.spec_token_ids = request.spec_token_ids[:size]

    def look_at(self, plan: Any) -> None:
        """After it: is the first of the waiting held by something else than this step's tokens, such as blocks?"""
        waiting = self._waiting()
        held = bool(waiting) and plan.total_num_scheduled_tokens < self._budget
        self._held = waiting[0].request_id if held else None

    @property
    def _budget(self) -> int:
        config = self._scheduler.scheduler_config
        return int(min(self._scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens))

    def _waiting(self) -> list[Any]:
        """Requests for which there are seats."""
        scheduler = self._scheduler
        seats = scheduler.max_num_active_reqs - len(scheduler.running) - scheduler.num_waiting_for_streaming_input
        return list(islice(chain(scheduler.kv_holding_waiting, scheduler.waiting), max(seats, 0)))

    def _token_room(self, waiting: Sequence[Any]) -> tuple[int, int, int]:
        """Prompt tokens to be computed, tokens that drafts may take, and how many of these nobody else could use."""
        scheduler, most = self._scheduler, self._most_of_a_prompt()
        strict = now = prompts = 0
        for request in scheduler.running:
            owed = _owed(request)
            now += min(owed, most)
            if owed > 1:
                prompts += owed
            else:
                strict = now
        if waiting and waiting[0].request_id == self._held:
            now, prompts = now + 1, prompts + 1  # so that it is tried again
        else:
            for request in waiting:
                asked = max(1, request.num_tokens - request.num_computed_tokens)
                now, prompts = now + min(asked, most), prompts + asked
        left = max(0, self._budget - strict)
        spare = max(0, self._budget - now)
        self._behind = min(self._behind, prompts)
        return prompts, min(max(spare, left // 2), spare + max(0, left // 2 - self._behind)), spare

    def _most_of_a_prompt(self) -> int:
        """Tokens that one prompt may have of a step."""
        scheduler, budget = self._scheduler, self._budget
        most = scheduler.scheduler_config.long_prefill_token_threshold
        if most > 0 and getattr(scheduler, "adaptive_long_prefill_threshold", False):
            most = max(most, budget // max(1, sum(scheduler.get_request_counts())))
        return int(most) if most > 0 else budget

    def _blocks_suffice(self, waiting: Sequence[Any], level: int) -> bool:
        """Whether drafts of at most `level` nodes leave all the blocks that plain decoding would take in this step."""
        scheduler, needed = self._scheduler, 0
        for manager in self._managers():
            for request in scheduler.running:
                tokens = request.num_computed_tokens + _owed(request) + min(level, len(request.spec_token_ids))
                has = len(manager.req_to_blocks.get(request.request_id, ()))
                needed += max(0, _blocks(min(tokens, scheduler.max_model_len), manager) - has)
            needed += _blocks(waiting[0].num_tokens, manager) if waiting else 0
        return bool(needed <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _room_in_own_blocks(self, request: Any) -> int:
        """Nodes of a request that lie in blocks which it has, or needs anyway."""
        tokens = request.num_computed_tokens + _owed(request)
        # Planned before these nodes have failed, the next step puts its root behind them.
        ahead = int(self._scheduler.scheduler_config.async_scheduling)
        rooms = (
            max(len(manager.req_to_blocks.get(request.request_id, ())), _blocks(tokens, manager)) * manager.block_size
            - tokens
            for manager in self._managers()
        )
        return max(0, min(rooms) - ahead)

    def _managers(self) -> Sequence[Any]:
        """Who keeps each group's blocks."""
        managers: Sequence[Any] = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        return managers


def even_level(sizes: Sequence[int], room: int) -> int:
    """The most that each may have so that all of them together, none more than its size, have at most `room`.

    >>> even_level([31, 31, 2], 20), even_level([3, 2], 20), even_level([3, 2], 1)
    (9, 3, 0)
    """
    level, left = 0, room
    for place, size in enumerate(ordered := sorted(sizes)):
        among = len(ordered) - place
        if (size - level) * among > left:
            return level + left // among
        left -= (size - level) * among
        level = size
    return level


def _owed(request: Any) -> int:
    """Tokens of a running request that are known and not computed yet: 1 while it decodes."""
    return max(0, int(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens))


def _blocks(tokens: int, manager: Any) -> int:
    """Blocks of one group in which so many tokens lie."""
    return -(-tokens // int(manager.block_size))
