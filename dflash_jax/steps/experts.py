"""Which experts a round reads: what a mixture of experts costs depends on it."""

import functools

import jax
import jax.numpy as jnp

from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import Proposal, RoundExtent
from dflash_jax.steps.models import Models, Params, target_call
from dflash_jax.steps.verify import target_columns


@functools.partial(jax.jit, static_argnames="models")
def active_experts(
    models: Models, params: Params, state: DecodeState, rows: Rows, proposal: Proposal,
    extent: RoundExtent,
) -> jax.Array:
    """How many experts of each layer the verification of a proposal reads.

    Runs the verification once more and changes nothing. Dead columns count as they do there: their
    tokens are routed and read their experts, too.

    Returns:
      [layers] int32, distinct experts of all columns of all rows.
    Raises: ValueError for a dense target.
    """
    if models.target.moe is None:
        raise ValueError("target: expected a mixture of experts, got a dense one")
    chain = not models.run.tree_nodes
    tokens, columns = target_columns(state, rows, proposal, extent, chain=chain)
    embedded = target_call(models, params, "embed", tokens)
    _, kept = models.target_module.apply(
        {"params": params.target}, embedded, columns, state.target, method="verify",
        mutable=["intermediates"],
    )
    layers = range(len(models.target.layer_types))
    chosen = [kept["intermediates"][f"layers_{n}"]["moe"]["experts"][0] for n in layers]
    counts = [jnp.bincount(x.reshape(-1), length=models.target.moe.num_experts) for x in chosen]
    return jnp.stack([jnp.sum(count > 0, dtype=jnp.int32) for count in counts])
