"""Hugging Face files <-> params.

Reading: `load_target`, `load_draft` (strict, streaming), `read_target_config`,
`read_draft_config`; `indexed_head` attaches a reduced proposal head. Writing: `export.py`; random
parameters: `init.py`.
"""

from dflash_jax.weights.convert import load_draft, load_target
from dflash_jax.weights.files import WeightsError
from dflash_jax.weights.heads import indexed_head
from dflash_jax.weights.hf_config import read_target_config
from dflash_jax.weights.hf_draft_config import read_draft_config

__all__ = [
    "WeightsError",
    "indexed_head",
    "load_draft",
    "load_target",
    "read_draft_config",
    "read_target_config",
]
