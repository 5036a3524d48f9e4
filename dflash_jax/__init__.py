"""DFlash and DFlash2 speculative decoding for Qwen3.5-family hybrid targets in JAX."""
