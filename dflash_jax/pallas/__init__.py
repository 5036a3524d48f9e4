"""Pallas GPU kernels; they know jax only. One file an op, with the op's stem."""
