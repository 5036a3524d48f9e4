"""Checks of whole generations: golden/greedy_NAME.npz and golden/e2e_TARGET__DRAFT__kK.npz."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from dflash_jax.engine.generate import generate
from dflash_jax.ops.vocab import public_argmax
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import DecodeState
from dflash_jax.steps import Models, Params, commit, first_token, speculate

from .compare import Checks, Exact, Input
from .kit import Golden, KitError
from .lane import ROWS, models_for, prefilled
from .loaded import LoadedKit

# Proposals that lead by less are luck: the kit says so.
MARGIN = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One speculate and commit, as the host sees it."""

    frontier: int
    anchor: int
    verified: int
    accepted: int
    emitted: int
    proposals: np.ndarray  # [K]
    answers: np.ndarray  # [K + 1], -1 past the verified columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The tokens after a prompt, the rounds they took, and the state that is left."""

    output: list[int]
    rounds: list[Round]
    state: DecodeState


def generated(models: Models, params: Params, prompt: np.ndarray, budget: int) -> Generation:
    """Greedy decoding of `budget` tokens through speculate and commit."""
    sampling, public = SamplingArrays.greedy(1), models.target.public_vocab
    state = prefilled(models, params, prompt, budget=budget)
    state, _ = first_token(models, params, state, ROWS, sampling)
    output, rounds = [int(state.sequence.anchor[0])], []
    while len(output) < budget:
        sequence = state.sequence.gather(ROWS.lane)
        extent = models.extent(sequence)
        frontier, anchor = int(sequence.frontier[0]), int(sequence.anchor[0])
        state, scratch = speculate(models, params, state, ROWS, sampling, extent)
        accepted = int(scratch.acceptance.accepted[0])
        emitted, verified = accepted + 1, int(extent.proposals[0])
        answers = np.array(public_argmax(scratch.verification.logits, public).index[0])
        answers[verified + 1 :] = -1
        rounds.append(
            Round(
                frontier=frontier,
                anchor=anchor,
                verified=verified,
                accepted=accepted,
                emitted=emitted,
                proposals=np.asarray(scratch.proposal.tokens[0, 1:]),
                answers=answers,
            )
        )
        output += np.asarray(scratch.acceptance.outputs[0, :emitted]).tolist()
        state = commit(models, state, ROWS, scratch, jnp.full((1,), emitted, jnp.int32))
    return Generation(output=output, rounds=rounds, state=state)


def check_greedy(golden: Golden, kit: LoadedKit) -> Checks:
    """Plain greedy decoding: rounds without a draft, and the engine with a stop token."""
    target, weights = kit.target(golden.target)
    params, checks = Params(target=weights, draft={}), {}
    budgets = {index: len(golden[f"output{index}"]) for index in _prompts(golden)}
    positions = max(len(golden[f"prompt{index}"]) + budgets[index] for index in budgets)
    models = models_for(target, None, draft_tokens=0, positions=positions)
    for index, budget in budgets.items():
        prompt = golden[f"prompt{index}"]
        output = generated(models, params, prompt, budget).output
        checks[f"prompt{index}"] = [Input()]
        checks[f"output{index}"] = [Exact(np.array(output))]
        if f"stop_token{index}" in golden:
            stop = golden.scalar(f"stop_token{index}")
            (stopped,) = generate(
                models, params, [prompt.tolist()], max_new_tokens=budget, eos_ids=(stop,)
            )
            checks[f"stop_token{index}"] = [Input()]
            checks[f"stopped_output{index}"] = [Exact(np.array(stopped.tokens))]
    return checks


def check_e2e(golden: Golden, kit: LoadedKit) -> Checks:
    """Rounds with a draft: the output always, the rounds where the kit says they must agree."""
    target, target_params = kit.target(golden.target)
    draft, draft_params = kit.draft(golden.draft, golden.target)
    params = Params(target=target_params, draft=draft_params)
    count, budget = golden.scalar("k"), golden.scalar("budget")
    checks: Checks = {"k": [Input()], "budget": [Input()]}
    positions = budget + max(len(golden[f"prompt{index}"]) for index in _prompts(golden))
    models = models_for(target, draft, draft_tokens=count, positions=positions)
    for index in _prompts(golden):
        prompt = golden[f"prompt{index}"]
        ours = generated(models, params, prompt, budget)
        checks[f"prompt{index}"] = [Input()]
        checks[f"margin{index}"] = [Input()]
        checks[f"output{index}"] = [Exact(np.array(ours.output))]
        left = budget - (golden[f"frontier{index}"] - len(prompt) + 1)
        checks[f"full_round{index}"] = [Exact((left > count).astype(np.int64))]
        for name, check in _aligned(golden, index, ours.rounds):
            checks[name] = [check]
    return checks


def _aligned(golden: Golden, index: str, rounds: list[Round]) -> Iterator[tuple[str, Exact]]:
    """Our rounds beside the golden ones at the same frontier.

    A round depends on the tokens before it alone, and the outputs are equal, so rounds at one
    frontier must agree wherever the kit says they are comparable. After a round that is not
    comparable the two runs may cut the output elsewhere and miss each other for a while.
    """
    frontier, margin = golden[f"frontier{index}"], golden[f"margin{index}"]
    comparable = (golden[f"full_round{index}"] == 1) & (margin >= MARGIN).all(axis=1)
    ours = {item.frontier: item for item in rounds}
    matched: list[Round] = []
    where = np.zeros(len(frontier), bool)
    apart = False  # a round that may differ came since the runs last met
    for row, position in enumerate(frontier):
        found = ours.get(int(position))
        where[row] = comparable[row] and (found is not None or not apart)
        apart = not comparable[row] or (apart and found is None)
        matched.append(found or _absent(golden["k"]))
    for field in dataclasses.fields(Round):
        values = np.array([getattr(item, field.name) for item in matched])
        yield f"{field.name}{index}", Exact(values, where=where)


def _absent(count: np.ndarray) -> Round:
    """Differs everywhere from a golden round."""
    empty = np.full(int(count) + 1, -2)
    return Round(
        frontier=-2,
        anchor=-2,
        verified=-2,
        accepted=-2,
        emitted=-2,
        proposals=empty[:-1],
        answers=empty,
    )


def _prompts(golden: Golden) -> list[str]:
    indices = [name.removeprefix("prompt") for name in golden.arrays if name.startswith("prompt")]
    if not indices:
        raise KitError(f"{golden.stem}: expected arrays prompt0, prompt1, ..., got none")
    return indices
