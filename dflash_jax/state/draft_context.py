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

    def stores(self, draft: DraftConfig) -> tuple[KVRing | KVPages, ...]:
        """One store per draft layer, in layer order."""
        rings, pages = iter(self.rings), iter(self.pages)
        return tuple(
            next(rings if kind == LayerKind.SLIDING else pages) for kind in draft.layer_types
        )

    def with_stores(self, draft: DraftConfig, pairs) -> "DraftContext":
        """The same context with other (key, value) arrays, one pair per draft layer."""
        stores = [
            store.replace(key=key, value=value)
            for store, (key, value) in zip(self.stores(draft), pairs, strict=True)
        ]
        by_kind = list(zip(draft.layer_types, stores, strict=True))
        return DraftContext(
            rings=tuple(store for kind, store in by_kind if kind == LayerKind.SLIDING),
            pages=tuple(store for kind, store in by_kind if kind != LayerKind.SLIDING),
        )
