"""Checks of golden/draft_TARGET__DRAFT.npz: one masked block after a prompt."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftKind, LayerKind
from dflash_jax.draft import DraftColumns, DraftOutput
from dflash_jax.ops.linear import linear
from dflash_jax.state.decode import DecodeState
from dflash_jax.steps import Models, Params
from dflash_jax.steps.models import draft_call, target_call
from dflash_jax.steps.propose import masked_block

from .compare import RESIDUAL, Checks, Exact, Floats, Input
from .convolutions import check_convolutions
from .kit import Golden
from .lane import ROWS, columns_at, models_for, prefilled
from .loaded import LoadedKit, with_shortlist
from .selector import check_selector

_OTHER_WIDTH = "hidden_w"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A loaded pair and the committed context of a prompt."""

    models: Models
    params: Params
    state: DecodeState
    frontier: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One block forward. hidden: [W, H], final-normed, anchor column included."""

    output: DraftOutput
    embedded: jax.Array
    hidden: np.ndarray


def check_draft(golden: Golden, kit: LoadedKit) -> Checks:
    """Computes every array of a draft golden."""
    target, target_params = kit.target(golden.target)
    draft, draft_params = kit.draft(golden.draft, golden.target)
    prompt, width = golden["prompt"], len(golden["block_ids"])
    models = models_for(target, draft, draft_tokens=width - 1, positions=len(prompt) + width)
    params = Params(target=target_params, draft=draft_params)
    pair = context_after(models, params, prompt)
    anchor = jnp.asarray(golden["anchor"], jnp.int32)[None]
    block = block_after(pair, anchor, width)

    checks: Checks = {
        "target_layer_ids": [Exact(np.array(draft.target_layer_ids))],
        "prompt": [Input()],
        "anchor": [Input()],
        "block_ids": [Exact(np.asarray(masked_block(models, anchor)[0]))],
        "block_embed": [Floats(block.embedded[0])],
        "layer_out": [Floats(np.stack([r[0] for r in block.output.residuals]), RESIDUAL)],
        "hidden": [Floats(block.hidden)],
    }
    _context(golden, pair, checks)
    _widths(golden, pair, anchor, checks)
    _short_context(golden, models, params, checks)
    _causal(golden, kit, models, params, anchor, checks)
    _heads(golden, pair, block, checks)
    if draft.kind is DraftKind.DFLASH2:
        check_selector(golden, models, params, block.output.hidden, checks)
        check_convolutions(golden, models, params, checks)
    return checks


def context_after(models: Models, params: Params, prompt: np.ndarray) -> Pair:
    """Runs a prompt through the library's prefill."""
    state = prefilled(models, params, prompt)
    return Pair(models=models, params=params, state=state, frontier=len(prompt))


def block_after(pair: Pair, anchor: jax.Array, width: int) -> Block:
    """A block of any width over the pair's context: the anchor, then masks."""
    masks = jnp.full((1, width - 1), pair.models.draft.mask_token_id, jnp.int32)
    tokens = jnp.concatenate([anchor[:, None], masks], axis=1)
    frontier = jnp.full((1,), pair.frontier, jnp.int32)
    embedded, output, hidden = _run_block(pair.models, pair.params, pair.state, tokens, frontier)
    return Block(output=output, embedded=embedded, hidden=np.asarray(hidden))


@functools.partial(jax.jit, static_argnames="models")
def _run_block(
    models: Models, params: Params, state: DecodeState, tokens: jax.Array, frontier: jax.Array
) -> tuple[jax.Array, DraftOutput, jax.Array]:
    """Embedding, output and normed hidden [W, H] of a block of tokens [1, W] at `frontier` [1]."""
    width = tokens.shape[1]
    columns = DraftColumns(
        positions=frontier[:, None] + jnp.arange(width, dtype=jnp.int32),
        frontier=frontier,
        live=jnp.full((1,), width, jnp.int32),
        slot=ROWS.write_slot,
        table=state.draft_table.rows(ROWS.lane),
    )
    embedded = draft_call(models, params, "embed", tokens, params.target["embedding"])
    output = draft_call(models, params, "block_hidden", embedded, columns, state.context)
    anchor_hidden = draft_call(models, params, "normalize", output.residuals[-1][:, :1])
    return embedded, output, jnp.concatenate([anchor_hidden, output.hidden], axis=1)[0]


def _context(golden: Golden, pair: Pair, checks: Checks) -> None:
    """Features, their projection, and context K/V: as computed, and as the state holds them."""
    models, params, count = pair.models, pair.params, pair.frontier

    @jax.jit
    def run(params, tokens):
        state = models.zeros()
        embedded = target_call(models, params, "embed", tokens)
        columns = columns_at(state, 0, tokens.shape[1])
        output = target_call(models, params, "prefill", embedded, columns, state.target)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rows = draft_call(models, params, "context_kv", output.features, positions)
        c = models.draft_module.apply(
            {"params": params.draft},
            output.features,
            method=lambda module, features: module.context.conditioning(features),
        )
        return output.features[0], c[0], rows

    features, c, rows = run(params, jnp.asarray(golden["prompt"])[None])
    if "features" in golden:
        checks["features"] = [Floats(features[-len(golden["features"]) :])]
    checks["c"] = [Floats(c)]
    stored = _stored_context(pair, rows, count)
    for index, name in enumerate(("ctx_k", "ctx_v")):
        computed = np.stack([np.asarray(layer[index][0]) for layer in rows])
        held = np.stack([layer[index] for layer in stored])
        checks[name] = [Floats(computed), Floats(held, label=" (state)")]


def _stored_context(pair: Pair, rows: tuple, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """K and V [F, Hkv, D] per layer from rings and pages.

    A ring holds only the last positions; `rows`, as computed without it, fill the others.
    """
    context = pair.state.context
    rings, pages = iter(context.rings), iter(context.pages)
    stored = []
    for kind, computed in zip(pair.models.draft.layer_types, rows, strict=True):
        if kind is LayerKind.SLIDING:
            store, window = next(rings), pair.models.draft.window
            held = np.arange(max(0, count - window), count)
            layer = []
            for image, row in zip((store.key, store.value), computed, strict=True):
                values = np.array(row[0])
                values[held] = np.moveaxis(np.asarray(image[0]), 0, 1)[held % window]
                layer.append(values)
        else:
            store = next(pages)
            layer = [
                np.moveaxis(np.asarray(image).reshape(image.shape[0], -1, image.shape[-1]), 0, 1)
                for image in (store.key, store.value)
            ]
            layer = [values[:count] for values in layer]
        stored.append(tuple(layer))
    return stored


def _widths(golden: Golden, pair: Pair, anchor: jax.Array, checks: Checks) -> None:
    for name in golden.arrays:
        suffix = name.removeprefix(_OTHER_WIDTH)
        if name.startswith(_OTHER_WIDTH) and suffix.isdecimal():
            checks[name] = [Floats(block_after(pair, anchor, int(suffix)).hidden)]


def _short_context(golden: Golden, models: Models, params: Params, checks: Checks) -> None:
    if "hidden_short" not in golden:
        return
    count, prompt = golden.scalar("short_context"), golden["prompt"]
    pair = context_after(models, params, prompt[:count])
    anchor = jnp.asarray(prompt[count], jnp.int32)[None]
    width = len(golden["hidden_short"])
    checks["short_context"] = [Input()]
    checks["hidden_short"] = [Floats(block_after(pair, anchor, width).hidden)]


def _causal(
    golden: Golden,
    kit: LoadedKit,
    models: Models,
    params: Params,
    anchor: jax.Array,
    checks: Checks,
) -> None:
    """The reading of a draft whose local layers are causal."""
    name = "wrong_hidden_local_causal"
    if name not in golden:
        return
    draft, draft_params = kit.causal_draft(golden.draft, golden.target)
    models = dataclasses.replace(models, draft=draft)
    pair = context_after(models, params.replace(draft=draft_params), golden["prompt"])
    checks[name] = [Floats(block_after(pair, anchor, len(golden[name])).hidden)]


def _heads(golden: Golden, pair: Pair, block: Block, checks: Checks) -> None:
    """Scores of the target's head and of a reduced one."""
    models, params, hidden = pair.models, pair.params, block.output.hidden
    head = target_call(models, params, "head_matrix")
    public = models.target.public_vocab
    checks["mask_logits"] = [Floats(target_call(models, params, "logits", hidden)[0])]
    chosen = draft_call(models, params, "argmax", hidden, head, public)
    checks["mask_argmax"] = [Exact(np.asarray(chosen[0]))]
    if "shortlist_ids" not in golden:
        return
    ids = golden["shortlist_ids"]
    checks["shortlist_ids"] = [Input()]
    short_models, short_params = with_shortlist(models, params, ids)
    own = short_params.draft["head"]
    scores = np.asarray(linear(hidden, own["kernel"], jnp.float32)[0])
    # The library may order its rows otherwise; the kit keeps the order given.
    place = {int(token): row for row, token in enumerate(np.asarray(own["token_ids"]))}
    order = [place[int(token)] for token in ids]
    checks["shortlist_logits"] = [Floats(scores[:, order])]
    chosen = draft_call(short_models, short_params, "argmax", hidden, head, public)
    checks["shortlist_argmax_id"] = [Exact(np.asarray(chosen[0]))]
