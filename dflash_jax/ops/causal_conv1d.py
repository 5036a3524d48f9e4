"""Short causal convolution of the gated delta net, along a chain or along a tree of columns."""

import jax
import jax.numpy as jnp


def causal_conv1d_silu(u, history, taps, parent, *, chain=False):
    """Convolves every column with its nearest ancestors and applies SiLU.

    out[b, c] = silu(sum_j taps[:, j] * x(kernel-1-j)), where x(0) = u[b, c], x(1) is its parent
    column and so on; past the root (column 0) come the history columns, newest first.

    Args:
      u:       [B, W, C] float, projected columns of the block.
      history: [B, kernel-1, C], dtype of u, columns before the block, oldest first.
      taps:    [C, kernel] float; index kernel-1 multiplies the current column.
      parent:  [B, W] int32, column index of each parent; parent[b, 0] is 0 and means the root.
        Never read if chain.
      chain:   states that parent[b, c] = c-1 for c > 0: slices instead of gathers. Static.
    Returns:
      [B, W, C] fp32. A column depends on itself, its ancestors and the history alone, so that dead
      columns may hold anything.
    Numeric: products and sum in fp32, oldest column first.
    Raises: ValueError for shapes or dtypes.
    Source: contracts 6.3.4; 8.4 for trees.
    """
    batch, width, channels = u.shape
    kernel = taps.shape[-1]
    if taps.shape != (channels, kernel) or kernel < 1:
        raise ValueError(f"taps: expected [{channels}, kernel], got {taps.shape}")
    _check_history(history, u, kernel - 1)
    columns = jnp.concatenate([history, u], axis=1)
    if chain:
        lagged = [columns[:, j : j + width] for j in range(kernel)]
    else:
        if parent.shape != (batch, width):
            raise ValueError(f"parent: expected {(batch, width)}, got {parent.shape}")
        lagged = _ancestors(columns, parent, kernel)
    factor = taps.astype(jnp.float32)
    total = jnp.zeros(u.shape, jnp.float32)
    for j, column in enumerate(lagged):
        total = total + factor[:, j] * column.astype(jnp.float32)
    return jax.nn.silu(total)


def shift_history(history, u, path, count):
    """Takes the history after `count` columns along a path: the last of history ++ u[path[:count]].

    Args:
      history: [B, kernel-1, C], oldest first.
      u:       [B, W, C], dtype of history.
      path:    [B, W] int32, columns in order; entries from count on are never used. None: 0..W-1.
      count:   [B] int32, columns kept, 0..W; 0 returns the history unchanged.
    Returns:
      [B, kernel-1, C], dtype of history, copied bit for bit.
    Raises: ValueError for shapes or dtypes.
    Source: contracts 9.3.
    """
    kept, width = history.shape[1], u.shape[1]
    _check_history(history, u, kept)
    index = count[:, None] + jnp.arange(kept, dtype=jnp.int32)
    column = jnp.clip(index - kept, 0, width - 1)
    if path is not None:
        column = jnp.take_along_axis(path, column, axis=1)
    # Apart, not of one joined array, which a long chunk would be copied for.
    return jnp.where((index < kept)[..., None], _rows(history, index), _rows(u, column))


def _check_history(history, u, kept):
    expected = (u.shape[0], kept, u.shape[2])
    if history.shape != expected or history.dtype != u.dtype:
        raise ValueError(
            f"history: expected {u.dtype} {expected}, got {history.dtype} {history.shape}"
        )


def _ancestors(columns, parent, kernel):
    """Rows of [history, u] at lag kernel-1..0 of every block column."""
    batch, width = parent.shape
    kept = kernel - 1
    before_history = jnp.maximum(jnp.arange(kept, dtype=jnp.int32) - 1, 0)
    is_root = jnp.arange(width, dtype=jnp.int32) == 0
    before = jnp.concatenate(
        [
            jnp.broadcast_to(before_history, (batch, kept)),
            jnp.where(is_root, max(kept - 1, 0), kept + parent),
        ],
        axis=1,
    )
    index = jnp.broadcast_to(kept + jnp.arange(width, dtype=jnp.int32), (batch, width))
    lagged = [_rows(columns, index)]
    for _ in range(kept):
        index = jnp.take_along_axis(before, index, axis=1)
        lagged.append(_rows(columns, index))
    return lagged[::-1]


def _rows(columns, index):
    # Clipped: a dead row's count or parent may be out of range, and -1 would wrap.
    return jnp.take_along_axis(columns, index[..., None], axis=1, mode="clip")
