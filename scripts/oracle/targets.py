"""Checks of golden/target_NAME.npz: one prompt through every route of the target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import TargetConfig
from dflash_jax.state.decode import DecodeState
from dflash_jax.state.scratch import Acceptance, Proposal, RoundExtent, RoundScratch
from dflash_jax.steps import Models, Params, commit, verify
from dflash_jax.target import Target, TargetOutput

from .compare import RESIDUAL, Checks, Exact, Floats, Input
from .kit import Golden
from .lane import ROWS, columns_at, extended, models_for, prefilled, stacked

# A verify block and how much of it is kept: every commit cuts a longer block.
BLOCK, KEPT = 8, 5


def check_target(golden: Golden, target: TargetConfig, weights: dict) -> Checks:
    """Computes every array of a target golden; several routes check the same array."""
    ids = golden["ids"]
    models = models_for(target, None, draft_tokens=0, positions=len(ids))
    params = Params(target=weights, draft={})
    checks: Checks = {
        "ids": [Input()],
        "linear_layers": [Exact(np.array(target.linear_layers, np.int64))],
        "full_layers": [Exact(np.array(target.full_layers, np.int64))],
    }
    if "split" in golden:
        checks["split"] = [Input()]
    split = golden.scalar("split") if "split" in golden else len(ids)
    _whole(golden, models, params, checks)
    conv_inputs = _verified(golden, models, params, split, checks)
    _two_chunks(golden, models, params, split, conv_inputs, checks)
    return checks


def _whole(golden: Golden, models: Models, params: Params, checks: Checks) -> None:
    """All tokens in one call that keeps the residual of every block."""
    target, ids = models.target, golden["ids"]
    everything = Target(target, models.run.dtypes, tuple(range(target.num_layers)))
    embedded, output, logits = _run(everything, params, models.zeros(), ids, frontier=0)
    residuals = output.features[0].reshape(len(ids), target.num_layers, target.hidden)
    checks |= {
        "embed": [Floats(embedded[0])],
        "blocks": [Floats(np.moveaxis(np.asarray(residuals), 1, 0), RESIDUAL)],
        "final_norm": [Floats(output.hidden[0])],
        "logits": [Floats(logits)],
    }
    if output.kv_rows:
        key, value = output.kv_rows[0]
        checks["attn_k_first"] = [Floats(np.moveaxis(np.asarray(key[0]), 1, 0))]
        checks["attn_v_first"] = [Floats(np.moveaxis(np.asarray(value[0]), 1, 0))]


def _run(
    module: Target, params: Params, state: DecodeState, ids: np.ndarray, *, frontier: int
) -> tuple[jax.Array, TargetOutput, np.ndarray]:
    """A prefill pass of the module itself: embedding, output, logits [T, V]."""

    @jax.jit
    def run(weights, state, tokens):
        variables = {"params": weights}
        embedded = module.apply(variables, tokens, method="embed")
        columns = columns_at(state, frontier, tokens.shape[1])
        output = module.apply(variables, embedded, columns, state.target, method="prefill")
        return embedded, output, module.apply(variables, output.hidden, method="logits")

    embedded, output, logits = run(params.target, state, jnp.asarray(ids)[None])
    return embedded, output, np.asarray(logits[0])


def _verified(
    golden: Golden, models: Models, params: Params, split: int, checks: Checks
) -> list[list[np.ndarray]]:
    """The prompt through verify blocks, each cut back by its commit.

    Returns the projected convolution inputs of all tokens, by linear layer T of [channels].
    """
    ids = golden["ids"]
    run = jax.jit(verify, static_argnames="models")
    state = prefilled(models, params, ids[:0])
    logits, inputs, frontier = [], [[] for _ in state.target.gdn], 0
    while frontier < len(ids):
        # A commit must stop exactly at `split`.
        kept = min(KEPT, (split if frontier < split else len(ids)) - frontier)
        proposal, extent = _block(ids[frontier : frontier + BLOCK])
        result = run(models, params, state, ROWS, proposal, extent)
        logits.append(np.asarray(result.logits[0, :kept]))
        for taken, records in zip(inputs, result.gdn_records, strict=True):
            taken.extend(np.asarray(records.conv_input[0, :kept]))
        scratch = RoundScratch(
            proposal=proposal, verification=result, acceptance=_all_accepted(proposal, extent)
        )
        state = commit(models, state, ROWS, scratch, jnp.full((1,), kept, jnp.int32))
        frontier += kept
        if frontier == split:
            _add_states(golden, state, inputs, split, "_split", " (verify, commit)", checks)
    _add_states(golden, state, inputs, len(ids), "", " (verify, commit)", checks)
    checks["logits"].append(Floats(np.concatenate(logits), label=" (verify)"))
    return inputs


def _two_chunks(
    golden: Golden, models: Models, params: Params, split: int, conv_inputs: list, checks: Checks
) -> None:
    """Prefill up to `split`, then the rest over that state."""
    ids = golden["ids"]
    state = prefilled(models, params, ids[:split])
    _add_states(golden, state, conv_inputs, split, "_split", " (prefill)", checks)
    if "chunk2_logits" in golden:
        logits = _run(models.target_module, params, state, ids[split:], frontier=split)[2]
        checks["chunk2_logits"] = [Floats(logits)]
    state = extended(models, params, state, ids[split:], frontier=split)
    _add_states(golden, state, conv_inputs, len(ids), "", " (prefill)", checks)
    if state.target.kv:
        pages = state.target.kv[0]
        for name, stored in (("attn_k_first", pages.key), ("attn_v_first", pages.value)):
            rows = np.asarray(stored).reshape(stored.shape[0], -1, stored.shape[-1])
            checks[name].append(Floats(rows[:, : len(ids)], label=" (pages)"))


def _block(ids: np.ndarray) -> tuple[Proposal, RoundExtent]:
    """A chain proposal of the given tokens, padded to the block width."""
    tokens = np.zeros((1, BLOCK), np.int32)
    tokens[0, : len(ids)] = ids
    depth = np.arange(BLOCK, dtype=np.int32)[None]
    proposal = Proposal(
        tokens=jnp.asarray(tokens),
        parent=jnp.asarray(np.maximum(depth - 1, 0)),
        depth=jnp.asarray(depth),
        candidates=jnp.asarray(tokens[:, 1:, None]),
        q=jnp.ones((1, BLOCK - 1, 1), jnp.float32),
    )
    columns = jnp.full((1,), len(ids), jnp.int32)
    extent = RoundExtent(proposals=columns - 1, columns=columns, draft_columns=columns)
    return proposal, extent


def _all_accepted(proposal: Proposal, extent: RoundExtent) -> Acceptance:
    """An acceptance of the whole block, so that the committed count alone cuts it."""
    return Acceptance(
        accepted=extent.proposals,
        licensed=extent.columns,
        outputs=jnp.roll(proposal.tokens, -1, axis=1),
        path=proposal.depth,
        fault=jnp.zeros((1,), bool),
    )


def _add_states(
    golden: Golden,
    state: DecodeState,
    conv_inputs: list[list[np.ndarray]],
    count: int,
    suffix: str,
    label: str,
    checks: Checks,
) -> None:
    """Recurrent and convolution states of lane 0 after `count` tokens, in the kit's layout.

    Ours keeps one convolution column less than the kit; the oldest one comes from `conv_inputs`.
    """
    recurrent = [np.moveaxis(np.asarray(layer.recurrent[0]), 1, 2) for layer in state.target.gdn]
    conv = []
    for layer, rows in zip(state.target.gdn, conv_inputs, strict=True):
        kept = np.asarray(layer.conv[0])
        oldest = count - 1 - len(kept)
        first = rows[oldest] if oldest >= 0 else np.zeros_like(rows[0])
        conv.append(np.concatenate([first[None], kept]).T)
    for name, values in (("gdn_state", recurrent), ("conv_state", conv)):
        if name + suffix in golden:
            value = stacked(values, golden[name + suffix])
            checks.setdefault(name + suffix, []).append(Floats(value, label=label))
