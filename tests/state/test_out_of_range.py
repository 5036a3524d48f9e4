"""An index out of range, negative or not, writes no byte of any store and reads an idle row.

jax takes -1 for the last slot, lane, page or id, also where a write drops what is out of range.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import GdnConfig
from dflash_jax.state.gdn import GdnState
from dflash_jax.state.pages import KVPages, PageTable
from dflash_jax.state.pending import PendingFeatures
from dflash_jax.state.ring import KVRing
from dflash_jax.state.sequence import SequenceState
from tests.cases import outside
from tests.tolerances import assert_same_bits

SIZE, VOCAB = 3, 5
GDN = GdnConfig(key_heads=1, value_heads=2, key_dim=3, value_dim=2, conv_kernel=3)


def ints(*values):
    return jnp.array(np.array(values, np.int32))


def filled(store):
    """NaN in every float, 9 in every number, no mark."""
    def leaf(x):
        return jnp.full_like(x, 0 if x.dtype == bool else 9 if x.dtype.kind in "iu" else jnp.nan)

    return jax.tree.map(leaf, store)


def sequence():
    return filled(SequenceState.zeros(SIZE, VOCAB))


# Each store, and its write of ones for two rows: the first at `index`, the second at 1.


def gdn(index):
    store = filled(GdnState.zeros(SIZE, GDN, jnp.float32))
    image = jax.tree.map(lambda x: jnp.ones((2, *x.shape[1:])), store)
    return store, store.put(ints(index, 1), image, ints(1, 1))


def ring(index):
    store = filled(KVRing.zeros(SIZE, 1, 4, 2, jnp.float32, jnp.float32))
    new = jnp.ones((2, 2, 1, 2))
    return store, store.write(new, new, ints(index, 1), ints(0, 0), ints(2, 2))


def pages(index):
    store = filled(KVPages.zeros(1, SIZE, 2, 2, jnp.float32, jnp.float32))
    new = jnp.ones((2, 2, 1, 2))
    after = store.write(new, new, ints([index], [1]), ints(0, 0), ints(2, 2))
    return jax.tree.map(lambda x: x[0], (store, after))


def pending(index):
    store = filled(PendingFeatures.zeros(SIZE, 2, 2, jnp.float32))
    return store, store.put(ints(index, 1), jnp.ones((2, 2, 2)), ints(2, 2))


def numbers(index):
    return sequence(), sequence().put(ints(index, 1), jnp.array([True, True]), anchor=ints(1, 1))


def counts(index):
    return sequence(), sequence().count_tokens(ints(index, 1), ints([1, 2], [3, 4]), ints(2, 2))


def marks(index):
    return sequence(), sequence().mark_prompt(ints(index, 1), ints([1, 2], [3, 4]), ints(2, 2))


@pytest.mark.parametrize("index", outside(SIZE))
@pytest.mark.parametrize("write", [gdn, ring, pages, pending, numbers, counts, marks])
def test_a_row_out_of_range_writes_nothing_beside_one_that_writes(write, index):
    before, after = (jax.tree.map(np.asarray, store) for store in write(index))
    others = [0, 2]
    jax.tree.map(lambda new, old: assert_same_bits(new[others], old[others]), after, before)
    written = jax.tree.map(lambda new, old: new[1].tobytes() != old[1].tobytes(), after, before)
    assert any(jax.tree.leaves(written))


@pytest.mark.parametrize("index", outside(VOCAB))
def test_ids_out_of_range_are_neither_counted_nor_marked(index):
    before, tokens = SequenceState.zeros(SIZE, VOCAB), ints([index, 2])
    assert before.count_tokens(ints(1), tokens, ints(2)).counts.sum(0).tolist() == [0, 0, 1, 0, 0]
    assert before.mark_prompt(ints(1), tokens, ints(2)).prompt_seen.sum() == 1


@pytest.mark.parametrize("index", outside(SIZE))
def test_a_row_out_of_range_reads_zero_numbers_and_a_table_that_exists(index):
    rows = sequence().gather(ints(index, 1))
    for leaf in jax.tree.leaves(rows):
        assert not leaf[0].any() and (leaf.dtype == bool or leaf[1].all())
    assert sequence().live(ints(index, 1)).tolist() == [False, True]
    table = PageTable(ids=ints([4, 5], [6, 7], [8, 9]))
    idle, mapped = table.rows(ints(index, 1)).tolist()
    assert idle in table.ids.tolist() and mapped == [6, 7]


def test_no_write_of_the_package_drops_at_one_end_only(repository_root):
    """jax's bare mode="drop" is the mistake that this file is about."""
    files = sorted((repository_root / "dflash_jax").rglob("*.py"))
    bare = [file.name for file in files if 'mode="drop"' in file.read_text("utf-8")]
    assert bare == [] and files
