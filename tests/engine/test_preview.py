"""The host's choice of N, and what becomes of it."""

import pytest

from dflash_jax.engine import preview as previews
from dflash_jax.engine import publish as publication
from dflash_jax.engine.request import FinishReason, Request, Statistics, total_statistics

EOS = 9
OUTPUTS = [1, 2, 3, 4]


def request(*, max_new_tokens=100, eos_ids=(EOS,), **fields):
    return Request(
        row=0,
        prompt=(5, 6),
        max_new_tokens=max_new_tokens,
        eos_ids=frozenset(eos_ids),
        **fields,
    )


def preview(request, outputs, licensed):
    """N alone."""
    return previews.preview(request, outputs, licensed).committed


def publish(request, outputs):
    """All the outputs are committed, entered and shown."""
    decision = previews.preview(request, outputs, max(len(outputs), 1))
    assert list(decision.tokens) == list(outputs)
    publication.account(request, decision)
    publication.publish(request, decision)


def test_without_a_reason_to_stop_everything_licensed_is_kept():
    for licensed in range(1, 5):
        assert preview(request(), OUTPUTS, licensed) == licensed


@pytest.mark.parametrize("index", range(4))
def test_e7_eos_at_each_index_is_the_last_output_kept(index):
    outputs = OUTPUTS[:index] + [EOS] + OUTPUTS[index + 1 :]
    kept = request()
    kept.tokens.append(7)
    committed = preview(kept, outputs, 4)
    assert committed == index + 1
    publish(kept, outputs[:committed])
    assert kept.tokens == [7, *outputs[: index + 1]]
    assert kept.finish_reason is FinishReason.EOS


@pytest.mark.parametrize("budget", range(1, 6))
def test_e7_budget_cut_at_each_index(budget):
    cut = request(max_new_tokens=budget)
    committed = preview(cut, OUTPUTS, 4)
    assert committed == min(budget, 4)
    publish(cut, OUTPUTS[:committed])
    assert cut.remaining == budget - committed
    assert cut.finish_reason is (FinishReason.LENGTH if budget <= 4 else None)


def test_eos_beyond_the_licensed_or_budgeted_prefix_does_not_end_the_row():
    outputs = [1, 2, EOS, 4]
    assert preview(request(), outputs, 2) == 2
    cut = request(max_new_tokens=2)
    assert preview(cut, outputs, 4) == 2
    publish(cut, outputs[:2])
    assert cut.finish_reason is FinishReason.LENGTH


def test_eos_as_the_last_budgeted_token_counts_as_eos():
    ended = request(max_new_tokens=1)
    publish(ended, [EOS])
    assert ended.finish_reason is FinishReason.EOS


def test_any_of_several_eos_ids_ends_and_no_eos_ids_never_does():
    assert preview(request(eos_ids=(8, 3)), OUTPUTS, 4) == 3
    assert preview(request(eos_ids=()), [EOS] * 4, 4) == 4


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.FAULT])
def test_only_cancellation_or_a_fault_keeps_nothing(reason):
    ended = request()
    ended.end(reason)
    assert preview(ended, OUTPUTS, 4) == 0
    assert preview(ended, OUTPUTS, 0) == 0
    publish(ended, [])
    assert (ended.tokens, ended.finish_reason) == ([], reason)


def test_a_running_row_without_license_or_budget_is_an_error():
    with pytest.raises(ValueError, match="licensed, remaining"):
        preview(request(), OUTPUTS, 0)
    with pytest.raises(ValueError, match="licensed, remaining"):
        preview(request(max_new_tokens=0), OUTPUTS, 1)


def test_a_prefix_shorter_than_licensed_occurs_only_on_rows_that_end():
    for first in (1, EOS):
        for second in (2, EOS):
            for budget in (1, 2, 3):
                for licensed in (1, 2, 3):
                    row = request(max_new_tokens=budget)
                    outputs = [first, second, 3]
                    committed = preview(row, outputs, licensed)
                    publish(row, outputs[:committed])
                    assert 0 < committed <= licensed
                    if committed < licensed:
                        assert row.finish_reason is not None


def test_the_callback_sees_rows_and_tokens_and_may_cancel():
    seen = []

    def on_tokens(row, tokens):
        seen.append((row, tokens))
        return len(seen) < 2

    row = request(on_tokens=on_tokens)
    publish(row, [1, 2])
    assert row.finish_reason is None
    publish(row, [3])
    assert seen == [(0, [1, 2]), (0, [3])]
    assert row.finish_reason is FinishReason.CANCELLED
    assert row.tokens == [1, 2, 3]


def test_a_callback_without_an_answer_does_not_cancel():
    row = request(on_tokens=lambda row, tokens: None)
    publish(row, [1])
    assert row.finish_reason is None


def test_the_frontier_is_everything_but_the_anchor():
    row = request()
    assert row.frontier == 2
    publish(row, [1])
    assert row.frontier == 2
    publish(row, [2, 3])
    assert row.frontier == 4


def test_counters_of_rounds_and_single_steps():
    counters = Statistics()
    for proposals, accepted in ((3, 2), (3, 0), (2, 2), (0, 0)):
        counters.count_round(proposals, accepted)
    assert (counters.rounds, counters.single_steps) == (3, 1)
    assert (counters.drafted, counters.accepted) == (8, 4)
    assert counters.accepted_by_position == [2, 2, 0]
    assert counters.acceptance == 0.5
    assert counters.tokens_per_round == 1 + 4 / 3


def test_counters_add_up_over_rows_and_times_do_not():
    first = Statistics(new_tokens=5, prefill_seconds=1.0, decode_seconds=2.0)
    first.count_round(3, 1)
    second = Statistics(new_tokens=3, prefill_seconds=2.0, decode_seconds=1.0)
    second.count_round(2, 2)
    both = total_statistics([first, second])
    assert both.accepted_by_position == [2, 1, 0]
    assert (both.rounds, both.drafted, both.accepted, both.new_tokens) == (2, 5, 3, 8)
    assert (both.prefill_seconds, both.decode_seconds) == (2.0, 2.0)
    assert both.tokens_per_second == 3.0


def test_an_unfinished_request_has_no_output():
    with pytest.raises(RuntimeError, match="has not ended"):
        request().output()
