"""The drafts: DFlash (argmax per position) and DFlash2 (convolution and candidate selector)."""

from dflash_jax.draft.attention import block_positions
from dflash_jax.draft.model import DFlash, DFlash2, DraftColumns, DraftOutput, build_draft

__all__ = ["DFlash", "DFlash2", "DraftColumns", "DraftOutput", "block_positions", "build_draft"]
