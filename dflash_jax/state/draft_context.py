"""The draft's context: rings of its local layers, pages of its full layers."""

from flax import struct

from dflash_jax.config import DraftConfig, LayerKind, RunConfig
from dflash_jax.state.pages import KVPages
from dflash_jax.state.ring import KVRing


@struct.dataclass
class DraftContext:
    """Context K/V built from target features; covers positions below F_ctx.

    rings: one `KVRing` per local layer, in layer order; empty without local layers.
    pages: one `KVPages` per full layer, in layer order; empty without full layers.
    """

    rings: tuple[KVRing, ...]
    pages: tuple[KVPages, ...]

    @classmethod
    def zeros(cls, draft: DraftConfig | None, run: RunConfig) -> "DraftContext":
        if draft is None:
            return cls(rings=(), pages=())
        dtypes = (run.dtypes.activation_dtype, run.dtypes.context_value_dtype)
        ring = (run.slots, draft.kv_heads, draft.window, draft.head_dim)
        pages = (draft.kv_heads, run.pages, run.page_size, draft.head_dim)
        return cls(
            rings=tuple(KVRing.zeros(*ring, *dtypes) for _ in draft.local_layers),
            pages=tuple(KVPages.zeros(*pages, *dtypes) for _ in draft.full_layers),
        )

    def write(self, draft: DraftConfig, layer_rows, slot, table, start, count) -> "DraftContext":
        """Appends columns j < count at positions start + j to every layer.

        layer_rows: per draft layer (key, value), each [B, T, Hkv, D], in layer order.
        """
        rings, pages = list(self.rings), list(self.pages)
        compact = {LayerKind.SLIDING: 0, LayerKind.FULL: 0}
        for kind, (key, value) in zip(draft.layer_types, layer_rows, strict=True):
            index = compact[kind]
            if kind == LayerKind.SLIDING:
                rings[index] = rings[index].write(key, value, slot, start, count)
            else:
                pages[index] = pages[index].write(key, value, table, start, count)
            compact[kind] += 1
        return DraftContext(rings=tuple(rings), pages=tuple(pages))
