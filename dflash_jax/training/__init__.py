"""Fitting targets and drafts in JAX: corpus, captured features, losses, the optimiser's loop."""
