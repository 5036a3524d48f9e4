"""The gated delta rule: one step, a chunked prefill, verification with records, and the fold.

Per value head, with decay alpha = exp(g), normalised k and q, and state M [Dv, Dk]:

    delta = beta * (v - alpha * M k)
    M    <- alpha * M + delta k^T
    o     = (M q) / sqrt(Dk)

Verification never writes M; it leaves records (raw k, raw v, g, beta), and the fold replays the
accepted ones with the same step function in the same loop form. That makes the folded state equal
to verification's own trajectory bit for bit; a loop in one and an unrolled chain in the other would
not. Source: contracts 6.3.4, 6.3.5 and 9.3.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dflash_jax.ops.dispatch import choose
from dflash_jax.ops.norm import l2norm

# Columns that one step of the chunked prefill absorbs.
CHUNK = 64
_einsum = functools.partial(
    jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


def gated_delta_verify(
    query, key, value, decay, recurrent, parent, live, *, chain, implementation="auto"
):
    """Outputs of the recurrence along each column's root path; the state is read, not written.

    Args:                                                                  (B rows, W columns)
      query, key: [B, W, Hk, Dk], after convolution and SiLU, not yet normalised.
      value:      [B, W, Hv, Dv].
      decay:      [B, W, Hv, 2] fp32, {g, beta}.
      recurrent:  [B, Hv, Dv, Dk] fp32, the committed state of each row.
      parent:     [B, W] int32, parent[b, c] < c; column 0 is the root.
      live:       [B] int32, columns that exist; the others come last.
      chain:      promises parent = column - 1 and skips keeping a state per column. Static.
      implementation: "xla" (a loop), "xla_unrolled" or "auto" (unrolled on a GPU, where a loop
        costs a launch of its own per column). Static; the fold must use the same one.
    Returns:
      [B, W, Hv, Dv] fp32; columns >= live are exactly zero.
    Raises: ValueError for shapes or an unknown implementation.
    Source: contracts 6.3.4 and 8.4.
    """
    _check(key, value, decay, recurrent)
    columns = key.shape[1]
    alive = (jnp.arange(columns)[None, :] < live[:, None])[:, :, None, None]
    if chain:
        def step(state, column):
            state = _advance(state, column["key"], column["value"], column["decay"])
            return state, _read(state, column["query"])

        inputs = {"query": query, "key": key, "value": value, "decay": decay}
        _, outputs = _loop(step, recurrent, _columns_first(inputs), implementation)
        return jnp.where(alive, jnp.moveaxis(outputs, 0, 1), 0.0)

    rows = jnp.arange(key.shape[0])

    def visit(index, carry):
        states, outputs = carry
        above = states[parent[:, index] + 1, rows]
        above = jnp.where(index == 0, states[0], above)
        state = _advance(above, key[:, index], value[:, index], decay[:, index])
        # Entry 0 is the committed state; column c is entry c + 1.
        states = states.at[index + 1].set(state)
        return states, outputs.at[index].set(_read(state, query[:, index]))

    states = jnp.zeros((columns + 1, *recurrent.shape), jnp.float32).at[0].set(recurrent)
    outputs = jnp.zeros((columns, *value.shape[:1], *value.shape[2:]), jnp.float32)
    _, outputs = lax.fori_loop(0, columns, visit, (states, outputs))
    return jnp.where(alive, jnp.moveaxis(outputs, 0, 1), 0.0)


def gated_delta_fold(key, value, decay, recurrent, count, *, implementation="auto"):
    """Applies the first `count` records of each row to its state.

    Args:                                                                  (B rows, W columns)
      key, value, decay: records in path order, as in `gated_delta_verify`.
      recurrent: [B, Hv, Dv, Dk] fp32, the state that verification read.
      count:     [B] int32, records to apply, 0..W.
      implementation: the one verification used. Static.
    Returns:
      [B, Hv, Dv, Dk] fp32, bit for bit the state after `count` steps; unchanged for count = 0.
    Source: contracts 9.3.
    """
    _check(key, value, decay, recurrent)

    def step(state, column):
        moved = _advance(state, column["key"], column["value"], column["decay"])
        applies = (column["index"] < count)[:, None, None, None]
        return jnp.where(applies, moved, state), None

    inputs = _columns_first({"key": key, "value": value, "decay": decay})
    inputs["index"] = jnp.arange(key.shape[1], dtype=jnp.int32)
    return _loop(step, recurrent, inputs, implementation)[0]


def gated_delta_prefill(query, key, value, decay, recurrent, live):
    """The recurrence over a long chunk, in blocks of columns with one triangular solve each.

    Inside a block with cumulative decay G_i and rows k_i, v_i, the increments delta solve
    (I + A) delta = beta (v - exp(G) M_0 k) with A_ij = beta_i exp(G_i - G_j) (k_i . k_j), j < i.

    Args: as in `gated_delta_verify`; T columns instead of W, any T >= 1.
    Returns:
      outputs [B, T, Hv, Dv] fp32 (columns >= live are exactly zero) and the state after `live`
      columns, [B, Hv, Dv, Dk] fp32.
    Numeric: fp32 throughout; equal to the step-by-step form up to rounding.
    Source: contracts 6.3.4.
    """
    _check(key, value, decay, recurrent)
    batch, tokens, value_heads, value_dim = value.shape
    block = min(CHUNK, tokens)
    padded = -(-tokens // block) * block
    alive = jnp.arange(tokens)[None, :] < live[:, None]

    def prepare(x, axes):
        # Dead columns become g = 0, beta = 0, k = v = q = 0: no effect on the state.
        x = jnp.where(alive.reshape(*alive.shape, *(1,) * axes), x.astype(jnp.float32), 0.0)
        x = jnp.pad(x, ((0, 0), (0, padded - tokens)) + ((0, 0),) * axes)
        x = x.reshape(batch, padded // block, block, *x.shape[2:])
        return jnp.moveaxis(x, 3, 1)

    repeat = value_heads // key.shape[2]
    q, k = (jnp.repeat(prepare(l2norm(x), 2), repeat, axis=1) for x in (query, key))
    q = q * key.shape[-1] ** -0.5
    v, gates = prepare(value, 2), prepare(decay, 2)
    blocks = _solve_blocks(k, v, gates[..., 0], gates[..., 1])
    blocks["query"] = q

    def step(state, item):
        delta = item["free"] - _einsum("bhik,bhvk->bhiv", item["pull"], state)
        grown = item["growth"][..., None]
        out = grown * _einsum("bhik,bhvk->bhiv", item["query"], state)
        inner = _einsum("bhik,bhjk->bhij", item["query"], item["key"]) * item["ratio"]
        out = out + _einsum("bhij,bhjv->bhiv", inner, delta)
        tail = item["ratio"][..., -1, :, None] * item["key"]
        state = grown[..., -1:, :] * state + _einsum("bhiv,bhik->bhvk", delta, tail)
        return state, out

    ordered = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), blocks)
    state, outputs = lax.scan(step, recurrent, ordered)
    outputs = jnp.moveaxis(outputs, (0, 3), (1, 2)).reshape(batch, padded, value_heads, value_dim)
    return jnp.where(alive[:, :, None, None], outputs[:, :tokens], 0.0), state


def _solve_blocks(k, v, g, beta):
    """Per block: delta = free - pull M_0, the decay ratios exp(G_i - G_j), and exp(G_i)."""
    total = jnp.cumsum(g, axis=-1)
    columns = jnp.arange(g.shape[-1])
    causal = columns[:, None] >= columns[None, :]
    gap = jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf)
    ratio = jnp.exp(gap)
    strict = jnp.where(columns[:, None] > columns[None, :], ratio, 0.0)
    system = beta[..., None] * strict * _einsum("bhcik,bhcjk->bhcij", k, k)
    growth = jnp.exp(total)
    right = jnp.concatenate([v, growth[..., None] * k], axis=-1) * beta[..., None]
    solved = lax.linalg.triangular_solve(
        system + jnp.eye(len(columns), dtype=jnp.float32), right,
        left_side=True, lower=True, unit_diagonal=True,
    )
    free, pull = jnp.split(solved, [v.shape[-1]], axis=-1)
    return {"free": free, "pull": pull, "ratio": ratio, "growth": growth, "key": k}


def _advance(state, key, value, decay):
    """One step of the rule. state [B, Hv, Dv, Dk]; key [B, Hk, Dk]; value [B, Hv, Dv]."""
    k = _per_value_head(l2norm(key), state.shape[1])
    alpha = jnp.exp(decay[..., 0])[..., None, None]
    decayed = alpha * state
    delta = decay[..., 1:] * (value.astype(jnp.float32) - jnp.sum(decayed * k, axis=-1))
    return decayed + delta[..., None] * k


def _read(state, query):
    q = _per_value_head(l2norm(query), state.shape[1])
    return jnp.sum(state * q, axis=-1) * state.shape[-1] ** -0.5


def _per_value_head(x, value_heads: int):
    """[B, Hk, Dk] -> [B, Hv, 1, Dk]: value head j reads key head j // (Hv / Hk)."""
    return jnp.repeat(x, value_heads // x.shape[1], axis=1)[:, :, None, :]


def _loop(step, carry, inputs, implementation: str):
    form = choose(implementation, gpu="xla_unrolled", other="xla")
    if form == "xla":
        return lax.scan(step, carry, inputs)
    if form != "xla_unrolled":
        raise ValueError(f"implementation: expected auto, xla or xla_unrolled, got {form!r}")
    outputs = []
    for index in range(jax.tree.leaves(inputs)[0].shape[0]):
        carry, out = step(carry, jax.tree.map(lambda x, i=index: x[i], inputs))
        # Fences every step, so that verify and fold compile the same step.
        carry = lax.optimization_barrier(carry)
        outputs.append(out)
    return carry, None if outputs[0] is None else jnp.stack(outputs)


def _columns_first(inputs: dict) -> dict:
    return {name: jnp.moveaxis(x, 1, 0) for name, x in inputs.items()}


def _check(key, value, decay, recurrent) -> None:
    batch, columns, key_heads, key_dim = key.shape
    value_heads, value_dim = value.shape[2:]
    expected = (batch, value_heads, value_dim, key_dim)
    if value_heads % key_heads or recurrent.shape != expected:
        raise ValueError(f"recurrent: expected {expected}, got {recurrent.shape}")
    if decay.shape != (batch, columns, value_heads, 2):
        raise ValueError(
            f"decay: expected {(batch, columns, value_heads, 2)}, got {decay.shape}"
        )
