"""Target features of token sequences, through the prefill path, kept on the device or on disk."""

import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dflash_jax.config import DtypePolicy, TargetConfig
from dflash_jax.training.forward import target_forward
from dflash_jax.training.results import replacing, seal, unseal


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def capture_batch(config: TargetConfig, dtypes: DtypePolicy, layer_ids, params, tokens):
    """Features of [N, T] int32 tokens from position 0: [N, T, len(layer_ids) * H]."""
    return target_forward(config, dtypes, params, tokens, capture=layer_ids).features


def capture(
    config: TargetConfig, dtypes: DtypePolicy, layer_ids: tuple[int, ...], params, tokens, *,
    batch: int, folder: str | Path | None = None,
):
    """Features of every sequence, on the default device.

    Args:
      params: the target module's variables, in the policy's dtypes.
      tokens: [N, T] int32; N a multiple of batch.
      batch: sequences per pass.
      folder: a cache: read when it holds features of just this call, else written.
    Returns:
      [N, T, n_tap * H] in the activation dtype.
    Raises: ValueError for shapes, block ids out of range, or a damaged cache.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or len(tokens) % batch:
        raise ValueError(f"tokens: expected [N, T] with N a multiple of {batch}, "
                         f"got {tokens.shape}")
    identity = {} if folder is None else _identity(config, dtypes, layer_ids, params, tokens)
    if folder is not None and (found := _cached(Path(folder), identity)) is not None:
        return jnp.asarray(found)
    # One at a time: queued executions can deadlock in the thread pool of XLA's CPU client.
    parts = [
        jax.block_until_ready(
            capture_batch(config, dtypes, layer_ids, params, jnp.asarray(tokens[i : i + batch]))
        )
        for i in range(0, len(tokens), batch)
    ]
    features = jnp.concatenate(parts)
    if folder is not None:
        _store(Path(folder), identity, np.asarray(features))
    return features


def _identity(config, dtypes, layer_ids, params, tokens) -> dict:
    digest = hashlib.sha256(tokens.tobytes())
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return {
        "layer_ids": list(layer_ids), "dtype": dtypes.activation, "shape": list(tokens.shape),
        "layers": config.num_layers, "sha256 of weights and tokens": digest.hexdigest(),
    }


def _cached(folder: Path, identity: dict) -> np.ndarray | None:
    """The stored features, or None when the folder is absent or of another call."""
    if not folder.exists() or unseal(folder)["identity"] != identity:
        return None
    stored = np.load(folder / "features.npy", allow_pickle=False)
    dtype = json.loads((folder / "dtype.json").read_text("utf-8"))
    return stored.view(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))


def _store(folder: Path, identity: dict, features: np.ndarray) -> None:
    with replacing(folder, need_bytes=features.nbytes) as partial:
        # NumPy files know no bfloat16: the bytes are stored as integers.
        plain = features.view(f"u{features.dtype.itemsize}")
        np.save(partial / "features.npy", plain, allow_pickle=False)
        (partial / "dtype.json").write_text(json.dumps(str(features.dtype)), encoding="utf-8")
        seal(partial, {"identity": identity})
