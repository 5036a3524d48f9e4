"""Proposes K tokens: one masked block through the draft, its head, and DFlash2's walk or tree."""

import jax.numpy as jnp

from dflash_jax.config import DraftKind
from dflash_jax.draft import DraftColumns, block_positions
from dflash_jax.ops.candidate_selector import conditional_walk
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import Proposal, RoundExtent
from dflash_jax.steps.models import Models, Params, draft_call, target_call
from dflash_jax.steps.tree import build_tree, walk_uniforms


def propose(
    models: Models,
    params: Params,
    state: DecodeState,
    rows: Rows,
    sampling: SamplingArrays,
    extent: RoundExtent,
) -> Proposal:
    """One block forward over the context, which must reach F (materialize first).

    Mask i at position F + 1 + i predicts the token at that position, d_(i+1). DFlash takes the
    argmax of each column (a point mass at every temperature); DFlash2 walks its lattice from the
    anchor, and with `run.tree_nodes` grows a tree around the walk. Without a draft the proposal is
    the anchor alone. State is read only.

    Source: the DFlash reference document; contracts 5.
    """
    sequence = state.sequence.gather(rows.lane)
    if models.draft is None:
        alone = sequence.anchor[:, None]
        return _chain(alone, jnp.zeros((len(alone), 0, 1), jnp.float32))
    tokens = masked_block(models, sequence.anchor)
    columns = DraftColumns(
        positions=block_positions(sequence.frontier, tokens.shape[1], extent.draft_columns),
        frontier=sequence.frontier,
        live=extent.draft_columns,
        slot=rows.write_slot,
        table=state.draft_table.rows(rows.lane),
    )
    embedded = draft_call(models, params, "embed", tokens, params.target["embedding"])
    block = draft_call(models, params, "block_hidden", embedded, columns, state.context)
    head = target_call(models, params, "head_matrix")
    public = models.target.public_vocab
    if models.draft.kind == DraftKind.DFLASH:
        drafted = draft_call(models, params, "argmax", block.hidden, head, public)
        proposed = jnp.concatenate([sequence.anchor[:, None], drafted], axis=1)
        return _chain(proposed, jnp.ones((*drafted.shape, 1), jnp.float32))

    candidates = draft_call(models, params, "topk", block.hidden, head, public)
    takes_tree = extent.columns > extent.proposals + 1
    uniforms = walk_uniforms(sequence, takes_tree, models.run.draft_tokens)
    if models.run.tree_nodes:
        edges = draft_call(models, params, "edges", block.hidden, candidates, sequence.anchor)
        walk = conditional_walk(edges, candidates.ids, sampling.temperature, uniforms)
        return build_tree(
            edges, candidates.ids, walk, sampling.temperature, sequence,
            nodes=models.run.tree_nodes, paths=models.run.tree_paths,
        )
    walk = draft_call(
        models, params, "select", block.hidden, candidates, sequence.anchor,
        sampling.temperature, uniforms,
    )
    proposed = jnp.concatenate([sequence.anchor[:, None], walk.tokens], axis=1)
    return _chain(proposed, walk.q, candidates.ids)


def masked_block(models: Models, anchor):
    """[B] anchors -> [B, W] int32: the anchor, then K mask tokens."""
    batch = anchor.shape[0]
    masks = jnp.full((batch, models.run.draft_tokens), models.draft.mask_token_id, jnp.int32)
    return jnp.concatenate([anchor[:, None], masks], axis=1)


def _chain(tokens, q, candidates=None) -> Proposal:
    batch, width = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    return Proposal(
        tokens=tokens,
        parent=jnp.maximum(depth - 1, 0),
        depth=depth,
        candidates=tokens[:, 1:, None] if candidates is None else candidates,
        q=q,
    )
