"""Whole generations on the kit's trained tiny pair, against PyTorch's greedy tokens and rounds.

One model pair and one batch width for the whole file, so that it compiles once.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.config import DtypePolicy, RunConfig, tiny_target
from dflash_jax.engine import device
from dflash_jax.engine.generate import generate
from dflash_jax.engine.request import FinishReason, total_statistics
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params, advance
from dflash_jax.weights import load_draft, load_target

KIT = Path(__file__).parents[1] / "data" / "kit_tiny"
BUDGET = 64
ROWS = range(3)


@pytest.fixture(scope="module")
def golden():
    """Prompts, greedy tokens and rounds of the reference loop, K = 3."""
    files = ("greedy_tiny", "e2e_tiny__tiny_dflash2__k3")
    return {name: value for file in files for name, value in _arrays(file).items()}


@pytest.fixture(scope="module")
def run(golden):
    """``generate`` on the pair: run(order of prompts, options) -> outputs."""
    policy = DtypePolicy.exact()
    target, target_params = load_target(KIT / "targets" / "tiny", policy)
    folder = KIT / "drafts" / "tiny_dflash2"
    # The kit's drafts are bidirectional in every layer, whatever their files say.
    draft, draft_params = load_draft(folder, target, policy, causal=False)
    choices = RunConfig(
        draft_tokens=3, batch=3, max_context=140, page_size=16, chunk=32, dtypes=policy
    )
    models = Models(target=target, draft=draft, run=choices)
    params = Params(target=target_params, draft=draft_params)

    def call(
        order=ROWS, *, max_new_tokens=BUDGET, poisoned_id=None, change=lambda tree: None, **options
    ):
        prompts = [golden[f"prompt{row}"].tolist() for row in order]
        tree = dict(target_params)
        if poisoned_id is not None:
            tree["embedding"] = tree["embedding"].at[poisoned_id].set(np.nan)
        change(tree)
        used = params.replace(target=tree)
        return generate(models, used, prompts, max_new_tokens=max_new_tokens, **options)

    return call


def _arrays(name):
    with np.load(KIT / "golden" / f"{name}.npz") as archive:
        return dict(archive)


def test_a_batch_of_different_prompts_gives_the_targets_greedy_tokens(run, golden):
    shown = {row: [] for row in ROWS}
    outputs = run(on_tokens=lambda row, tokens: shown[row].extend(tokens))
    for row, output in enumerate(outputs):
        assert list(output.tokens) == golden[f"output{row}"].tolist()
        assert shown[row] == list(output.tokens)
        assert output.finish_reason is FinishReason.LENGTH


def test_rounds_and_acceptance_are_those_of_the_reference_loop(run, golden):
    for row, output in enumerate(run()):
        verified, accepted = golden[f"verified{row}"], golden[f"accepted{row}"]
        counters = output.statistics
        assert counters.rounds == np.count_nonzero(verified)
        assert counters.single_steps == np.count_nonzero(verified == 0)
        assert counters.drafted == verified.sum()
        assert counters.accepted == accepted.sum() > 0
        by_position = [np.count_nonzero(accepted > position) for position in range(3)]
        assert counters.accepted_by_position == by_position


def test_rows_may_come_in_any_order_and_fewer_than_the_batch(run, golden):
    for order in ((2, 0), (1,)):
        outputs = run(order)
        for row, output in zip(order, outputs, strict=True):
            assert list(output.tokens) == golden[f"output{row}"].tolist()


@pytest.mark.parametrize("row", ROWS)
def test_e7_generation_ends_just_after_the_stop_token(run, golden, row):
    stop = int(golden[f"stop_token{row}"])
    outputs = run(eos_ids=[stop])
    assert list(outputs[row].tokens) == golden[f"stopped_output{row}"].tolist()
    assert outputs[row].finish_reason is FinishReason.EOS
    for other, output in enumerate(outputs):
        expected = golden[f"output{other}"].tolist()
        assert list(output.tokens) == expected[: len(output.tokens)]


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 9])
def test_e8_every_budget_is_a_prefix(run, golden, budget):
    for row, output in enumerate(run(max_new_tokens=budget)):
        assert list(output.tokens) == golden[f"output{row}"][:budget].tolist()


def test_e1_a_second_call_is_not_touched_by_the_first(run, golden):
    run((0,), max_new_tokens=5)
    (output,) = run((2,))
    assert list(output.tokens) == golden["output2"].tolist()


def test_cancelling_one_row_leaves_the_others(run, golden):
    outputs = run(on_tokens=lambda row, tokens: row != 1)
    assert [output.finish_reason for output in outputs] == [
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]
    assert len(outputs[1].tokens) == 1
    assert list(outputs[2].tokens) == golden["output2"].tolist()


def test_trees_by_live_rows_give_the_same_tokens_in_fewer_rounds(run, golden):
    """Width 8 for up to two rows, the chain for three; rows end one after the other."""
    ends = [int(golden["output0"][20]), int(golden["output1"][35])]
    for budget, options in ((BUDGET, {"eos_ids": ends}), (BUDGET, {})):
        chain = run(max_new_tokens=budget, **options)
        tree = run(max_new_tokens=budget, tree_nodes=(8, 8, 0), **options)
        assert [o.tokens for o in tree] == [o.tokens for o in chain]
        assert [o.finish_reason for o in tree] == [o.finish_reason for o in chain]
    chain, tree = run((0, 2)), run((0, 2), tree_nodes=(8,))
    assert [o.tokens for o in tree] == [o.tokens for o in chain]
    assert all(sum(o.statistics.widths.values()) == o.statistics.rounds + o.statistics.single_steps
               for o in (*chain, *tree))
    ours, theirs = (total_statistics([o.statistics for o in outputs]) for outputs in (tree, chain))
    assert set(theirs.widths) <= {1, 2, 3, 4} and set(ours.widths) <= {1, 2, 3, 4, 8}
    assert ours.widths[8] > 10
    assert ours.rounds < theirs.rounds and ours.tokens_per_round > theirs.tokens_per_round


def test_sampled_trees_repeat_by_seed_whatever_the_other_rows(run):
    """One width for any number of rows: text depends on prompt, controls and seed alone."""
    controls = [SamplingParams(temperature=0.8, top_p=0.9, seed=row) for row in ROWS]
    whole = run(tree_nodes=(8,), sampling=controls)
    turned = run((2, 0), tree_nodes=(8,), sampling=[controls[2], controls[0]])
    assert [o.tokens for o in turned] == [whole[2].tokens, whole[0].tokens]
    other = run((0,), tree_nodes=(8,), sampling=dataclasses.replace(controls[0], seed=9))
    assert other[0].tokens != whole[0].tokens


def test_no_request_compiles_a_round_again(run):
    run(max_new_tokens=3)
    compiled = advance._cache_size()
    run((1,), max_new_tokens=6, eos_ids=[5])
    run((2, 0, 1), max_new_tokens=8)
    assert advance._cache_size() == compiled


def test_buckets_are_powers_of_two_up_to_the_chunk():
    lengths = [1, 15, 16, 17, 32, 33, 99, 100]
    assert [device.bucket(n, 100) for n in lengths] == [16, 16, 16, 32, 32, 64, 100, 100]
    assert [device.bucket(n, 8) for n in (1, 8)] == [8, 8]


def test_a_nan_prompt_ends_its_row_before_a_token_and_leaves_the_others(run, golden):
    """One embedding row is NaN; only the prompt that holds it ends, with no output."""
    clean = run(max_new_tokens=6)
    poisoned = next(iter(set(golden["prompt0"].tolist()) - set(golden["prompt1"].tolist())))
    others = [row for row in ROWS if poisoned not in golden[f"prompt{row}"]]
    outputs = run(max_new_tokens=6, poisoned_id=poisoned)
    assert (outputs[0].tokens, outputs[0].finish_reason) == ((), FinishReason.FAULT)
    for row in others:
        assert outputs[row] == clean[row] or outputs[row].tokens == clean[row].tokens


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tree: tree.pop("final_norm"), r"\['final_norm'\]\['weight'\]: missing"),
        (lambda tree: tree.update(extra=np.zeros(3)), r"\['extra'\]: not declared"),
        (
            lambda tree: tree.update(embedding=tree["embedding"][:-1]),
            r"\['embedding'\]: expected \(64, 64\) float32, got \(63, 64\)",
        ),
    ],
)
def test_parameters_of_another_geometry_are_refused_by_path(run, change, message):
    with pytest.raises(ValueError, match=f"params: 1 leaves differ: .target{message}"):
        run(max_new_tokens=2, change=change)


def test_only_a_batch_of_plain_greedy_rows_leaves_sampling_out_of_its_programs():
    choices = RunConfig(draft_tokens=0, batch=2, max_context=32, page_size=16)
    models, params = Models(target=tiny_target(), draft=None, run=choices), Params({}, {})

    def promised(*controls):
        return device.DeviceBatch(models, params, controls)._sampling.greedy_only

    assert promised() and promised(SamplingParams()) and promised(SamplingParams(seed=3))
    assert not promised(SamplingParams(), SamplingParams(temperature=0.5))
    assert not promised(SamplingParams(repetition_penalty=1.1))
