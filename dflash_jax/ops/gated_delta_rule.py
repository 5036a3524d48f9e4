"""The gated delta rule: one step, a chunked prefill, verification with records, and the fold.

Per value head, with decay alpha = exp(g), normalised k and q, and state M [Dv, Dk]:

    delta = beta * (v - alpha * M k)
    M    <- alpha * M + delta k^T
    o     = (M q) / sqrt(Dk)

Verification never writes M; it leaves records (normalised k, delta, g), and the fold adds the
accepted increments as verification did. No sum is left to it, so that the folded state equals
verification's own trajectory bit for bit: both round each product and sum of an entry in the same
way, see `_moved`.
Source: contracts 6.3.4, 6.3.5 and 9.3.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dflash_jax.ops.causal_conv1d import shift_history
from dflash_jax.ops.dispatch import choose, choose_form
from dflash_jax.ops.indices import DROP
from dflash_jax.ops.norm import l2norm
from dflash_jax.pallas import gated_delta_fold as fold_kernel
from dflash_jax.pallas import gated_delta_prefill as prefill_kernels
from dflash_jax.pallas import gated_delta_rule as kernels

# Columns that one step of the chunked prefill absorbs.
CHUNK = 64
_einsum = functools.partial(
    jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


def gated_delta_verify(
    query, key, value, decay, recurrent, slot, parent, live, *, chain, implementation="auto"
):
    """Outputs of the recurrence along each column's root path; the state is read, not written.

    Args:                                                                  (B rows, W columns)
      query, key: [B, W, Hk, Dk] fp32, normalised, as `unit_vectors` makes them.
      value:      [B, W, Hv, Dv].
      decay:      [B, W, Hv, 2] fp32, {g, beta}.
      recurrent:  [slots, Hv, Dv, Dk] fp32, committed states.
      slot:       [B] int32, state of each row; an idle row's is out of range.
      parent:     [B, W] int32, parent[b, c] < c; column 0 is the root.
      live:       [B] int32, columns that exist; the others come last.
      chain:      promises parent = column - 1 and skips keeping a state per column. Static.
      implementation: "xla", "pallas", "interpret" or "auto". Static; the fold must use the same
        one. "auto" takes the kernel on a GPU where it fits.
    Returns:
      outputs and, for the fold, deltas, both [B, W, Hv, Dv] fp32. Outputs of columns >= live are
      exactly zero, their deltas anything.
    Numeric: fp32; alpha M k is taken as alpha (M k).
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 6.3.4 and 8.4.
    """
    _check(key, value, decay, recurrent)
    if query.dtype != jnp.float32 or key.dtype != jnp.float32:
        raise ValueError(f"query, key: expected float32, got {query.dtype}, {key.dtype}")
    form = _choose(implementation, key, value)
    if form != "xla":
        return kernels.verify(
            query, key, value, decay, recurrent, slot, None if chain else parent, live,
            interpret=form == "interpret",
        )
    state = recurrent[jnp.minimum(slot, recurrent.shape[0] - 1)]
    inputs = {"query": query, "key": key, "value": value, "decay": decay}
    inputs = {name: jnp.moveaxis(x, 1, 0) for name, x in inputs.items()}
    made = _along_chain(inputs, state) if chain else _along_tree(inputs, state, parent)
    outputs, deltas = (jnp.moveaxis(x, 0, 1) for x in made)
    alive = (jnp.arange(key.shape[1])[None, :] < live[:, None])[:, :, None, None]
    return jnp.where(alive, outputs, 0.0), deltas


def gated_delta_fold(
    key, delta, decay, conv_input, recurrent, conv, path, read_slot, write_slot, count, *,
    implementation="auto",
):
    """Applies the first `count` records of each row, in path order, to its state and history.

    Args:                                                                  (B rows, W columns)
      key, decay: records, as in `gated_delta_verify`; beta is not read.
      delta:      [B, W, Hv, Dv] fp32, records that `gated_delta_verify` made.
      conv_input: [B, W, channels], records of the convolution.
      recurrent:  [slots, Hv, Dv, Dk] fp32; donate it in the enclosing jit.
      conv:       [slots, kernel - 1, channels], dtype of conv_input; donate it too.
      path:       [B, W] int32, the column of each step; entries past count are never applied.
      read_slot, write_slot: [B] int32, the state that verification read, and where to put the
        result. Written slots are distinct and are no other row's read slot. A row with either out
        of range, negative included, is idle: it writes nothing.
      count:      [B] int32, records to apply, 0..W; 0 writes nothing.
      implementation: that of the verification. Static.
    Returns:
      recurrent and conv with each row's written slot bit for bit what it is after `count` steps.
    Raises: ValueError for shapes or dtypes.
    Source: contracts 9.3.
    """
    layer = key, delta, decay, conv_input, recurrent, conv
    return gated_delta_folds(
        (layer,), path, read_slot, write_slot, count, implementation=implementation
    )[0]


def gated_delta_folds(
    layers, path, read_slot, write_slot, count, *, implementation="auto"
):
    """`gated_delta_fold` of layers that are alike: the kernel takes several of them a launch.

    Args: as there, with a tuple (key, delta, decay, conv_input, recurrent, conv) a layer.
    Returns: (recurrent, conv) of each. Raises: as there.
    """
    if not layers:
        return ()
    _check_layers(layers)
    form = _choose(implementation, *layers[0][:2])
    rows = path, read_slot, write_slot, count
    if form == "xla":
        return tuple(_fold(*layer, *rows) for layer in layers)
    folded, launches = [], -(-len(layers) // fold_kernel.LAYERS)
    for index in range(launches):  # of nearly as many layers each
        first, end = (len(layers) * i // launches for i in (index, index + 1))
        folded += fold_kernel.fold(layers[first:end], *rows, interpret=form == "interpret")
    return tuple(folded)


def _fold(
    key, delta, decay, conv_input, recurrent, conv, path, read_slot, write_slot, count
):
    """`gated_delta_fold` in XLA."""
    def step(state, column):
        k = _per_value_head(column["key"], state.shape[1])
        moved = _moved(state, _alpha(column["decay"]), column["delta"], k)
        applies = (column["index"] < count)[:, None, None, None]
        return jnp.where(applies, moved, state), None

    def in_path_order(x):
        taken = jnp.take_along_axis(x, path[:, :, None, None], axis=1, mode="clip")
        return jnp.moveaxis(taken, 1, 0)

    inputs = {name: in_path_order(x) for name, x in
              (("key", key), ("delta", delta), ("decay", decay))}
    inputs["index"] = jnp.arange(path.shape[1], dtype=jnp.int32)
    slots = recurrent.shape[0]
    writes = (count > 0) & (read_slot >= 0) & (read_slot < slots)
    target = jnp.where(writes, write_slot, slots)
    source = jnp.minimum(read_slot, slots - 1)
    state = lax.scan(step, recurrent[source], inputs)[0]
    history = shift_history(conv[source], conv_input, path, count)
    return (
        recurrent.at[target].set(state, **DROP), conv.at[target].set(history, **DROP)
    )


def gated_delta_prefill(
    query, key, value, decay, recurrent, live, *, implementation="auto"
):
    """The recurrence over a long chunk, in blocks of columns with one triangular solve each.

    Inside a block with cumulative decay G_i and rows k_i, v_i, the increments delta solve
    (I + A) delta = beta (v - exp(G) M_0 k) with A_ij = beta_i exp(G_i - G_j) (k_i . k_j), j < i.

    Args: as in `gated_delta_verify` with T columns, any T >= 1, but
      recurrent: [B, Hv, Dv, Dk] fp32, the state of each row itself.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernels. Static.
    Returns:
      outputs [B, T, Hv, Dv] fp32 (columns >= live are exactly zero) and the state after `live`
      columns, [B, Hv, Dv, Dk] fp32; a row with live = 0 keeps its state bit for bit.
    Numeric: fp32; equal to the step-by-step form up to rounding. The kernel multiplies bf16 pairs
      that hold an fp32 number to 2^-18.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 6.3.4.
    """
    _check(key, value, decay, recurrent)
    form = _choose_prefill(implementation, key, value)
    if form != "xla":
        return prefill_kernels.prefill(
            query, key, value, decay, recurrent, live, interpret=form == "interpret"
        )
    return _prefill(query, key, value, decay, recurrent, live)


def _prefill(query, key, value, decay, recurrent, live):
    """`gated_delta_prefill` in XLA: the blocks are solved together, then scanned."""
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


def unit_vectors(query, key):
    """query / (|query| sqrt(Dk)) and key / |key| as `gated_delta_verify` takes them, in fp32."""
    return l2norm(query) * key.shape[-1] ** -0.5, l2norm(key)


def _along_chain(inputs: dict, state):
    """Outputs and deltas [W, B, Hv, Dv] of columns that follow one another."""
    def step(state, column):
        state, delta = _advance(state, column["key"], column["value"], column["decay"])
        return state, (_read(state, column["query"]), delta)

    return lax.scan(step, state, inputs)[1]


def _along_tree(inputs: dict, state, parent):
    """Outputs and deltas [W, B, Hv, Dv]; keeps one state per column, entry c + 1 for column c."""
    columns, rows = parent.shape[1], jnp.arange(parent.shape[0])

    def visit(index, carry):
        states, outputs, deltas = carry
        column = {name: x[index] for name, x in inputs.items()}
        above = jnp.where(index == 0, 0, parent[:, index] + 1)
        moved, delta = _advance(
            states[above, rows], column["key"], column["value"], column["decay"]
        )
        out = _read(moved, column["query"])
        return (
            states.at[index + 1].set(moved), outputs.at[index].set(out), deltas.at[index].set(delta)
        )

    states = jnp.zeros((columns + 1, *state.shape), jnp.float32).at[0].set(state)
    blank = jnp.zeros(inputs["value"].shape, jnp.float32)
    return lax.fori_loop(0, columns, visit, (states, blank, blank))[1:]


def _advance(state, key, value, decay):
    """One step of the rule: the state after it and its delta.

    state [B, Hv, Dv, Dk]; key [B, Hk, Dk], normalised; value [B, Hv, Dv]."""
    k, alpha = _per_value_head(key, state.shape[1]), _alpha(decay)
    pulled = alpha[..., 0] * _along_keys(state, k)
    delta = decay[..., 1:] * (value.astype(jnp.float32) - pulled)
    return _moved(state, alpha, delta, k), delta


def _moved(state, alpha, delta, k):
    """alpha M + delta k^T, each product rounded by itself.

    Else a compiler fuses one of them with the sum, in verification not the same as in the fold. It
    looks through barriers and roundings to fp32, not through a choice.
    """
    kept, added = (
        jnp.where(jnp.isnan(x), jnp.nan, x) for x in (alpha * state, delta[..., None] * k)
    )
    return kept + added


def _alpha(decay):
    return jnp.exp(decay[..., 0])[..., None, None]


def _read(state, query):
    return _along_keys(state, _per_value_head(query, state.shape[1]))


def _along_keys(state, x):
    """[B, Hv, Dv, Dk] and [B, Hv, 1, Dk] -> [B, Hv, Dv], products summed over Dk.

    On a CPU a product with a vector: XLA runs the sum eight times slower there. On a GPU the sum:
    a product's kernel may be chosen anew in each program, and fold and verification part.
    """
    if choose("auto", gpu="sum", other="product") == "sum":
        return jnp.sum(state * x, axis=-1)
    return _einsum("bhvk,bhk->bhv", state, x[:, :, 0])


def _per_value_head(x, value_heads: int):
    """[B, Hk, Dk] -> [B, Hv, 1, Dk]: value head j reads key head j // (Hv / Hk)."""
    return jnp.repeat(x, value_heads // x.shape[1], axis=1)[:, :, None, :]


def _check_layers(layers) -> None:
    for key, delta, decay, conv_input, recurrent, conv in layers:
        _check(key, delta, decay, recurrent)
        if key.dtype != jnp.float32 or delta.dtype != jnp.float32:
            raise ValueError(f"key, delta: expected float32, got {key.dtype}, {delta.dtype}")
        expected = recurrent.shape[0], conv.shape[1], conv_input.shape[2]
        if conv.shape != expected or conv.dtype != conv_input.dtype:
            raise ValueError(
                f"conv: expected {conv_input.dtype} [slots, kernel - 1, channels] = {expected}, "
                f"got {conv.dtype} {conv.shape}"
            )
        if conv_input.shape[:2] != key.shape[:2]:
            raise ValueError(
                f"conv_input: expected {key.shape[:2]} columns, got {conv_input.shape[:2]}"
            )
    first, *others = ([(x.shape, x.dtype) for x in layer] for layer in layers)
    for number, other in enumerate(others, 1):
        if other != first:
            raise ValueError(f"layers: expected all like the first, got another at {number}")


def _choose(implementation: str, key, value) -> str:
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    lacking = None if kernels.supports(key_dim, value_dim) else (
        f"power-of-two heads of at least 16, got key {key_dim}, value {value_dim}"
    )
    return choose_form("gated_delta_rule", implementation, lacking, auto_gpu="pallas")


def _choose_prefill(implementation: str, key, value) -> str:
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    lacking = None if prefill_kernels.supports(key_dim, value_dim) else (
        f"power-of-two heads of 16 to 128, got key {key_dim}, value {value_dim}"
    )
    return choose_form("gated_delta_prefill", implementation, lacking, auto_gpu="pallas")


def _check(key, value, decay, recurrent) -> None:
    batch, columns, key_heads, key_dim = key.shape
    value_heads, value_dim = value.shape[2:]
    expected = (value_heads, value_dim, key_dim)
    if value.shape[:2] != (batch, columns):
        raise ValueError(f"key, value: expected the same columns, got {key.shape}, {value.shape}")
    if value_heads % key_heads or recurrent.shape[1:] != expected:
        raise ValueError(f"recurrent: expected [slots, *{expected}], got {recurrent.shape}")
    if decay.shape != (batch, columns, value_heads, 2):
        raise ValueError(
            f"decay: expected {(batch, columns, value_heads, 2)}, got {decay.shape}"
        )
