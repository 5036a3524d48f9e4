"""The candidate selector of DFlash2: pairwise scores and the conditional walk."""

import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.config import DraftConfig, DtypePolicy
from dflash_jax.layers import Linear, matrix_init
from dflash_jax.ops.candidate_selector import edge_scores, select


class CandidateSelector(nn.Module):
    """E_i[p, c] = u_i[c] + sum_r predecessor[p, r] g_i[r] successor[c, r]; see contracts 5.9."""

    config: DraftConfig
    dtypes: DtypePolicy
    implementation: str = "auto"

    def setup(self):
        config, param = self.config, self.dtypes.param_dtype
        rank = config.selector.rank
        self.projection = Linear(rank, config.hidden, param)
        codebook = (config.vocab_rows, rank)
        self.predecessor = self.param("predecessor", matrix_init, codebook, param)
        self.successor = self.param("successor", matrix_init, codebook, param)

    def edges(self, hidden, unary, candidates, anchor):
        """[B, K, H], top-k scores and ids [B, K, C], anchor [B] -> E [B, K, C, C] fp32."""
        query = self.projection(hidden, self.dtypes.activation_dtype)
        return edge_scores(unary, candidates, anchor, query, self.predecessor, self.successor)

    def __call__(self, hidden, unary, candidates, anchor, temperature, uniforms):
        """Walks left to right; temperature [B] and uniforms [B, K] fp32 -> `Walk`."""
        query = self.projection(hidden, self.dtypes.activation_dtype)
        return select(
            unary, candidates, anchor, query, self.predecessor, self.successor,
            temperature.astype(jnp.float32), uniforms.astype(jnp.float32),
            implementation=self.implementation,
        )
