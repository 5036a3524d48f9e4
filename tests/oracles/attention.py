"""Softmax attention over explicit sets of visible keys (contracts 2, 5.3, 6.3.3, 6.4, 8.4).

Float64 throughout. A key that is not visible is never read, so dead bytes cannot matter here.
"""

import numpy as np


def window_positions(frontier, live, column, *, window, causal, capacity):
    """Positions that a live column of the block sees, as a set.

    Context positions are [max(0, frontier - capacity), frontier), block positions
    frontier + 0..live-1, the query is at frontier + column. Distance window - 1 is seen, window
    is not; causal hides what lies to the right of the query.
    """
    query = frontier + column
    held = range(max(0, frontier - capacity), frontier + live)
    near = {p for p in held if -window < p - query < window}
    return {p for p in near if p <= query} if causal else near


def block_visible(block_mask, batch, width):
    """[B, W, W] bool from an array, "causal" or "full"; entry [b, i, j]: column i sees column j."""
    visible = np.zeros((batch, width, width), bool)
    for b in range(batch):
        for i in range(width):
            for j in range(width):
                if isinstance(block_mask, str):
                    visible[b, i, j] = block_mask == "full" or j <= i
                else:
                    visible[b, i, j] = block_mask[b, i, j]
    return visible


def ancestor_mask(parent):
    """[B, W, W] bool: column i sees itself and its ancestors; the root is its own parent."""
    batch, width = parent.shape
    visible = np.zeros((batch, width, width), bool)
    for b in range(batch):
        for i in range(width):
            node = i
            visible[b, i, node] = True
            while parent[b, node] != node and parent[b, node] >= 0:
                node = int(parent[b, node])
                visible[b, i, node] = True
    return visible


def attend(query, keys, values, scale):
    """softmax(scale * keys . query) . values of one head; no key at all gives zero.

    Args:
      query: [D].
      keys, values: lists of [D].
    """
    total = np.zeros(query.shape, np.float64)
    if not keys:
        return total
    query = query.astype(np.float64)
    scores = np.array([scale * np.dot(query, key.astype(np.float64)) for key in keys])
    weights = np.exp(scores - scores.max())
    for weight, value in zip(weights / weights.sum(), values, strict=True):
        total += weight * value.astype(np.float64)
    return total


def sliding_window_attention(
    query, block_key, block_value, ring_key, ring_value, slot, frontier, live, *,
    window, causal, scale,
):
    """Attention over a ring and the block; columns >= live are zero.

    Args:
      query: [B, W, Hq, D]; block_key, block_value: [B, W, Hkv, D].
      ring_key, ring_value: [slots, Hkv, S, D], position p at index p mod S.
      slot, frontier, live: [B].
    Returns:
      [B, W, Hq, D] float64.
    """
    batch, width, query_heads, _ = query.shape
    kv_heads, capacity = ring_key.shape[1:3]
    out = np.zeros(query.shape, np.float64)
    for b, i, h in np.ndindex(batch, width, query_heads):
        if i >= live[b]:
            continue
        first, head = int(frontier[b]), h // (query_heads // kv_heads)
        keys, values = [], []
        for p in sorted(
            window_positions(
                first, int(live[b]), i, window=window, causal=causal, capacity=capacity
            )
        ):
            if p < first:
                keys.append(ring_key[slot[b], head, p % capacity])
                values.append(ring_value[slot[b], head, p % capacity])
            else:
                keys.append(block_key[b, p - first, head])
                values.append(block_value[b, p - first, head])
        out[b, i, h] = attend(query[b, i, h], keys, values, scale)
    return out


def softmax_attention(
    query, block_key, block_value, key_pages, value_pages, table, frontier, live, *,
    block_mask, scale,
):
    """Attention over every paged position < frontier and the visible live block columns.

    Args:
      query: [B, W, Hq, D]; block_key, block_value: [B, W, Hkv, D].
      key_pages, value_pages: [Hkv, P, page, D]; position p is at row p mod page of page
        table[b, p // page].
      table: [B, max_pages]; frontier, live: [B].
      block_mask: [B, W, W] bool, "causal" or "full".
    Returns:
      [B, W, Hq, D] float64; columns >= live are zero.
    """
    batch, width, query_heads, _ = query.shape
    kv_heads, _, page_size, _ = key_pages.shape
    visible = block_visible(block_mask, batch, width)
    out = np.zeros(query.shape, np.float64)
    for b, i, h in np.ndindex(batch, width, query_heads):
        if i >= live[b]:
            continue
        head = h // (query_heads // kv_heads)
        places = [(table[b, p // page_size], p % page_size) for p in range(int(frontier[b]))]
        keys = [key_pages[head, page_id, offset] for page_id, offset in places]
        values = [value_pages[head, page_id, offset] for page_id, offset in places]
        seen = [j for j in range(int(live[b])) if visible[b, i, j]]
        keys += [block_key[b, j, head] for j in seen]
        values += [block_value[b, j, head] for j in seen]
        out[b, i, h] = attend(query[b, i, h], keys, values, scale)
    return out
