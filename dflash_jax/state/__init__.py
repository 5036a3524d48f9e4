"""The state of decoding: frozen pytrees and their local transitions."""
