"""Widths of rounds: the table, and a controller that measures, chooses and measures again."""

import collections

import pytest

from dflash_jax.engine.width import MOST_ROWS, PAUSE, PROBE, WidthController, WidthTable, widths_of

K = 7


def played(controller, rounds, rows, cost, gain):
    """Widths of so many rounds with the given seconds and tokens by width."""
    chosen = []
    for _ in range(rounds):
        width = controller.choose(rows)
        chosen.append(width)
        controller.learn(rows, width, gain[width] * rows, cost[width])
    return chosen


def test_a_table_goes_by_live_rows_and_its_last_entry_serves_more():
    table = WidthTable((16, 12, 0))
    assert [table.choose(rows) for rows in range(6)] == [16, 16, 12, 0, 0, 0]
    assert table.choices == (16, 12, 0)
    assert WidthTable((9, 9)).choices == (9,)
    table.learn(1, 16, 5, 0.1)
    assert table.choose(1) == 16


@pytest.mark.parametrize(
    ("cost", "best"),
    [
        ({0: 1.0, 12: 1.05, 16: 1.1}, 16),
        ({0: 1.0, 12: 1.05, 16: 1.4}, 12),
        ({0: 1.0, 12: 1.6, 16: 2.0}, 0),
    ],
)
def test_the_controller_settles_on_the_most_tokens_per_second(cost, best):
    gain = {0: 4.0, 12: 4.5, 16: 5.0}
    controller = WidthController(K)
    assert controller.choices == (0, 12, 16)
    chosen = played(controller, 400, 1, cost, gain)
    first = 3 * (PROBE + 1)
    assert set(chosen[:first]) == {0, 12, 16}
    share = collections.Counter(chosen[first:])
    assert share[best] > 0.9 * sum(share.values())
    assert len(share) == 3  # the others are measured again, but rarely


def test_the_controller_follows_a_change():
    controller, gain = WidthController(K), {0: 4.0, 12: 4.5, 16: 5.0}
    played(controller, 300, 2, {0: 1.0, 12: 1.05, 16: 1.1}, gain)
    late = played(controller, 20 * PAUSE, 2, {0: 1.0, 12: 1.05, 16: 1.1}, {0: 4, 12: 2, 16: 2})
    assert collections.Counter(late[-5 * PAUSE :]).most_common(1)[0][0] == 0


def test_numbers_of_rows_are_learned_apart_and_many_rows_keep_the_chain():
    controller, gain = WidthController(K), {0: 4.0, 12: 4.5, 16: 5.0}
    played(controller, 50, 1, {0: 1.0, 12: 1.05, 16: 1.1}, gain)
    played(controller, 50, 3, {0: 1.0, 12: 1.5, 16: 2.0}, gain)
    assert played(controller, 5, 1, {0: 1.0, 12: 1.05, 16: 1.1}, gain) == [16] * 5
    assert played(controller, 5, 3, {0: 1.0, 12: 1.5, 16: 2.0}, gain) == [0] * 5
    assert set(played(controller, 9, MOST_ROWS + 1, {0: 1.0}, {0: 4.0})) == {0}


def test_a_choice_depends_on_past_rounds_only():
    """Asking again without a round in between gives the same answer."""
    controller = WidthController(K)
    for index in range(200):
        width = controller.choose(1)
        assert controller.choose(1) == width
        controller.learn(1, width, 4 + index % 3, 1.0 + 0.1 * (width > 0))


def test_the_next_round_may_be_planned_while_one_still_runs():
    """Every width is measured as ever: learning the round before does not undo another's plan."""
    controller, cost = WidthController(K), {0: 1.0, 12: 1.05, 16: 1.1}
    gain, chosen = {0: 4.0, 12: 4.5, 16: 5.0}, []
    width = controller.choose(1)
    for _ in range(300):
        chosen.append(width)
        following = controller.choose(1)
        controller.learn(1, width, gain[width], cost[width])
        width = following
    first = 3 * (PROBE + 2)  # a width is given up one round later
    assert chosen[:first] == [0] * (PROBE + 2) + [12] * (PROBE + 2) + [16] * (PROBE + 2)
    share = collections.Counter(chosen[first:])
    assert share[16] > 0.8 * sum(share.values()) and len(share) == 3


def test_the_round_that_carries_another_width_s_commit_is_not_learned():
    controller = WidthController(K)
    controller.learn(1, 0, 4, 100.0)
    for _ in range(PROBE):
        controller.learn(1, 0, 4, 1.0)
    assert controller._of(1, 0).seconds == 1.0 and controller._of(1, 0).rounds == PROBE


def test_policies_by_name():
    assert widths_of(K, 12, None).choices == (12,)
    assert widths_of(K, 0, (16, 0)).choices == (16, 0)
    assert widths_of(27, 0, "auto").choices == (0, 32)
    with pytest.raises(ValueError, match="tree_nodes: expected widths or 'auto'"):
        widths_of(K, 0, "wide")
    with pytest.raises(ValueError, match="at least one width"):
        widths_of(K, 0, ())
