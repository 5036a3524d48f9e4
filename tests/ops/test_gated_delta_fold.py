"""The fold of records against verification's own state, bit for bit, and its slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.gated_delta_rule import gated_delta_folds, gated_delta_verify
from dflash_jax.pallas import gated_delta_fold as fold_kernel
from dflash_jax.pallas import gated_delta_rule as kernels
from dflash_jax.state.decode import Rows
from dflash_jax.state.gdn import GdnRecords, GdnState, fold
from tests.ops.gated_delta_inputs import (
    BATCH,
    CHAIN,
    FORMS,
    FORMS_BY_WIDTH,
    KEY_DIM,
    KEY_HEADS,
    POISON,
    TREES,
    VALUE_HEADS,
    WIDTH,
    Columns,
    compiled_fold,
    fold_kept,
    fold_records,
    ints,
    make_columns,
    make_state,
    poisoned,
    records,
    root_paths,
    take_columns,
    verify,
)
from tests.oracles import gated_delta_rule as oracle
from tests.tolerances import FP32, FP32_CHAIN, assert_close, assert_same_bits


def make_inputs(value_dim):
    return make_columns(BATCH, WIDTH, value_dim=value_dim), make_state(BATCH, value_dim=value_dim)


@FORMS
@pytest.mark.parametrize("count", range(WIDTH + 1))
def test_fold_follows_the_recurrence(count, form):
    columns, state = make_columns(BATCH, WIDTH), make_state(BATCH)
    actual = fold_records(columns, state, [count] * BATCH, form=form)
    for b in range(BATCH):
        row = [x[b] for x in columns.all()]
        assert_close(actual[b], oracle.sequence(state[b], *row, count)[1], FP32_CHAIN)


@FORMS
@pytest.mark.parametrize("column", range(WIDTH))
def test_fold_along_a_path_is_the_fold_of_its_records(column, form):
    columns, state = make_columns(BATCH, WIDTH), make_state(BATCH)
    path, depth = root_paths(column)
    kept = records(columns, state, parent=TREES, form=form)
    actual = fold_kept(kept, state, depth, path=path, form=form)
    along = tuple(take_columns(x, path) for x in kept)
    assert_same_bits(actual, fold_kept(along, state, depth, form=form))
    for b in range(BATCH):
        row = [take_columns(x, path)[b] for x in columns.all()]
        assert_close(actual[b], oracle.sequence(state[b], *row, depth[b])[1], FP32_CHAIN)


@FORMS
def test_fold_of_no_record_is_a_strict_no_op(form):
    columns = poisoned(make_columns(BATCH, WIDTH), [0] * BATCH, "nan")
    state = make_state(BATCH)
    state[:, :, 0, :5] = [-0.0, 1e-42, np.inf, -np.inf, np.nan]
    assert_same_bits(fold_records(columns, state, [0] * BATCH, form=form), state)


@FORMS_BY_WIDTH
@pytest.mark.parametrize("width", [WIDTH, 1])
def test_fold_of_m_is_m_folds_of_one_bit_for_bit(width, form, value_dim):
    columns, state = make_inputs(value_dim)
    stepped = state
    for count in range(1, WIDTH + 1):
        one = columns.map(lambda x, at=count - 1: np.roll(x, -at, axis=1)[:, :width])
        stepped = fold_records(one, stepped, [1] * BATCH, form=form)
        whole = fold_records(columns, state, [count] * BATCH, form=form)
        assert_same_bits(whole, stepped)


def test_fold_counts_differ_by_row():
    columns, state, count = make_columns(BATCH, WIDTH), make_state(BATCH), [6, 0, 3, 1, 5]
    mixed = fold_records(columns, state, count)
    for b, own in enumerate(count):
        assert_same_bits(mixed[b], fold_records(columns, state, [own] * BATCH)[b])


@FORMS_BY_WIDTH
@pytest.mark.parametrize("count", range(WIDTH + 1))
def test_fold_is_the_state_of_verification_bit_for_bit(count, form, value_dim):
    """Probes read verification's own state entry by entry, after `count` of its columns."""
    columns, state = make_inputs(value_dim)
    parent = np.maximum(np.arange(WIDTH + KEY_DIM) - 1, 0)
    seen = probe(columns, state, parent, chain=True, form=form, at=count)
    assert_same_bits(seen, fold_records(columns, state, [count] * BATCH, form=form))


@FORMS_BY_WIDTH
@pytest.mark.parametrize("column", range(WIDTH))
def test_fold_along_a_path_is_the_state_of_tree_verification_bit_for_bit(column, form, value_dim):
    columns, state = make_inputs(value_dim)
    parent = [[*tree, *[column] * KEY_DIM] for tree in TREES]
    seen = probe(columns, state, parent, chain=False, form=form, at=WIDTH)
    path, depth = root_paths(column)
    folded = fold_records(columns, state, depth, path=path, parent=TREES, form=form)
    assert_same_bits(seen, folded)


def probe(columns, state, parent, *, chain, at, form="xla"):
    """The state that verification holds at the parent of the probe columns, [B, Hv, Dv, Dk].

    Probes stand before column `at`. They have g = beta = 0 and so move nothing. The query of each
    is one basis vector: its output is one column of the state over sqrt(Dk), a power of two.
    """
    query = np.zeros((BATCH, KEY_DIM, KEY_HEADS, KEY_DIM), columns.query.dtype)
    for i in range(KEY_DIM):
        query[:, i, :, i] = 2.0**10
    probes = Columns(
        query=query,
        key=np.zeros_like(query),
        value=np.zeros_like(columns.value, shape=(BATCH, KEY_DIM, *columns.value.shape[2:])),
        decay=np.zeros((BATCH, KEY_DIM, VALUE_HEADS, 2), np.float32),
    )
    mixed = Columns(
        *(
            np.concatenate([real[:, :at], extra, real[:, at:]], axis=1)
            for real, extra in zip(columns.all(), probes.all(), strict=True)
        )
    )
    width = WIDTH + KEY_DIM
    parent = np.broadcast_to(parent, (BATCH, width))
    out = verify(mixed, state, parent, [width] * BATCH, chain=chain, form=form)
    return np.moveaxis(out[:, at : at + KEY_DIM], 1, -1) * np.float32(KEY_DIM**0.5)


@FORMS_BY_WIDTH
@pytest.mark.parametrize("count", range(WIDTH))
def test_folding_and_continuing_equals_never_having_stopped(count, form, value_dim):
    columns, state = make_inputs(value_dim)
    whole = verify(columns, state, CHAIN, [WIDTH] * BATCH, chain=True, form=form)
    folded = fold_records(columns, state, [count] * BATCH, form=form)
    rest = columns.map(lambda x: np.roll(x, -count, axis=1))
    left = WIDTH - count
    resumed = verify(rest, folded, CHAIN, [left] * BATCH, chain=True, form=form)
    assert_same_bits(resumed[:, :left], whole[:, count:])


def test_fold_continues_verification_where_a_compiler_fuses_products_and_sums():
    """As by default; the other tests are compiled in haste, by emitters that fuse less."""
    options, form = {"compiler_options": {"xla_backend_optimization_level": 3}}, "xla"
    if jax.__version_info__ < (0, 11):  # later versions know no other emitters
        options["compiler_options"]["xla_cpu_use_fusion_emitters"] = True
    columns, state, slot = make_columns(2, 4), make_state(2), ints([0, 1])
    path = np.tile(np.arange(4, dtype=np.int32), (2, 1))
    verified = jax.jit(functools.partial(
        gated_delta_verify, chain=True, implementation=form
    ), **options)
    folded = jax.jit(functools.partial(gated_delta_folds, implementation=form), **options)
    key, decay = columns.read()[1], columns.decay
    whole, delta = verified(*columns.read(), state, slot, CHAIN[:2, :4], ints([4, 4]))
    inputs, conv = (jnp.zeros((2, n, 7), jnp.bfloat16) for n in (4, 3))
    ((moved, _),) = folded(
        ((key, delta, decay, inputs, state, conv),), path, slot, slot, ints([3, 3])
    )
    rest = columns.map(lambda x: np.roll(x, -3, axis=1))
    resumed, _ = verified(*rest.read(), moved, slot, CHAIN[:2, :4], ints([1, 1]))
    assert_same_bits(np.asarray(resumed)[:, 0], np.asarray(whole)[:, 3])


SLOTS = 6
# Rows read these slots and write those: in place, forks, a shared source beside an idle row.
MOVES = pytest.mark.parametrize(
    "read, write", [([4, 0, 2], [4, 0, 2]), ([4, 0, 2], [1, 3, 5]), ([4, 4, 7], [1, 3, 2**31 - 1])]
)


@FORMS
@MOVES
@pytest.mark.parametrize("count", [[5, 0, 2], [0, 1, 6]])
def test_fold_reads_one_slot_and_writes_another(read, write, count, form):
    """Only the written slots of rows with a count change; path entries past it may be anything."""
    columns, pool = make_columns(3, WIDTH), make_state(SLOTS)
    path = np.tile(ints([0, 2, 3, 5, 4, 1]), (3, 1))
    expected = pool.copy()
    states = pool[np.minimum(read, SLOTS - 1)]
    kept_records = records(columns, states, form=form)
    moved = fold_kept(kept_records, states, count, path=path, form=form)
    for b, kept in enumerate(count):
        if kept and write[b] < SLOTS:
            expected[write[b]] = moved[b]
        path[b, kept:] = 10**6
    call = compiled_fold(form)
    slots = ints(read), ints(write)
    actual = np.asarray(call(*kept_records, pool, path, *slots, ints(count)))
    assert_same_bits(actual, expected)


@FORMS
def test_a_row_whose_read_or_write_slot_is_out_of_range_writes_nothing(form):
    """Row 0 writes nowhere, row 1 reads nowhere; row 2 folds as if it were alone. A negative index
    would wrap to another row's slot, or lead a device's store out of the pool."""
    columns, rng = make_columns(3, 2), np.random.default_rng(11)
    pool, conv = make_state(SLOTS), jnp.asarray(rng.normal(size=(SLOTS, 3, 7)), jnp.bfloat16)
    inputs = jnp.asarray(rng.normal(size=(3, 2, 7)), jnp.bfloat16)
    key, delta, decay = records(columns, pool[:3], form=form)
    layers, path = ((key, delta, decay, inputs, jnp.asarray(pool), conv),), [[0, 1]] * 3
    run = jax.jit(functools.partial(gated_delta_folds, layers, implementation=form))
    ((alone, history),) = run(ints(path), ints([0, 0, 2]), ints([0, 0, 1]), ints([0, 0, 2]))
    changed = [np.any(new != old) for new, old in zip(alone, pool, strict=True)]
    assert np.flatnonzero(changed).tolist() == [1]
    for outside in (-1, -2, -SLOTS, -SLOTS - 1, -(2**31), SLOTS, 2**31 - 1):
        slots = ints([3, outside, 2]), ints([outside, 4, 1])
        ((moved, own),) = run(ints(path), *slots, ints([2, 1, 2]))
        assert_same_bits(np.asarray(moved), np.asarray(alone))
        assert_same_bits(np.asarray(own), np.asarray(history))


@FORMS
@MOVES
def test_d7_fold_of_a_layer_moves_its_convolution_history_too(read, write, form):
    """The history is the last three of old history ++ kept inputs, so two keep one old column."""
    count, channels = [5, 0, 2], 7
    columns, rng = make_columns(3, WIDTH), np.random.default_rng(7)
    inputs = rng.standard_normal((3, WIDTH, channels)).astype(jnp.bfloat16)
    conv = rng.standard_normal((SLOTS, 3, channels)).astype(jnp.bfloat16)
    pool, path = make_state(SLOTS), np.tile(ints([0, 2, 3, 5, 4, 1]), (3, 1))
    key, delta, decay = records(columns, pool[:3], form=form)
    (after,) = jax.jit(functools.partial(fold, implementation=form))(
        (GdnState(recurrent=jnp.asarray(pool), conv=jnp.asarray(conv)),),
        (GdnRecords(key=key, delta=delta, decay=decay, conv_input=inputs),),
        Rows(lane=ints(write), read_slot=ints(read), write_slot=ints(write)),
        path,
        ints(count),
    )
    expected = conv.copy()
    for b, kept in enumerate(count):
        if kept and write[b] < SLOTS:
            expected[write[b]] = np.concatenate([conv[read[b]], inputs[b, path[b, :kept]]])[-3:]
    assert_same_bits(np.asarray(after.conv), expected)
    slots = ints(read), ints(write)
    moved = compiled_fold(form)(key, delta, decay, pool, path, *slots, ints(count))
    assert_same_bits(np.asarray(after.recurrent), np.asarray(moved))


@FORMS
def test_layers_of_a_launch_fold_apart(form, monkeypatch):
    """Three layers in launches of up to two: each like alone, and none is left out."""
    monkeypatch.setattr(fold_kernel, "LAYERS", 2)
    rng, count, slots = np.random.default_rng(3), ints([2, 0]), (ints([0, 2]), ints([1, 2]))
    path, layers = np.tile(np.arange(3, dtype=np.int32), (2, 1)), []
    for seed in range(3):
        pool = make_state(3) + np.float32(seed)
        key, delta, decay = records(make_columns(2, 3), pool[:2], form=form)
        inputs, conv = (
            jnp.asarray(rng.normal(size=(*shape, 7)), jnp.bfloat16) for shape in ((2, 3), (3, 3))
        )
        layers.append((key, delta, decay, inputs, jnp.asarray(pool), conv))
    run = jax.jit(functools.partial(gated_delta_folds, implementation=form))
    made = run(tuple(layers), path, *slots, count)
    assert len(made) == 3
    for layer, (recurrent, conv) in zip(layers, made, strict=True):
        ((alone, history),) = run((layer,), path, *slots, count)
        assert_same_bits(np.asarray(recurrent), np.asarray(alone))
        assert_same_bits(np.asarray(conv), np.asarray(history))


@FORMS
@POISON
def test_records_past_the_count_never_leak(poison, form):
    count = [6, 4, 2, 1, 0]
    columns, state = make_columns(BATCH, WIDTH), make_state(BATCH)
    clean = fold_records(columns, state, count, form=form)
    dirty = fold_records(poisoned(columns, count, poison), state, count, form=form)
    assert_same_bits(dirty, clean)


@pytest.mark.parametrize(
    "form, tiles",
    [
        ("interpret", kernels.Tiles(columns=2)),
        pytest.param("pallas", kernels.Tiles(columns=4), marks=pytest.mark.gpu),
        pytest.param("pallas", kernels.Tiles(16, 2, 8, ahead=False), marks=pytest.mark.gpu),
    ],
)
def test_tiles_change_no_output_and_no_state(form, tiles):
    """Columns in one go, and whether a device loads them ahead: bit for bit the same there."""
    count, path = ints([6, 4, 2, 1, 0]), np.tile(np.arange(WIDTH, dtype=np.int32), (BATCH, 1))
    columns, state = poisoned(make_columns(BATCH, WIDTH), count, "nan"), make_state(BATCH)
    slot, same = ints(range(BATCH)), assert_close if form == "interpret" else assert_same_bits
    rows, run = (FP32,) if form == "interpret" else (), {"interpret": form == "interpret"}
    verified, delta = kernels.verify(
        *columns.read(), state, slot, None, count, tiles=tiles, **run
    )
    same(verified, verify(columns, state, CHAIN, count, chain=True, form=form), *rows)
    inputs = jnp.zeros((BATCH, WIDTH, 7), jnp.bfloat16)
    conv = jnp.zeros((BATCH, 3, 7), jnp.bfloat16)
    layer = columns.read()[1], delta, columns.decay, inputs, state, conv
    ((moved, _),) = fold_kernel.fold((layer,), path, slot, slot, count, tiles=tiles, **run)
    same(moved, fold_records(columns, state, count, form=form), *rows)


@pytest.mark.parametrize("form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [3, 5])
def test_a_group_of_columns_that_reaches_past_the_last_one_leaves_it_alone(width, form):
    """One row of an odd width: a device takes its columns by twos."""
    columns, state, live = make_columns(1, width), make_state(1), ints([width])
    how = {"interpret": form == "interpret", "tiles": kernels.Tiles(columns=2)}
    zero = ints([0])
    verified, delta = kernels.verify(*columns.read(), state, zero, None, live, **how)
    expected = verify(columns, state, CHAIN[:1, :width], live, chain=True, form="xla")
    assert_close(verified, expected, FP32)
    inputs, conv = (jnp.zeros((1, n, 7), jnp.bfloat16) for n in (width, 3))
    layer = columns.read()[1], delta, columns.decay, inputs, state, conv
    path = np.arange(width, dtype=np.int32)[None]
    ((moved, _),) = fold_kernel.fold((layer,), path, zero, zero, live, **how)
    assert_close(moved, fold_records(columns, state, live), FP32)


@FORMS
def test_layers_that_a_launch_cannot_hold_are_refused(form):
    """The kernel reads all of them by the sizes of the first."""
    def layer(columns=3, rows=2, slots=3, key_dim=KEY_DIM, channels=7):
        heads = VALUE_HEADS, 16
        return (
            jnp.zeros((rows, columns, KEY_HEADS, key_dim)), jnp.zeros((rows, columns, *heads)),
            jnp.zeros((rows, columns, VALUE_HEADS, 2)),
            jnp.zeros((rows, columns, channels), jnp.bfloat16),
            jnp.zeros((slots, *heads, key_dim)), jnp.zeros((slots, 3, channels), jnp.bfloat16),
        )

    def call(*layers):
        path, slot = np.zeros((2, 3), np.int32), ints([0, 1])
        return gated_delta_folds(layers, path, slot, slot, slot, implementation=form)

    others = layer(4), layer(rows=3), layer(slots=2), layer(key_dim=32), layer(channels=9)
    for other in others:
        with pytest.raises(ValueError, match="layers: expected all like the first, .* at 1"):
            call(layer(), other)
    key, delta, *rest, conv = layer()
    for raw in ((key.astype(jnp.bfloat16), delta), (key, delta.astype(jnp.bfloat16))):
        with pytest.raises(ValueError, match="key, delta: expected float32"):
            call((*raw, *rest, conv))
    with pytest.raises(ValueError, match="same columns"):
        call((key, delta[:1], *rest, conv))
    with pytest.raises(ValueError, match="conv: expected"):
        call((key, delta, *rest, conv[:1]))
    with pytest.raises(ValueError, match="conv_input: expected .2, 3. columns"):
        call((key, delta, rest[0], rest[1][:, :2], rest[2], conv))
