"""The proposal head: the target's full head, or the draft's own rows with a token-id map."""

import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.config import DraftConfig, DtypePolicy
from dflash_jax.layers import matrix_init
from dflash_jax.ops.vocab import linear_argmax, linear_topk


class ProposalHead(nn.Module):
    """Scores mask hidden columns. With head_rows = 0 it owns nothing and uses the target's head.

    kernel [rows, H] and token_ids [rows] int32 exist only for an indexed head; ids are distinct
    public ids, ascending for DFlash2. Source: contracts 5.7 and 5.8.
    """

    config: DraftConfig
    dtypes: DtypePolicy
    implementation: str = "auto"

    def setup(self):
        rows = self.config.head_rows
        if rows:
            shape = (rows, self.config.hidden)
            self.kernel = self.param("kernel", matrix_init, shape, self.dtypes.param_dtype)
            self.token_ids = self.param(
                "token_ids", lambda key, count: jnp.arange(count, dtype=jnp.int32), rows
            )

    def argmax(self, hidden, target_head, public_vocab: int):
        """[B, K, H] -> token ids [B, K]: logits rounded first, ties to the lowest head row."""
        logits_dtype = self.dtypes.logits_dtype
        if not self.config.head_rows:
            return linear_argmax(
                hidden, target_head, public_rows=public_vocab, logits_dtype=logits_dtype,
                implementation=self.implementation,
            )
        row = linear_argmax(
            hidden, self.kernel, public_rows=self.config.head_rows, logits_dtype=logits_dtype,
            implementation=self.implementation,
        )
        return self.token_ids[row]

    def topk(self, hidden, target_head, public_vocab: int):
        """[B, K, H] -> `TopK` of the C_sel best: fp32 scores, ties to the lowest global id."""
        k = self.config.selector.num_candidates
        if not self.config.head_rows:
            return linear_topk(
                hidden, target_head, k=k, public_rows=public_vocab,
                implementation=self.implementation,
            )
        return linear_topk(
            hidden, self.kernel, k=k, public_rows=self.config.head_rows, token_ids=self.token_ids,
            ids_sorted=True, implementation=self.implementation,
        )
