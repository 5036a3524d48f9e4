"""Closed mathematics on arrays: one contract a file, arrays in, arrays out, no model words.

Import the module of the op (`from dflash_jax.ops import norm`); nothing is re-exported here.
"""
