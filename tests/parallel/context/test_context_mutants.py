"""Faults that the comparison with fp64 must catch: each is injected, and must push a ratio over the limit."""

import pytest
import torch
from tests.parallel.context.comparison import Case, error_ratios
from tests.parallel.context.test_context_attention import FP32_LIMIT
from tests.ranks import ranks

from drumline.parallel.context import block, gather, partial, ring, ulysses
from drumline.parallel.context.split import ContextSplit
from drumline.parallel.context.tiles import Tile

RING, GATHER = Case("ring", 8, 2), Case("gather", 8, 2)
ULYSSES, BOTH = Case("ulysses", 8, 2, ulysses=4), Case("ring_ulysses", 8, 2, ulysses=2)
RING_DOCUMENTS, GATHER_DOCUMENTS = Case("ring", 8, 2, documents=True), Case("gather", 8, 2, documents=True)


def positions_start_at_zero(patch):
    patch(ContextSplit, "positions", lambda self, num_tokens, device: torch.arange(num_tokens // self.degree))


def positions_shifted_by_the_rank_s_offset(patch):
    def contiguous(self, num_tokens, device):
        held = num_tokens // self.degree
        return torch.arange(held) + self.rank * held

    patch(ContextSplit, "positions", contiguous)


def document_mask_shows_one_token_too_many(patch):
    patch(block, "is_seen", lambda d, tile, positions: positions[tile.columns] + 1 >= d.starts_BT[:, tile.rows, None])


def diagonal_is_hidden(patch):
    real = block.attend_part

    def late(q, k, v, mask, is_causal):
        if not is_causal:
            return real(q, k, v, mask, False)
        seen = torch.ones(q.shape[0], q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
        seen[:, 0, 0] = True
        return real(q, k, v, seen, False)

    patch(block, "attend_part", late)


def documents_hide_a_chunk_too_many(patch):
    real = block.visible_tiles

    def shorter(*arguments):
        return [
            t if t.is_causal else Tile(t.rows, slice(t.columns.start + 1, t.columns.stop), False, t.is_cut)
            for t in real(*arguments)
        ]

    patch(block, "visible_tiles", shorter)


def keys_come_the_other_way_round(patch):
    patch(ring, "origin_of", lambda rank, step, degree: (rank + step) % degree)


def gathered_chunks_stay_in_rank_order(patch):
    def unordered(kv, split, group):
        parts = [torch.empty_like(kv) for _ in range(split.degree)]
        torch.distributed.all_gather(parts, kv, group=group)
        return torch.cat(parts, 3)

    patch(gather, "gather_chunks", unordered)


def tokens_stay_in_rank_order_between_all_to_alls(patch):
    patch(ulysses, "unshard", lambda parts: torch.cat(list(parts), 1))


def key_heads_repeat_in_the_wrong_order(patch):
    patch(ulysses, "_copied", lambda x, copies: torch.cat([x] * copies, 2))


def gradient_of_keys_misses_the_last_hop(patch):
    real, calls = ring._pass_gradient, []

    def stays(grad_kv, split, group):
        calls.append(None)
        if len(calls) % split.degree:
            return real(grad_kv, split, group)
        return ring._passing(grad_kv, ContextSplit(1, 0), None, 1)

    patch(ring, "_pass_gradient", stays)


def gradient_of_keys_does_not_travel(patch):
    patch(ring, "_pass_gradient", lambda grad, split, group: ring._passing(grad, ContextSplit(1, 0), None, 1))


def gradient_of_gathered_keys_is_not_summed(patch):
    def own(whole, split, group):
        chunks = whole.tensor_split(2 * split.degree, 3)
        return torch.cat([chunks[c] for c in split.chunks], 3)

    patch(gather, "scatter_sum", own)


def merge_without_rescale(patch):
    def add(out, lse, part_out, part_lse):
        out.add_(part_out)
        torch.logaddexp(lse, part_lse, out=lse)

    patch(block, "merge_", add)


def merge_forgets_the_logsumexp(patch):
    real = block.merge_

    def half(out, lse, part_out, part_lse):
        real(out, lse.clone(), part_out, part_lse)
        torch.maximum(lse, part_lse, out=lse)

    patch(block, "merge_", half)


def a_row_that_sees_nothing_weighs_one(patch):
    patch(partial, "_sees_any", lambda mask, is_causal: torch.ones(mask.shape[:2], dtype=torch.bool))


def backward_takes_the_logsumexp_of_a_part(patch):
    real = block.attend_part_backward

    def local(grad, q, k, v, out, lse, mask, is_causal):
        return real(grad, q, k, v, out, block.attend_part(q, k, v, mask, is_causal)[1], mask, is_causal)

    patch(block, "attend_part_backward", local)


MUTANTS = [
    (positions_start_at_zero, RING),
    (positions_shifted_by_the_rank_s_offset, RING),
    (positions_shifted_by_the_rank_s_offset, GATHER),
    (positions_shifted_by_the_rank_s_offset, BOTH),
    (document_mask_shows_one_token_too_many, RING_DOCUMENTS),
    (document_mask_shows_one_token_too_many, GATHER_DOCUMENTS),
    (diagonal_is_hidden, RING),
    (documents_hide_a_chunk_too_many, RING_DOCUMENTS),
    (keys_come_the_other_way_round, RING),
    (gathered_chunks_stay_in_rank_order, GATHER),
    (tokens_stay_in_rank_order_between_all_to_alls, ULYSSES),
    (tokens_stay_in_rank_order_between_all_to_alls, BOTH),
    (key_heads_repeat_in_the_wrong_order, ULYSSES),
    (gradient_of_keys_misses_the_last_hop, RING),
    (gradient_of_keys_misses_the_last_hop, BOTH),
    (gradient_of_keys_does_not_travel, RING),
    (gradient_of_gathered_keys_is_not_summed, GATHER),
    (merge_without_rescale, RING),
    (merge_without_rescale, GATHER),
    (merge_forgets_the_logsumexp, RING),
    (a_row_that_sees_nothing_weighs_one, RING_DOCUMENTS),
    (backward_takes_the_logsumexp_of_a_part, RING),
]


@pytest.mark.parametrize(("fault", "case"), MUTANTS, ids=[f"{f.__name__}-{c.method}" for f, c in MUTANTS])
@ranks(4)
def test_the_comparison_turns_red(fault, case, monkeypatch):
    fault(monkeypatch.setattr)
    ratios = error_ratios(case)
    assert not all(ratio <= FP32_LIMIT for ratio in ratios.values()), ratios


@pytest.mark.parametrize("case", sorted({c for _, c in MUTANTS}, key=repr), ids=repr)
@ranks(4)
def test_without_a_fault_it_is_green(case):
    ratios = error_ratios(case)
    assert all(ratio <= FP32_LIMIT for ratio in ratios.values()), ratios
