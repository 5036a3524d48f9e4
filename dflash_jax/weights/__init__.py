"""Model folders <-> params.

Reading: `load_target`, `load_draft` (strict, streaming, Hugging Face files or converted weights),
`read_target_config`, `read_draft_config`, `inspect_folder` (headers alone). Proposal heads:
`indexed_head` attaches rows, `use_proposal_head` those of the draft's folder. Writing: `export.py`
(Hugging Face files), `conversion.py` (orbax), `to_hf.py` (drafts back); random ones: `init.py`.
"""

from dflash_jax.weights.convert import load_draft, load_target
from dflash_jax.weights.files import WeightsError
from dflash_jax.weights.heads import indexed_head
from dflash_jax.weights.hf_config import read_target_config
from dflash_jax.weights.hf_draft_config import read_draft_config
from dflash_jax.weights.inspect import inspect_folder
from dflash_jax.weights.proposal_head import use_proposal_head

__all__ = [
    "WeightsError",
    "indexed_head",
    "inspect_folder",
    "load_draft",
    "load_target",
    "read_draft_config",
    "read_target_config",
    "use_proposal_head",
]
