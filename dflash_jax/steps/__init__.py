"""The steps of one round, in the order of the chart: each is a pure function of pytrees."""

from dflash_jax.steps.accept import accept
from dflash_jax.steps.accept_tree import accept_tree
from dflash_jax.steps.advance import advance, empty_scratch
from dflash_jax.steps.commit import commit
from dflash_jax.steps.loop import RoundLog, decode_rounds
from dflash_jax.steps.materialize import materialize
from dflash_jax.steps.models import Models, Params
from dflash_jax.steps.prefill import Admission, PrefillChunk, begin, first_token, prefill_chunk
from dflash_jax.steps.propose import propose
from dflash_jax.steps.round import draft_only, judge, speculate
from dflash_jax.steps.tree import build_tree
from dflash_jax.steps.verify import verify

__all__ = [
    "Admission",
    "Models",
    "Params",
    "PrefillChunk",
    "RoundLog",
    "accept",
    "accept_tree",
    "advance",
    "begin",
    "build_tree",
    "commit",
    "decode_rounds",
    "draft_only",
    "empty_scratch",
    "first_token",
    "judge",
    "materialize",
    "prefill_chunk",
    "propose",
    "speculate",
    "verify",
]
