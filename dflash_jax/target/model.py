"""The target as a whole: embedding, blocks, residual capture, final norm, head."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from dflash_jax.config import DtypePolicy, LayerKind, TargetConfig
from dflash_jax.config.block_scaled import DENSE_MATRICES
from dflash_jax.layers import RMSNorm, SwiGlu, matrix_init
from dflash_jax.ops.linear import linear
from dflash_jax.ops.softmax_attention import ancestor_mask
from dflash_jax.state.gdn import GdnRecords, GdnState
from dflash_jax.state.target import TargetState
from dflash_jax.target.attention import GatedAttention
from dflash_jax.target.delta_net import GatedDeltaNet
from dflash_jax.target.moe import SparseMoe


@struct.dataclass
class TargetColumns:
    """Where the columns of one target pass stand.

    positions:  [B, W, 3] int32, rotation positions (time, height, width); equal for text.
    frontier:   [B] int32, F: committed context that every column sees.
    live:       [B] int32, columns that exist; they come first.
    parent:     [B, W] int32, column 0 is its own parent; on a chain parent[j] = j - 1.
    table:      [B, max_pages] int32, the rows' pages.
    slot:       [B] int32, state images to read.
    chain:      promises parent[j] = j - 1. Static.
    """

    positions: jax.Array
    frontier: jax.Array
    live: jax.Array
    parent: jax.Array
    table: jax.Array
    slot: jax.Array
    chain: bool = struct.field(pytree_node=False)

    @classmethod
    def chained(cls, *, positions, frontier, live, table, slot) -> "TargetColumns":
        """Columns in a row, each after the one before."""
        batch, width = positions.shape[:2]
        parent = jnp.maximum(jnp.arange(width, dtype=jnp.int32) - 1, 0)
        return cls(
            positions=positions, frontier=frontier, live=live, table=table, slot=slot,
            parent=jnp.broadcast_to(parent, (batch, width)), chain=True,
        )

    @classmethod
    def tree(cls, *, positions, frontier, live, table, slot, parent) -> "TargetColumns":
        """Columns of a tree: each sees its ancestors and follows its parent."""
        return cls(
            positions=positions, frontier=frontier, live=live, table=table, slot=slot,
            parent=parent, chain=False,
        )

    @property
    def block_mask(self):
        """Visibility inside the block: "causal" on a chain, else [B, W, W] bool of ancestors."""
        return "causal" if self.chain else ancestor_mask(self.parent)


@struct.dataclass
class TargetOutput:
    """What one pass makes; nothing of it is state yet.

    hidden:    [B, W, H], final-normed.
    features:  [B, W, n_tap * H], residuals after the captured blocks, in recorded order.
    kv_rows:   per full layer (key, value), each [B, W, Hkv, D].
    gdn:       per linear layer `GdnRecords` (verify) or the `GdnState` image of B rows (prefill).
    """

    hidden: jax.Array
    features: jax.Array
    kv_rows: tuple[tuple[jax.Array, jax.Array], ...]
    gdn: tuple[GdnRecords | GdnState, ...]


class TargetBlock(nn.Module):
    """x += mixer(norm(x)); x += ffn(norm(x)). Residual in the activation dtype.

    Each norm first adds the branch before it, so the last branch is handed to the next block.
    """

    config: TargetConfig
    dtypes: DtypePolicy
    layer: int
    implementation: str

    def setup(self):
        config, place = self.config, (self.config, self.dtypes, self.layer, self.implementation)
        self.kind = config.layer_types[self.layer]
        self.input_norm = RMSNorm(config.hidden, config.norm_eps, offset=True)
        self.post_norm = RMSNorm(config.hidden, config.norm_eps, offset=True)
        if self.kind == LayerKind.FULL:
            self.attention = GatedAttention(*place)
        else:
            self.delta_net = GatedDeltaNet(*place)
        if config.moe is not None:
            self.moe = SparseMoe(*place)
        else:
            blocks = tuple(config.fp8_block(self.layer, name) for name in DENSE_MATRICES)
            self.mlp = SwiGlu(
                config.hidden, config.intermediate, self.dtypes.param_dtype, blocks=blocks
            )

    def __call__(self, x, branch, columns: TargetColumns, memory, *, records: bool):
        """Runs on the residual x + branch and this layer's `KVPages` or `GdnState`.

        Returns: x and branch of the next block, which may be in parts (`add_rmsnorm`), this layer's
        rows, records or new image, and x + branch.
        """
        x, normed = self.input_norm.after(x, branch, self.implementation)
        before = x
        if self.kind == LayerKind.FULL:
            mixed, kept = self.attention(normed, columns, memory, prefill=not records)
        elif records:
            mixed, kept = self.delta_net.verify(normed, columns, memory)
        else:
            mixed, kept = self.delta_net.prefill(normed, columns, memory)
        x, normed = self.post_norm.after(x, mixed, self.implementation)
        products = self.implementation if records else "xla"  # a long chunk's have no kernel
        if self.config.moe is None:
            return x, self.mlp.parts(normed, products), kept, before
        return x, self.moe(normed, products=products), kept, before


class Target(nn.Module):
    """The Qwen3.5 hybrid. `capture` lists the blocks whose residual becomes the feature.

    Source: contracts 4.1 and 6.3.
    """

    config: TargetConfig
    dtypes: DtypePolicy
    capture: tuple[int, ...] = ()
    implementation: str = "auto"

    def setup(self):
        config, param = self.config, self.dtypes.param_dtype
        matrix = (config.vocab_rows, config.hidden)
        self.embedding = self.param("embedding", matrix_init, matrix, param)
        if not config.tie_embeddings:
            self.head = self.param("head", matrix_init, matrix, param)
        self.layers = [
            TargetBlock(config, self.dtypes, layer, self.implementation)
            for layer in range(config.num_layers)
        ]
        self.final_norm = RMSNorm(config.hidden, config.norm_eps, offset=True)

    def embed(self, tokens):
        """[B, W] int32 ids in [0, V) -> [B, W, H], unscaled rows."""
        return self.embedding[tokens].astype(self.dtypes.activation_dtype)

    def head_matrix(self):
        """[V, H]: the output head, which is the embedding when the two are tied."""
        return self.embedding if self.config.tie_embeddings else self.head

    def logits(self, hidden):
        """[..., H] final-normed -> [..., V] in the logits dtype; rows >= V_pub included."""
        return linear(hidden, self.head_matrix(), self.dtypes.logits_dtype)

    def verify(self, embedded, columns: TargetColumns, state: TargetState) -> TargetOutput:
        """One pass over [B, W, H] columns that keeps records and changes no state."""
        return self._run(embedded, columns, state, records=True)

    def prefill(self, embedded, columns: TargetColumns, state: TargetState) -> TargetOutput:
        """One pass over a [B, T, H] chunk that returns the rows' new GDN images."""
        return self._run(embedded, columns, state, records=False)

    def _run(self, embedded, columns, state, *, records):
        kv_rows, gdn, residuals = [], [], []
        x, branch = embedded, None
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            kept = kv_rows if kind == LayerKind.FULL else gdn
            memory = (state.kv if kind == LayerKind.FULL else state.gdn)[len(kept)]
            x, branch, made, before = layer(x, branch, columns, memory, records=records)
            kept.append(made)
            residuals.append(before)
        last, hidden = self.final_norm.after(x, branch, self.implementation)
        # A block's branch is added by the norm behind it.
        behind = [*residuals[1:], last]
        captured = [behind[index] for index in self.capture]
        features = jnp.concatenate(captured, axis=-1) if captured else x[..., :0]
        return TargetOutput(
            hidden=hidden, features=features, kv_rows=tuple(kv_rows), gdn=tuple(gdn)
        )
