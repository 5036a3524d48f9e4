"""The target's own continuations of many prompts: one device program per batch, no host in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dflash_jax.config import DtypePolicy, RunConfig, TargetConfig
from dflash_jax.ops.vocab import public_argmax
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import Rows
from dflash_jax.state.scratch import Acceptance, RoundScratch
from dflash_jax.steps import (
    Admission,
    Models,
    Params,
    PrefillChunk,
    begin,
    commit,
    first_token,
    prefill_chunk,
    propose,
    verify,
)


def continuation_models(
    config: TargetConfig, dtypes: DtypePolicy, *, batch: int, prompt: int, new_tokens: int
) -> Models:
    """Plain decoding of a batch of equally long prompts."""
    run = RunConfig(
        draft_tokens=0, batch=batch, max_context=prompt + new_tokens, chunk=prompt, dtypes=dtypes
    )
    return Models(config, None, run)


def continuations(models: Models, params, prompts, *, temperature: float, seed: int):
    """Prompts and what the target writes behind them.

    Args:
      models: of `continuation_models`; its capacity decides how many tokens are written.
      params: the target module's variables, in the run's dtypes.
      prompts: [N, P] int32, N a multiple of the batch.
      temperature: 0 takes the argmax; above it, a draw from the softmax of the public logits.
    Returns:
      [N, P + new_tokens] int32 NumPy array.
    Raises: ValueError for a shape, or for ids that the target does not have.
    """
    prompts, batch = np.asarray(prompts, np.int32), models.run.batch
    if prompts.ndim != 2 or len(prompts) % batch:
        raise ValueError(f"prompts: expected [N, P] with N a multiple of {batch}, "
                         f"got {prompts.shape}")
    public = models.target.public_vocab
    if prompts.size and not 0 <= prompts.min() <= prompts.max() < public:
        raise ValueError(f"vocabulary: expected prompts of ids in [0, {public}), got "
                         f"{prompts.min()}..{prompts.max()}")
    heat, key = np.float32(temperature), jax.random.key(seed)
    pair = Params(target=params, draft={})
    written = [
        np.asarray(continue_batch(models, pair, jnp.asarray(prompts[i : i + batch]), heat,
                                  jax.random.fold_in(key, i)))
        for i in range(0, len(prompts), batch)
    ]
    return np.concatenate([prompts, np.concatenate(written)], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def continue_batch(models: Models, params: Params, prompts, temperature, key):
    """[B, P] int32 -> [B, new_tokens] int32."""
    run, (batch, length) = models.run, prompts.shape
    row = jnp.arange(batch, dtype=jnp.int32)
    rows = Rows(lane=row, read_slot=row, write_slot=row)
    zeros = jnp.zeros((batch, 2), jnp.uint32)
    state = begin(models, models.zeros(), rows, text_admission(run, batch, length, zeros))
    state = prefill_chunk(models, params, state, rows, text_chunk(models, prompts))
    state, _ = first_token(models, params, state, rows, SamplingArrays.greedy(batch))
    written = state.sequence.anchor
    last = jnp.zeros((batch,), jnp.int32)

    def step(state, step_key):
        extent = models.extent(state.sequence)
        proposal = propose(models, params, state, rows, SamplingArrays.greedy(batch), extent)
        verification = verify(models, params, state, rows, proposal, extent)
        token = _choose(verification.logits[:, 0], temperature, step_key, models)
        acceptance = Acceptance(
            accepted=last, licensed=last + 1, outputs=token[:, None], path=last[:, None],
            fault=jnp.zeros((batch,), bool),
        )
        scratch = RoundScratch(
            proposal=proposal, verification=verification, acceptance=acceptance
        )
        return commit(models, state, rows, scratch, last + 1), token

    keys = jax.random.split(key, run.max_context - length - 1)
    tokens = lax.scan(step, state, keys)[1]
    return jnp.concatenate([written[:, None], tokens.T], axis=1)


def _choose(logits, temperature, key, models: Models):
    """Argmax of the public logits, with Gumbel noise of the given temperature."""
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    heated = logits.astype(jnp.float32) + temperature * noise
    return public_argmax(heated, models.target.public_vocab).index


def text_admission(run: RunConfig, batch: int, length: int, seed) -> Admission:
    """Row b owns its own stretch of pages and writes until its capacity is used.

    Args: length: tokens of a prompt. seed: [B, 2] uint32, low and high words.
    """
    pages = jnp.arange(batch * run.max_pages, dtype=jnp.int32).reshape(batch, run.max_pages)
    return Admission(
        remaining=jnp.full((batch,), run.max_context - length, jnp.int32),
        capacity=jnp.full((batch,), run.max_context, jnp.int32),
        rope_delta=jnp.zeros((batch,), jnp.int32),
        seed=seed,
        target_pages=pages,
        draft_pages=pages,
    )


def text_chunk(models: Models, tokens, start: int = 0) -> PrefillChunk:
    """A chunk of every row's text.

    Args: tokens: [B, T] int32, all live. start: position of the first.
    """
    batch, length = tokens.shape
    position = start + jnp.arange(length, dtype=jnp.int32)[None, :, None]
    return PrefillChunk(
        tokens=tokens,
        length=jnp.full((batch,), length, jnp.int32),
        positions=jnp.broadcast_to(position, (batch, length, 3)),
        embeddings=jnp.zeros((batch, 0, models.target.hidden), models.run.dtypes.activation_dtype),
        replaced=jnp.zeros((batch, 0), bool),
    )
