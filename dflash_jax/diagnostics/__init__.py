"""What a round says about its draft. Nothing here is computed unless it is called."""

from dflash_jax.diagnostics.acceptance import RoundCounters, expected_acceptance

__all__ = ["RoundCounters", "expected_acceptance"]
