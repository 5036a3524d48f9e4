"""The drafts: a stack of layers over one block, with or without convolution, and their heads."""

import jax
from flax import linen as nn
from flax import struct

from dflash_jax.config import DraftConfig, DraftKind, DtypePolicy, LayerKind
from dflash_jax.draft.attention import DraftAttention, DraftColumns
from dflash_jax.draft.context import ContextProjection
from dflash_jax.draft.conv import GroupedConv
from dflash_jax.draft.head import ProposalHead
from dflash_jax.draft.selector import CandidateSelector
from dflash_jax.layers import RMSNorm, SwiGlu, matrix_init
from dflash_jax.ops.norm import add_branch
from dflash_jax.state.draft_context import DraftContext


@struct.dataclass
class DraftOutput:
    """One block forward.

    hidden:    [B, K, H], final-normed mask columns (the anchor column is not read).
    residuals: per layer [B, W, H], the residual after it.
    """

    hidden: jax.Array
    residuals: tuple[jax.Array, ...]


class DraftLayer(nn.Module):
    """Attention and SwiGLU branches; DFlash2 convolves both (contracts 5.4 and 5.5).

    A norm of DFlash first adds the branch before it, so the last branch is handed to the next
    layer. DFlash2 adds inside its convolutions and hands over None.
    """

    config: DraftConfig
    dtypes: DtypePolicy
    layer: int
    implementation: str

    def setup(self):
        config, dtypes = self.config, self.dtypes
        self.input_norm = RMSNorm(config.hidden, config.norm_eps, offset=False)
        self.post_norm = RMSNorm(config.hidden, config.norm_eps, offset=False)
        self.attention = DraftAttention(config, dtypes, self.layer, self.implementation)
        self.mlp = SwiGlu(
            config.hidden, config.intermediate, dtypes.param_dtype,
            rounded=config.kind == DraftKind.DFLASH,
        )
        if config.kind == DraftKind.DFLASH2:
            self.attention_conv = GroupedConv(config, dtypes, self.implementation)
            self.mlp_conv = GroupedConv(config, dtypes, self.implementation)

    def __call__(self, x, branch, columns: DraftColumns, store):
        """Residual x + branch [B, W, H] and this layer's ring or pages (read only) -> x, branch."""
        if self.config.kind == DraftKind.DFLASH2:
            return self._convolved(x, columns, store), None
        x, normed = self.input_norm.after(x, branch, self.implementation)
        mixed = self.attention(normed, columns, store)
        y, normed = self.post_norm.after(x, mixed, self.implementation)
        return y, self.mlp.parts(normed, self.implementation)

    def _convolved(self, x, columns, store):
        branch = self.attention_conv.prepare(x, self.input_norm.weight)
        mixed = self.attention(branch.prepared, columns, store)
        y = self.attention_conv.finish(x, mixed, branch.finish_delta)
        branch = self.mlp_conv.prepare(y, self.post_norm.weight)
        mixed = self.mlp.parts(branch.prepared, self.implementation)
        return self.mlp_conv.finish(y, mixed, branch.finish_delta)


class DFlash(nn.Module):
    """Proposes every mask column at once; its proposal law is a point mass.

    Source: the DFlash reference document; contracts 5.
    """

    config: DraftConfig
    dtypes: DtypePolicy
    implementation: str = "auto"

    def setup(self):
        config, dtypes = self.config, self.dtypes
        self.context = ContextProjection(config, dtypes, self.implementation)
        self.layers = [
            DraftLayer(config, dtypes, layer, self.implementation)
            for layer in range(config.draft_layers)
        ]
        self.final_norm = RMSNorm(config.hidden, config.norm_eps, offset=False)
        self.head = ProposalHead(config, dtypes, self.implementation)
        if config.own_embedding:
            shape = (config.vocab_rows, config.hidden)
            self.embedding = self.param("embedding", matrix_init, shape, dtypes.param_dtype)

    def embed(self, tokens, target_embedding):
        """[B, W] int32 -> [B, W, H]: unscaled rows of the target, or of the draft's own table."""
        table = self.embedding if self.config.own_embedding else target_embedding
        return table[tokens].astype(self.dtypes.activation_dtype)

    def context_kv(self, features, positions):
        """[B, T, n_tap * H] at cache positions [B, T] -> per layer (key, value) rows to store."""
        return self.context(features, positions)

    def store_context(self, features, context: DraftContext, slot, table, start, count):
        """The `DraftContext` with features [B, T, n_tap * H] of positions start + j, j < count."""
        return self.context.store(features, context, slot, table, start, count)

    def block_hidden(self, embedded, columns: DraftColumns, context: DraftContext) -> DraftOutput:
        """The block [B, W, H] over the context, which is read only."""
        x, branch, residuals = embedded, None, []
        rings, pages = iter(context.rings), iter(context.pages)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            store = next(rings if kind == LayerKind.SLIDING else pages)
            x, branch = layer(x, branch, columns, store)
            residuals.append(x if branch is None else add_branch(x, branch))
        hidden = self.normalize(x, branch)[:, 1:]
        return DraftOutput(hidden=hidden, residuals=tuple(residuals))

    def normalize(self, x, branch=None):
        """Final plain norm of the residual x + branch, rounded to the activation dtype."""
        return self.final_norm.after(x, branch, self.implementation)[1]

    def argmax(self, hidden, target_head, public_vocab: int):
        """Mask hidden [B, K, H] -> proposed ids [B, K]."""
        return self.head.argmax(hidden, target_head, public_vocab)


class DFlash2(DFlash):
    """DFlash with convolutions and a selector that walks the candidate lattice."""

    def setup(self):
        super().setup()
        self.selector = CandidateSelector(self.config, self.dtypes, self.implementation)

    def topk(self, hidden, target_head, public_vocab: int):
        """Mask hidden [B, K, H] -> `TopK` candidates."""
        return self.head.topk(hidden, target_head, public_vocab)

    def edges(self, hidden, candidates, anchor):
        """`TopK` candidates after anchor [B] -> the lattice E [B, K, C, C] fp32."""
        return self.selector.edges(hidden, candidates.scores, candidates.ids, anchor)

    def select(self, hidden, candidates, anchor, temperature, uniforms):
        """`TopK` candidates -> the `Walk`: ranks, tokens and the law of every step."""
        return self.selector(
            hidden, candidates.scores, candidates.ids, anchor, temperature, uniforms
        )


def build_draft(
    config: DraftConfig, dtypes: DtypePolicy, implementation: str = "auto"
) -> DFlash | DFlash2:
    """The module that a config asks for; `implementation` as in `RunConfig`."""
    module = DFlash if config.kind == DraftKind.DFLASH else DFlash2
    return module(config, dtypes, implementation)
