"""A Gated DeltaNet layer between its projections, against float64 written from the formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.gated_delta_block import block_inputs, gated_delta_block
from dflash_jax.ops.gated_delta_rule import gated_delta_fold, unit_vectors
from tests.oracles import causal_conv1d as conv_oracle
from tests.oracles import gated_delta_rule as rule_oracle
from tests.oracles import norm as norm_oracle
from tests.tolerances import BF16_CHAIN, BF16_ROUND, FP32, FP32_CHAIN, as_float64, assert_close

EPS = 1e-6
# Called eagerly, each operation in it would be a program of its own to compile.
whole_layer = jax.jit(
    gated_delta_block, static_argnames=("key_heads", "eps", "chain", "implementation")
)
FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows, columns, heads, head widths and convolution taps of a case."""

    batch: int = 2
    width: int = 5
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    taps: int = 4

    @property
    def keys(self):
        return self.key_heads * self.key_dim

    @property
    def values(self):
        return self.value_heads * self.value_dim


def operands(shape: Shape, dtype, live, *, poison=None, apart=False, seed=0):
    """What the op takes, as a dict; `poison` fills dead columns and slots of no row."""
    rng = np.random.default_rng(seed)
    slots, channels = shape.batch + 2, 2 * shape.keys + shape.values
    slot = rng.permutation(slots)[: shape.batch].astype(np.int32)

    def normal(*sizes):
        return rng.standard_normal(sizes).astype(np.float32)

    projected = normal(shape.batch, shape.width, channels + shape.values + 2 * shape.value_heads)
    conv = normal(slots, shape.taps - 1, channels)
    recurrent = normal(slots, shape.value_heads, shape.value_dim, shape.key_dim)
    if poison is not None:
        projected[np.arange(shape.width)[None, :] >= np.asarray(live)[:, None]] = poison
        others = np.setdiff1d(np.arange(slots), slot)
        conv[others], recurrent[others] = poison, poison
    wide = channels + shape.values
    return {
        "projected": projected[..., :wide] if apart else projected,
        "gates": projected[..., wide:] if apart else None,
        "conv": jnp.asarray(conv.astype(jnp.dtype(dtype))), "taps": normal(channels, shape.taps),
        "a_log": 0.5 * normal(shape.value_heads), "dt_bias": normal(shape.value_heads),
        "weight": normal(shape.value_dim), "recurrent": recurrent, "slot": slot,
        "parent": np.tile(np.maximum(np.arange(shape.width) - 1, 0), (shape.batch, 1)).astype(
            np.int32
        ),
        "live": np.asarray(live, np.int32),
    }


def call(case, shape, form, **changes):
    values = [x if x is None else jnp.asarray(x) for x in (case | changes).values()]
    return whole_layer(
        *values, key_heads=shape.key_heads, eps=EPS, chain=True, implementation=form
    )


def expected(case, shape, dtype):
    """Outputs [B, W, Hv * Dv] and inputs of the live columns, with every named rounding."""
    def rounded(x):
        return as_float64(np.asarray(x, np.float32).astype(jnp.dtype(dtype)))

    channels = 2 * shape.keys + shape.values
    wide = channels + shape.values
    joined = case["projected"] if case["gates"] is None else np.concatenate(
        [case["projected"], case["gates"]], axis=-1
    )
    output = np.zeros((shape.batch, shape.width, shape.values))
    found = []
    for b, live in enumerate(case["live"]):
        u = rounded(joined[b : b + 1, :live, :channels])
        history = as_float64(case["conv"][case["slot"][b]])[None]
        mixed = rounded(conv_oracle.causal_conv1d_silu(
            u, history, case["taps"].astype(np.float64), case["parent"][b : b + 1, :live]
        ))[0]
        query, key = (
            mixed[:, i * shape.keys : (i + 1) * shape.keys].reshape(
                live, shape.key_heads, shape.key_dim
            ) for i in (0, 1)
        )
        value = mixed[:, 2 * shape.keys :].reshape(live, shape.value_heads, shape.value_dim)
        a, b_rows = np.split(joined[b, :live, wide:].astype(np.float64), 2, axis=-1)
        rate = np.exp(case["a_log"].astype(np.float64)) * np.logaddexp(0.0, a + case["dt_bias"])
        decay = np.stack([-rate, 1.0 / (1.0 + np.exp(-b_rows))], axis=-1)
        heads, _ = rule_oracle.sequence(
            case["recurrent"][case["slot"][b]], query, key, value, decay, live
        )
        gate = rounded(joined[b, :live, channels:wide]).reshape(heads.shape)
        closed = norm_oracle.gated_rmsnorm(heads, gate, case["weight"], EPS)
        output[b, :live] = closed.reshape(live, shape.values)
        query, key = rule_oracle.unit(query) / np.sqrt(shape.key_dim), rule_oracle.unit(key)
        found.append({
            "query": query, "key": key, "value": value, "decay": decay, "conv_input": u[0],
        })
    return output, found


def check(case, shape, dtype, form):
    output, inputs, _ = call(case, shape, form)
    assert output.dtype == jnp.dtype(dtype)
    want, records = expected(case, shape, dtype)
    exact = dtype == "float32"
    for b, live in enumerate(case["live"]):
        chain = FP32_CHAIN if exact else BF16_CHAIN
        assert_close(output[b, :live], want[b, :live], chain)
        for name, value in records[b].items():
            tolerance = FP32_CHAIN if exact or name == "decay" else BF16_ROUND
            assert_close(getattr(inputs, name)[b, :live], value, tolerance)
    return output, inputs


@FORMS
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, "float32"), (7, "bfloat16"), (8, "float32"), (9, "bfloat16"), (17, "float32"),
     (33, "bfloat16"), (70, "float32")],
)
def test_outputs_and_records_equal_the_formulas(width, dtype, form):
    """Widths at both sides of the columns of a step and of a program."""
    shape = Shape(width=width)
    live = (width, max(width - 2, 0))
    check(operands(shape, dtype, live), shape, dtype, form)


@FORMS
@pytest.mark.parametrize(
    "shape",
    [
        Shape(taps=3), Shape(taps=2, key_heads=1, value_heads=3), Shape(value_dim=128, key_dim=32),
        Shape(batch=3, width=12, key_heads=4, value_heads=4, key_dim=32, value_dim=16),
        Shape(key_heads=1, value_heads=3, key_dim=64),
    ],
    ids=[
        "three taps", "two taps, three heads a key", "two parts of a head", "a key a head",
        "values that are no multiple of the keys",
    ],
)
def test_any_number_of_taps_and_heads(shape, form):
    live = np.resize([shape.width, 1, 0], shape.batch)
    check(operands(shape, "bfloat16", live, seed=1), shape, "bfloat16", form)


@FORMS
@pytest.mark.parametrize(("width", "poison"), [(11, np.nan), (6, np.inf), (11, -3e38)])
def test_dead_columns_and_slots_of_others_never_matter(width, poison, form):
    shape = Shape(batch=3, width=width)
    live = (3, width, 0)
    clean = call(operands(shape, "bfloat16", live), shape, form)
    output, inputs = check(
        operands(shape, "bfloat16", live, poison=poison), shape, "bfloat16", form
    )
    for b, count in enumerate(live):
        np.testing.assert_array_equal(output[b, :count], clean[0][b, :count])
        for name in ("query", "key", "value", "decay", "conv_input"):
            found, other = (np.asarray(getattr(x, name))[b, :count] for x in (inputs, clean[1]))
            np.testing.assert_array_equal(found, other)


@FORMS
def test_a_prefill_reads_the_same_before_the_norm(form):
    shape = Shape(width=12)
    case = operands(shape, "bfloat16", (12, 12))
    values = (jnp.asarray(case[name]) for name in
              ("projected", "conv", "taps", "a_log", "dt_bias", "slot", "parent"))
    projected, *rest = values
    raw = block_inputs(
        projected, None, *rest, key_heads=shape.key_heads, chain=True, unit=False,
        heads=(shape.value_heads, shape.value_dim, shape.key_dim), implementation=form,
    )
    made = call(case, shape, form)[1]
    assert raw.query.dtype == raw.key.dtype == jnp.bfloat16
    for found, unit in zip(unit_vectors(raw.query, raw.key), (made.query, made.key), strict=True):
        assert_close(unit, as_float64(found), FP32)
    for name in ("value", "decay", "conv_input"):
        np.testing.assert_array_equal(getattr(raw, name), getattr(made, name))


@FORMS
def test_gates_of_their_own_product_are_the_same(form):
    shape = Shape()
    joined = call(operands(shape, "bfloat16", (5, 4)), shape, form)
    apart = call(operands(shape, "bfloat16", (5, 4), apart=True), shape, form)
    np.testing.assert_array_equal(joined[0][0], apart[0][0])


@FORMS
def test_a_projection_in_parts_is_added_before_it_is_rounded(form):
    """In bf16 each part alone would lose what they have in common."""
    shape = Shape()
    case = operands(shape, "bfloat16", (5, 4))
    parts = np.stack([case["projected"] + 64, np.full_like(case["projected"], -64)])
    found, inputs, delta = call(case, shape, form, projected=parts)
    wanted = call(case, shape, form, projected=parts[0] + parts[1])
    for one, other in zip(
        jax.tree.leaves((inputs, delta, found)),
        jax.tree.leaves((wanted[1], wanted[2], wanted[0])), strict=True,
    ):
        np.testing.assert_array_equal(one[0], other[0])


@FORMS
@pytest.mark.parametrize("count", [1, 9])
def test_going_on_from_the_fold_continues_the_chain(count, form):
    """Columns behind the fold of the first `count` equal those of the whole block."""
    shape = Shape(batch=1, width=10)
    case = operands(shape, "float32", (10,))
    whole, inputs, delta = call(case, shape, form)
    rows = jnp.asarray(case["slot"])
    path = jnp.arange(10, dtype=jnp.int32)[None]
    state, conv = gated_delta_fold(
        inputs.key, delta, inputs.decay, inputs.conv_input, jnp.asarray(case["recurrent"]),
        case["conv"], path, rows, rows, jnp.array([count], jnp.int32), implementation=form,
    )
    columns = np.concatenate([case["conv"][rows[0]], inputs.conv_input[0]])
    expected = np.array(case["conv"])
    expected[case["slot"][0]] = columns[count : count + shape.taps - 1]
    np.testing.assert_array_equal(conv, expected)
    rest = 10 - count
    moved = np.roll(case["projected"], -count, axis=1)
    after, *_ = call(
        case, shape, form, projected=moved, recurrent=state, conv=conv,
        live=np.array([rest], np.int32),
    )
    assert_close(after[0, :rest], np.asarray(whole[0, count:], np.float64), FP32_CHAIN)


def test_a_geometry_that_the_kernel_lacks_is_named():
    shape = Shape(taps=1)
    with pytest.raises(NotImplementedError, match="two taps or more.* got taps 1"):
        call(operands(shape, "float32", (5, 5)), shape, "interpret")
    check(operands(shape, "float32", (5, 5)), shape, "float32", "xla")
    shape = Shape(key_heads=1, value_heads=3, value_dim=8)
    with pytest.raises(NotImplementedError, match="multiples of 16 .* key 16, values 24"):
        call(operands(shape, "float32", (5, 5)), shape, "interpret")
    shape = Shape()
    case = operands(shape, "float32", (5, 5))
    with pytest.raises(ValueError, match="projected: expected 328 rows of which 192 are convolved"):
        call(case, shape, "xla", projected=case["projected"][..., :-1])


@FORMS
def test_rows_that_are_no_parts_of_the_columns_are_refused(form):
    shape = Shape()
    case = operands(shape, "float32", (5, 5), apart=True)
    projected, gates = (jnp.asarray(case[name]) for name in ("projected", "gates"))
    wrong = [{"projected": x} for x in (
        projected[0], projected[:, :4], projected[None][:0], projected[None, None],
        projected.astype(jnp.bfloat16),
    )] + [{"gates": x} for x in (
        gates[..., :-1], gates[:, :4], gates[None][:0], gates[0], gates.astype(jnp.bfloat16),
    )]
    for operand in wrong:
        with pytest.raises(ValueError, match=f"{[*operand][0]}: expected float32 .2, 5, "):
            call(case, shape, form, **operand)
