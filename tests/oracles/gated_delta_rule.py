"""The gated delta rule, one column and one head at a time (contracts 6.3.4).

    delta = beta * (v - alpha * M k);   M <- alpha * M + delta k^T;   o = (M q) / sqrt(Dk)

with alpha = exp(g), and q, k divided by sqrt(sum x^2 + 1e-6) first. Float64 throughout.
Value head j uses key head j // (Hv / Hk).
"""

import numpy as np


def unit(x):
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def step(state, key, value, gates):
    """State after one column.

    Args:
      state: [Hv, Dv, Dk]; key: [Hk, Dk] raw; value: [Hv, Dv]; gates: [Hv, 2], g and beta.
    Returns:
      [Hv, Dv, Dk] float64.
    """
    state = np.array(state, np.float64)
    value_heads, key_heads = value.shape[0], key.shape[0]
    unit_key = unit(key)
    for j in range(value_heads):
        k = unit_key[j // (value_heads // key_heads)]
        g, beta = gates[j].astype(np.float64)
        state[j] *= np.exp(g)
        delta = beta * (value[j].astype(np.float64) - state[j] @ k)
        state[j] += np.outer(delta, k)
    return state


def read(state, query):
    """(M q) / sqrt(Dk): state [Hv, Dv, Dk], query [Hk, Dk] raw -> [Hv, Dv] float64."""
    value_heads, key_dim = state.shape[0], state.shape[2]
    unit_query = unit(query)
    repeat = value_heads // query.shape[0]
    return np.stack([state[j] @ unit_query[j // repeat] for j in range(value_heads)]) / np.sqrt(
        key_dim
    )


def sequence(state, query, key, value, gates, count):
    """Runs the first count columns of one row in order.

    Args:
      state: [Hv, Dv, Dk]; query, key: [T, Hk, Dk]; value: [T, Hv, Dv]; gates: [T, Hv, 2].
    Returns:
      (outputs [T, Hv, Dv] float64, zero from count on; final state [Hv, Dv, Dk] float64).
    """
    out = np.zeros(value.shape, np.float64)
    state = np.array(state, np.float64)
    for t in range(count):
        state = step(state, key[t], value[t], gates[t])
        out[t] = read(state, query[t])
    return out, state


def root_path(parent, column):
    """Columns from the root to column, both included; the root is its own parent or has -1."""
    path = [column]
    while parent[path[0]] != path[0] and parent[path[0]] >= 0:
        path.insert(0, int(parent[path[0]]))
    return path


def tree(state, query, key, value, gates, parent, live):
    """Output of each live column of one row along its own root path; zero from live on.

    Shapes as in sequence; parent: [T].
    """
    out = np.zeros(value.shape, np.float64)
    for column in range(live):
        along = np.array(state, np.float64)
        for node in root_path(parent, column):
            along = step(along, key[node], value[node], gates[node])
        out[column] = read(along, query[column])
    return out
