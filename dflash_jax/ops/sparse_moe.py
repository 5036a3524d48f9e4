"""Routed experts: the choice of experts, and the SwiGLU of each token's experts."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dflash_jax.ops.block_scaled_linear import BlockScale, check_scale, dequantise
from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.indices import DROP
from dflash_jax.ops.linear import linear
from dflash_jax.ops.norm import added
from dflash_jax.pallas import routing as routing_kernel
from dflash_jax.pallas import sparse_moe as kernel
from dflash_jax.pallas import sparse_moe_tiles
from dflash_jax.pallas.common import addressable

# Up to here "auto" takes the router's kernel, whose parts spare a padded copy of the matrix.
_ROUTER_TOKENS = 128
# Up to here an expert multiplies all tokens, chosen or not: more products, but no sort by expert,
# and 0.9 ms instead of 4.2 ms for 128 tokens of a 256 x (2048, 512) layer on an H200.
_FEW_TOKENS = 256
# Copying the active experts together costs three passes over them against one over all experts.
_COPY_COST = 4
# Beyond: assignments sorted by expert in tiles of rows, some tiles a step.
_TILE_ROWS = 128
_TILES_PER_STEP = 16


@struct.dataclass(kw_only=True)
class Routing:
    """The experts of every token, best first."""

    # [T, k] int32, distinct within a token.
    experts: jax.Array
    # [T, k] fp32, sums to 1.
    weights: jax.Array
    # [T] fp32, what the expert of all tokens counts; None without one.
    shared: jax.Array | None = None


@struct.dataclass(kw_only=True)
class Matrices:
    """Matrices by expert: gate_up [E, 2I, H], down [E, H, I], and a `BlockScale` of each that is
    float8, else None."""

    gate_up: jax.Array
    down: jax.Array
    gate_up_scale: BlockScale | None = None
    down_scale: BlockScale | None = None

    def of(self, experts, dtype):
        """(gate_up, down) of some experts in a dtype; None is all of them."""
        some = self if experts is None else jax.tree.map(lambda leaf: leaf[experts], self)
        return tuple(
            matrices if scale is None else dequantise(matrices, scale, dtype)
            for matrices, scale in (
                (some.gate_up, some.gate_up_scale), (some.down, some.down_scale)
            )
        )

    @property
    def scales(self):
        return self.gate_up_scale, self.down_scale

    @property
    def columns(self) -> tuple[int, int]:
        """Of a block of each, 0 for a dense one."""
        return tuple(0 if scale is None else scale.columns for scale in self.scales)

    @property
    def scale_values(self):
        return tuple(None if scale is None else scale.values for scale in self.scales)


def choose_experts(
    x, router, experts_per_token, *, experts=None, shared=False, product=None, implementation="auto"
):
    """`route` of the router's product: two ops, each with a kernel.

    Args:
      x:       [T, H] float.
      router:  [E, H], dtype of x; a row that decides over an expert of all tokens is last.
      product: implementation of the product; "auto" on a GPU: the kernel, up to 128 tokens. None is
               `implementation`. Static.
      the others: as in `route`.
    Returns: Routing. Raises: as `route`.
    """
    if router.dtype != x.dtype or router.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"router: expected {x.dtype} [E, {x.shape[1]}], got {router.dtype} {router.shape}"
        )
    count = router.shape[0] if experts is None else experts
    _check_choice(router.shape[0], count, experts_per_token, shared)
    form = _choose_route(implementation, len(x), count, experts_per_token)
    parts = _router_parts(x, router, implementation if product is None else product)
    return _routed(parts, count, experts_per_token, shared, form)


def route(logits, experts_per_token, *, experts=None, shared=False, implementation="auto"):
    """Chooses the experts of every token: the k largest logits, equal ones by lower expert id.

    weights = softmax over all experts, restricted to the chosen and divided by their sum, which
    is the softmax of the chosen logits.

    Args:
      logits:            [T, E] fp32; with `experts`, further columns are behind the first E.
      experts_per_token: k <= E. Static.
      experts:           E, None for all columns. Static.
      shared:            whether column E is the score of an expert of all tokens, which counts its
                         sigmoid. Static.
      implementation:    "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
    Returns:
      Routing.
    Raises: ValueError for shapes, dtypes or k; NotImplementedError if a named kernel lacks them.
    Source: contracts 6.3.6.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits: expected float32 [T, E], got {logits.dtype} {logits.shape}")
    count = logits.shape[1] if experts is None else experts
    _check_choice(logits.shape[1], count, experts_per_token, shared)
    form = _choose_route(implementation, len(logits), count, experts_per_token)
    return _routed(logits[None], count, experts_per_token, shared, form)


def expert_mlp(
    x, routing, gate_up, down, out_dtype, *, scales=(None, None), implementation="auto"
):
    """`expert_parts` of these matrices, added: [T, H] out_dtype."""
    matrices = Matrices(gate_up=gate_up, down=down, gate_up_scale=scales[0], down_scale=scales[1])
    parts = expert_parts(x, routing, matrices, implementation=implementation)
    return added(parts).astype(out_dtype)


def expert_parts(x, routing, matrices, shared=None, *, implementation="auto"):
    """Applies to every token its experts: y = sum_j w_j * down_e (silu(gate_e x) * up_e x).

    Args:
      x:        [T, H] float.
      routing:  Routing of the T tokens.
      matrices: `Matrices` in the dtype of x or float8_e4m3fn.
      shared:   `Matrices` with E = 1 of an expert of all tokens, which counts `routing.shared`;
                its I may differ. None without one.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static. That of
                the routed experts. A kernel's launches also take `shared`, for up to 128 tokens,
                if its I, dtypes and columns of blocks are those of `matrices`. It has no kernel of
                its own: otherwise its two products are XLA's, whatever form the others have.
    Returns:
      [parts, T, H] fp32: y is their sum in this order, so that whoever adds y to something needs no
      launch of its own for it. How many there are depends on the implementation. A token's result
      depends on no other token: dead ones may be NaN.
    Numeric: products and sums in fp32 (fp32 operands: no TF32); the SwiGLU product is rounded to
      the dtype of x; experts are summed best first, in fp32. Float8 as in `block_scaled_linear`.
    Memory: fp32 [T, k, H]. In XLA also fp32 [E, T, max(2I, H)] up to 256 tokens (0.5 GiB for 256
      experts, H 2048), beyond it the matrices of 16 experts; float8: and one matrix a multiplied
      expert in the dtype of x.
    Raises: ValueError for shapes or dtypes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 6.3.6.
    """
    _check_matrices(x, matrices, "")
    if shared is not None:
        _check_matrices(x, shared, "shared.")
    tokens, hidden = x.shape
    _check_routing(routing, tokens, shared)
    form = _choose(implementation, tokens, hidden, matrices)
    if form != "xla" and tokens <= kernel.MAX_TOKENS:
        return _parts_of_few(x, routing, matrices, shared, form == "interpret")
    if form != "xla":
        outputs = sparse_moe_tiles.expert_outputs(
            x, routing.experts, matrices.gate_up, matrices.down, interpret=form == "interpret",
            scales=matrices.scale_values, columns=matrices.columns,
        )
    elif tokens <= _FEW_TOKENS:
        outputs = _all_tokens_of_active_experts(x, routing.experts, matrices)
    else:
        outputs = _tiles_of_experts(x, routing.experts, matrices)
    total = routing.weights[:, 0, None] * outputs[:, 0]
    for choice in range(1, outputs.shape[1]):
        total = total + routing.weights[:, choice, None] * outputs[:, choice]
    if shared is not None:
        total = total + _shared_part(x, routing, shared)
    return total[None]


def _parts_of_few(x, routing, matrices, shared, interpret: bool):
    """By the kernels, which take an expert of all tokens if it is stored like the others."""
    joins = shared is not None and _alike(shared, matrices)
    common = (routing.shared, shared.gate_up, shared.down, shared.scale_values) if joins else None
    parts = kernel.expert_parts(
        x, routing.experts, routing.weights, matrices.gate_up, matrices.down, common,
        interpret=interpret, scales=matrices.scale_values, columns=matrices.columns,
    )
    if joins or shared is None:
        return parts
    return jnp.concatenate([parts, _shared_part(x, routing, shared)[None]])


def _shared_part(x, routing, shared):
    """[T, H] fp32 of the expert of all tokens, in launches of its own."""
    # Apart: XLA would join the router's product with this one, and their matrices every time.
    rows = lax.optimization_barrier(x)[None]
    return routing.shared[:, None] * _swiglu(rows, *shared.of(None, x.dtype))[0]


def _alike(shared, matrices) -> bool:
    """Whether an expert of all tokens is stored like the others."""
    shapes = [
        (m.gate_up.shape[1:], m.down.shape[1:], m.gate_up.dtype, m.down.dtype, m.columns)
        for m in (shared, matrices)
    ]
    return shapes[0] == shapes[1]


def _check_matrices(x, matrices, owner: str) -> None:
    hidden = x.shape[1]
    (experts, rows, inner), down = matrices.down.shape, matrices.down
    if matrices.gate_up.shape != (experts, 2 * inner, hidden) or rows != hidden:
        raise ValueError(
            f"{owner}gate_up, down: expected [E, 2I, {hidden}], [E, {hidden}, I], "
            f"got {matrices.gate_up.shape}, {down.shape}"
        )
    pairs = zip(("gate_up", "down"), (matrices.gate_up, down), matrices.scales, strict=True)
    for name, values, scale in pairs:
        if scale is not None:
            check_scale(values, scale)
        elif values.dtype != x.dtype:
            raise ValueError(f"x: expected dtype {values.dtype} of {owner}{name}, got {x.dtype}")


def _check_routing(routing, tokens: int, shared) -> None:
    experts, weights = routing.experts.shape, routing.weights.shape
    if experts[0] != tokens or weights != experts:
        raise ValueError(f"routing: expected {tokens} tokens, got {experts} with weights {weights}")
    if shared is None:
        return
    if shared.down.shape[0] != 1:
        raise ValueError(f"shared: expected one expert, got {shared.down.shape[0]}")
    if routing.shared is None or routing.shared.shape != (tokens,):
        found = None if routing.shared is None else routing.shared.shape
        raise ValueError(f"routing.shared: expected {(tokens,)} for shared, got {found}")


def _check_choice(columns: int, experts: int, chosen: int, shared: bool) -> None:
    if not 0 < chosen <= experts <= columns - shared:
        raise ValueError(
            f"experts_per_token: expected 1..{experts} of {columns} columns, got {chosen}"
        )


def _choose_route(implementation: str, tokens: int, experts: int, chosen: int) -> str:
    lacking = None if routing_kernel.supports(tokens, experts, chosen) else (
        f"tokens, and at most {routing_kernel.MAX_EXPERTS} experts and {routing_kernel.MAX_CHOSEN} "
        f"of them each; got {tokens} tokens, {experts} and {chosen}"
    )
    return choose_form("route", implementation, lacking, auto_gpu="pallas")


def _router_parts(x, router, implementation: str):
    """[parts, T, E] fp32, whose sum is the product."""
    lacking = None if len(x) else "at least one token, got none"
    auto = "pallas" if len(x) <= _ROUTER_TOKENS else "xla"
    form = choose_form("router", implementation, lacking, auto_gpu=auto)
    if form == "xla":
        return linear(x, router, jnp.float32)[None]
    return routing_kernel.scores(x, router, interpret=form == "interpret")


def _routed(parts, experts: int, chosen: int, shared: bool, form: str) -> Routing:
    """Of [parts, T, >= E] logits."""
    if form != "xla":
        ids, weights, *gate = routing_kernel.route(
            parts, experts=experts, chosen=chosen, gated=shared, interpret=form == "interpret"
        )
        return Routing(experts=ids, weights=weights, shared=gate[0] if shared else None)
    logits = added(parts)
    own = logits[:, :experts]
    best, ids = lax.top_k(jnp.where(own == 0, 0.0, own), chosen)
    return Routing(
        experts=ids, weights=jax.nn.softmax(best, axis=-1),
        shared=jax.nn.sigmoid(logits[:, experts]) if shared else None,
    )


def _choose(implementation: str, tokens: int, hidden: int, matrices: Matrices) -> str:
    inner, columns = matrices.down.shape[2], tuple(c for c in matrices.columns if c)
    lacking = None if kernel.supports(tokens, hidden, inner, columns) else (
        f"tokens, hidden and inner in multiples of 16, and blocks of whole steps; got {tokens} "
        f"tokens, hidden {hidden}, inner {inner}, block columns {columns}"
    )
    if not (addressable(matrices.gate_up) and addressable(matrices.down)):
        shapes = matrices.gate_up.shape, matrices.down.shape
        lacking = f"float8 stacks outside of 2^31 to 2^32 values, got {shapes}"
    return choose_form("sparse_moe", implementation, lacking, auto_gpu="pallas")


def _all_tokens_of_active_experts(x, experts, matrices):
    """[T, k, H] fp32 for few tokens: reads an expert once, and only active ones if that is less."""
    tokens, k = experts.shape
    slot, active = experts, None
    if _COPY_COST * tokens * k <= matrices.gate_up.shape[0]:
        active = jnp.unique(experts, size=tokens * k, fill_value=0)
        slot = jnp.argmax(experts[:, :, None] == active, axis=-1)
    gate_up, down = matrices.of(active, x.dtype)
    rows = jnp.broadcast_to(x, (gate_up.shape[0], *x.shape))
    outputs = _swiglu(rows, gate_up, down)
    return outputs[slot, jnp.arange(tokens)[:, None]]


def _tiles_of_experts(x, experts, matrices):
    """[T, k, H] fp32 for many tokens: tiles of assignments that share an expert."""
    tokens, k = experts.shape
    num_experts, assignments = matrices.gate_up.shape[0], tokens * k
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    tiles = -(-counts // _TILE_ROWS)
    end, tile_end = jnp.cumsum(counts), jnp.cumsum(tiles)
    bound = assignments // _TILE_ROWS + min(num_experts, assignments)

    def step(outputs, tile):
        expert = jnp.searchsorted(tile_end, tile, side="right").astype(jnp.int32)
        expert = jnp.minimum(expert, num_experts - 1)
        number = tile - (tile_end - tiles)[expert]
        place = (end - counts)[expert] + number * _TILE_ROWS
        place = place[:, None] + jnp.arange(_TILE_ROWS, dtype=jnp.int32)
        live = (place < end[expert][:, None]) & (tile < tile_end[-1])[:, None]
        assignment = order[jnp.minimum(place, assignments - 1)]
        result = _swiglu(x[assignment // k], *matrices.of(expert, x.dtype))
        target = jnp.where(live, assignment, assignments)
        return outputs.at[target].set(result, **DROP), None

    steps = -(-bound // _TILES_PER_STEP)
    by_step = jnp.arange(steps * _TILES_PER_STEP, dtype=jnp.int32).reshape(steps, -1)
    empty = jnp.zeros((assignments, x.shape[1]), jnp.float32)
    outputs, _ = lax.scan(step, empty, by_step)
    return outputs.reshape(tokens, k, -1)


def _swiglu(rows, gate_up, down):
    """[n, R, H] fp32 from rows [n, R, H] and one expert a leading index."""
    gate, up = jnp.split(_products(rows, gate_up), 2, axis=-1)
    return _products((jax.nn.silu(gate) * up).astype(rows.dtype), down)


def _products(rows, kernels):
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jnp.einsum(
        "nri,noi->nro", rows, kernels, precision=precision, preferred_element_type=jnp.float32
    )
