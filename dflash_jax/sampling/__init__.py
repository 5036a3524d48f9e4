"""Random numbers, sampling parameters and the processed target distribution."""
