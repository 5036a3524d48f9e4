"""Hugging Face files <-> params."""
