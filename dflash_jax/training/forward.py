"""Whole sequences through the library's own modules, differentiable and without a decode state.

A target pass is one prefill chunk on an empty state. A draft pass runs many blocks of each sequence
at once: block r of sequence n has its anchor at position F = anchors[n, r] and sees the context of
positions below F through the masks that rings and pages would show it (`anchored_attention`).
"""

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig, DtypePolicy, LayerKind, TargetConfig
from dflash_jax.draft import DraftColumns, block_positions, build_draft
from dflash_jax.ops.linear import linear
from dflash_jax.state.draft_context import DraftContext
from dflash_jax.state.gdn import GdnState
from dflash_jax.state.pages import KVPages
from dflash_jax.state.sequence_context import KVSequence
from dflash_jax.state.target import TargetState
from dflash_jax.target import Target, TargetColumns, TargetOutput


def training_dtypes(compute: str) -> DtypePolicy:
    """Dtypes of a training pass: every boundary in `compute`, head scores in float32.

    Context values are not float16 as at inference: their gradients would leave its range.

    Raises: ConfigError for an unknown dtype name.
    """
    return DtypePolicy(activation=compute, context_value=compute, param=compute, logits="float32")


def target_forward(
    config: TargetConfig, dtypes: DtypePolicy, params, tokens, *, capture=(), embedding=None
) -> TargetOutput:
    """A target over [N, T] int32 tokens from position 0.

    Args:
      params: the module's variables, in the policy's dtypes.
      capture: block ids whose residual becomes the feature, in order. Static.
      embedding: [V, H] rows to look up, default the params' own. A trainer passes its fp32 master:
        the gradient of a lookup is then summed in fp32.
    Returns:
      `TargetOutput`; hidden is final-normed, features [N, T, len(capture) * H].
    Raises: ValueError if a captured id is not a block of the target.
    """
    outside = [i for i in capture if not 0 <= i < config.num_layers]
    if outside:
        raise ValueError(
            f"target_layer_ids: expected block ids in [0, {config.num_layers}), got {outside}"
        )
    rows, length = tokens.shape
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :, None],
                                (rows, length, 3))
    row = jnp.arange(rows, dtype=jnp.int32)
    columns = TargetColumns.chained(
        positions=position, frontier=jnp.zeros_like(row), live=jnp.full_like(row, length),
        table=jnp.zeros((rows, 0), jnp.int32), slot=row,
    )
    table = params["embedding"] if embedding is None else embedding
    embedded = table[tokens].astype(dtypes.activation_dtype)
    module = Target(config, dtypes, tuple(capture), "xla")
    return module.apply(
        {"params": params}, embedded, columns, _empty_state(config, dtypes, rows), method="prefill"
    )


def target_logits(config: TargetConfig, params, hidden):
    """[..., H] final-normed -> [..., V] fp32 scores of the head, reserved rows included."""
    head = params["embedding"] if config.tie_embeddings else params["head"]
    return linear(hidden, head, jnp.float32)


def draft_forward(
    config: DraftConfig, dtypes: DtypePolicy, params, embedding, tokens, features, anchors, *,
    draft_tokens: int, proposals=None,
):
    """All blocks of a batch of sequences through the draft.

    Args:
      params: the draft's variables, context copies included.
      embedding: [V, H], the target's.
      tokens: [N, T] int32.
      features: [N, T, n_tap * H], captured by the target at every position.
      anchors: [N, A] int32, F of each block, 0..T-1.
      draft_tokens: K, masks per block. Static.
      proposals: [N, A] int32, P of each block, 1..K: its masks beyond P do not exist, as in a
        DFlash round of that P. None: all K.
    Returns:
      [N, A, K, H] final-normed mask columns, as `propose` computes them for the same context.
    Raises: ValueError for shapes.
    """
    count, length = tokens.shape
    if features.shape != (count, length, config.feature_width):
        raise ValueError(
            f"features: expected {(count, length, config.feature_width)}, got {features.shape}"
        )
    width = draft_tokens + 1
    module, variables = build_draft(config, dtypes, "xla"), {"params": params}
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (count, length))
    stores = [
        KVSequence(key=key, value=value)
        for key, value in module.apply(variables, features, position, method="context_kv")
    ]
    frontier = anchors.reshape(-1)
    live = jnp.full_like(frontier, width) if proposals is None else 1 + proposals.reshape(-1)
    masks = jnp.full((count * anchors.shape[1], draft_tokens), config.mask_token_id, jnp.int32)
    first = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
    columns = DraftColumns(
        positions=block_positions(frontier, width, live),
        frontier=frontier,
        live=live,
        slot=jnp.zeros_like(frontier),
        table=jnp.zeros((len(frontier), 0), jnp.int32),
    )
    embedded = module.apply(
        variables, jnp.concatenate([first, masks], axis=1), embedding, method="embed"
    )
    context = DraftContext(
        rings=tuple(_of_kind(config, stores, LayerKind.SLIDING)),
        pages=tuple(_of_kind(config, stores, LayerKind.FULL)),
    )
    output = module.apply(variables, embedded, columns, context, method="block_hidden")
    return output.hidden.reshape(*anchors.shape, draft_tokens, -1)


def _of_kind(config: DraftConfig, stores, kind: LayerKind):
    return [store for store, of in zip(stores, config.layer_types, strict=True) if of is kind]


def _empty_state(config: TargetConfig, dtypes: DtypePolicy, rows: int) -> TargetState:
    """A state of `rows` slots before any token; its pages are never mapped."""
    dtype = dtypes.activation_dtype
    pages = KVPages.zeros(config.kv_heads, 1, 1, config.head_dim, dtype, dtype)
    return TargetState(
        kv=(pages,) * len(config.full_layers),
        gdn=tuple(GdnState.zeros(rows, config.gdn, dtype) for _ in config.linear_layers),
        continuation=jnp.zeros((rows, config.hidden), dtype),
    )


def block_labels(tokens, anchors, draft_tokens: int):
    """The token at the position of every mask: label i of an anchor at F is tokens[F + 1 + i].

    Args:
      tokens: [N, T] int32. anchors: [N, A] int32, at most T - 1 - K.
    Returns:
      [N, A, K] int32. There is no shift as in a causal model: mask i stands where its token stands.
    """
    offsets = jnp.arange(1, draft_tokens + 1, dtype=jnp.int32)
    index = anchors[:, :, None] + offsets
    taken = jnp.take_along_axis(tokens, index.reshape(len(tokens), -1), axis=1)
    return taken.reshape(index.shape)


def random_proposals(key, shape: tuple[int, ...], draft_tokens: int, shorter: float):
    """[...] int32 in 1..K: K, or with probability `shorter` one of 1..K-1 drawn evenly."""
    choice, length = jax.random.split(key)
    drawn = jax.random.randint(length, shape, 1, max(draft_tokens, 2), jnp.int32)
    return jnp.where(jax.random.uniform(choice, shape) < shorter, drawn, draft_tokens)


def random_anchors(key, sequences: int, blocks: int, first: int, last: int):
    """[N, A] int32, anchors drawn from first..last without repeats inside a sequence.

    The range is cut into A equal strips and one anchor drawn from each, so that a batch covers its
    sequences evenly.
    """
    edges = first + (last + 1 - first) * jnp.arange(blocks + 1) // blocks
    low, high = edges[:-1], jnp.maximum(edges[1:], edges[:-1] + 1)
    drawn = jax.random.randint(key, (sequences, blocks), low, high, jnp.int32)
    return drawn.astype(jnp.int32)
