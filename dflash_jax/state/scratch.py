"""What one round makes and the next forgets."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.state.gdn import GdnRecords


@struct.dataclass
class RoundExtent:
    """Live parts of the physical widths, per row.

    proposals:     [B] int32, P, proposals that may be accepted.
    columns:       [B] int32, Q, target columns that may live: P + 1, W_t where a tree fits, 0 on an
      idle row.
    draft_columns: [B] int32, live draft columns: DFlash Q, DFlash2 W; 0 on an idle row.
    """

    proposals: jax.Array
    columns: jax.Array
    draft_columns: jax.Array


@struct.dataclass
class Proposal:
    """The columns to verify, with the law that drew each. Valid for one (frontier, anchor) only.

    Columns 0..K are the chain, which `propose` walked; the side columns of a tree follow.

    tokens:     [B, cols] int32; column 0 is the anchor, column j proposes position F + depth[j].
    parent:     [B, cols] int32, before the column; column 0 is its own parent, and so are columns
      that do not exist, which come last. On a chain parent[j] = j - 1.
    depth:      [B, cols] int32, distance from the anchor; on a chain depth[j] = j.
    candidates: [B, K, C_sel] int32, candidate ids by position; DFlash: the one proposed id.
    q:          [B, cols - 1, C_sel] fp32; row c - 1 is the law that drew column c.
    """

    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    candidates: jax.Array
    q: jax.Array

    @property
    def nodes(self):
        """[B] int32, columns that exist."""
        columns = jnp.arange(self.parent.shape[1])[None, :]
        return 1 + jnp.sum(self.parent < columns, axis=1, dtype=jnp.int32)


@struct.dataclass
class Verification:
    """One target pass over the columns. Columns >= Q carry no meaning.

    logits:      [B, cols, V] bf16; column j predicts position F + j + 1.
    hidden:      [B, cols, H] bf16, final-normed.
    features:    [B, cols, n_tap * H] bf16, captured residuals in recorded order.
    kv_rows:     per full layer (key, value), each [B, cols, Hkv, D], as the cache stores them.
    gdn_records: per linear layer `GdnRecords`.
    """

    logits: jax.Array
    hidden: jax.Array
    features: jax.Array
    kv_rows: tuple[tuple[jax.Array, jax.Array], ...]
    gdn_records: tuple[GdnRecords, ...]


@struct.dataclass
class Acceptance:
    """What the target licenses.

    accepted: [B] int32, A, proposals accepted, 0..P.
    licensed: [B] int32, L = A + 1; 0 on an idle row.
    outputs:  [B, W] int32: d_1..d_A, the correction or bonus, zeros.
    path:     [B, W] int32, accepted columns from the anchor on; entries past A are never read. W is
      K + 1 for trees too.
    fault:    [B] bool, a column on the path has no finite candidate: the host ends that row, N = 0.
    """

    accepted: jax.Array
    licensed: jax.Array
    outputs: jax.Array
    path: jax.Array
    fault: jax.Array


@struct.dataclass
class RoundScratch:
    """The three results of a round that `commit` reads."""

    proposal: Proposal
    verification: Verification
    acceptance: Acceptance
