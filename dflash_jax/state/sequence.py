"""The numbers of each live sequence, and the extents of a round that follow from them."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.indices import DROP, FILL
from dflash_jax.state.scratch import RoundExtent


@struct.dataclass
class SequenceState:
    """Per-lane numbers, or per-row ones after `gather`.

    frontier:         [lanes] int32, F: tokens processed; the anchor has this position.
    context_frontier: [lanes] int32, F_ctx <= F: positions the draft context covers.
    anchor:           [lanes] int32, token chosen but not processed.
    rope_delta:       [lanes] int32, added to cache positions for the target's rotation.
    remaining:        [lanes] int32, outputs that may still be published.
    capacity:         [lanes] int32, positions the request may occupy; 0 marks an idle row.
    counts:           [lanes, V_pub] int32, published tokens of the request, by id.
    prompt_seen:      [lanes, V_pub] bool, ids of the prompt.
    seed:             [lanes, 2] uint32, (low, high) words of the request's seed.

    Between rounds 0 <= F - F_ctx <= W, and that is the number of pending feature rows.
    """

    frontier: jax.Array
    context_frontier: jax.Array
    anchor: jax.Array
    rope_delta: jax.Array
    remaining: jax.Array
    capacity: jax.Array
    counts: jax.Array
    prompt_seen: jax.Array
    seed: jax.Array

    @classmethod
    def zeros(cls, lanes: int, public_vocab: int) -> "SequenceState":
        def number():
            return jnp.zeros((lanes,), jnp.int32)  # one buffer a field: each is donated

        return cls(
            frontier=number(), context_frontier=number(), anchor=number(), rope_delta=number(),
            remaining=number(), capacity=number(),
            counts=jnp.zeros((lanes, public_vocab), jnp.int32),
            prompt_seen=jnp.zeros((lanes, public_vocab), bool),
            seed=jnp.zeros((lanes, 2), jnp.uint32),
        )

    def gather(self, lane) -> "SequenceState":
        """The numbers of B rows; those of a row that is not live are all zero."""
        return jax.tree.map(lambda x: x.at[lane].get(fill_value=0, **FILL), self)

    def live(self, lane):
        """[B] bool: whether a row has a lane; one whose lane is out of range is idle."""
        return (lane >= 0) & (lane < self.frontier.shape[0])

    def put(self, lane, where, **fields) -> "SequenceState":
        """Writes the named fields of rows where `where` holds; other lanes are unchanged."""
        target = jnp.where(where, lane, self.frontier.shape[0])
        return self.replace(
            **{
                name: getattr(self, name).at[target].set(value, **DROP)
                for name, value in fields.items()
            }
        )

    def count_tokens(self, lane, tokens, count) -> "SequenceState":
        """Adds the first `count` of each row's tokens [B, T] to its counts."""
        live = jnp.arange(tokens.shape[1])[None, :] < count[:, None]
        target = jnp.where(live, tokens, self.counts.shape[1])
        counts = self.counts.at[lane[:, None], target].add(1, **DROP)
        return self.replace(counts=counts)

    def mark_prompt(self, lane, tokens, count) -> "SequenceState":
        """Marks the first `count` of each row's tokens [B, T] as seen in the prompt."""
        live = jnp.arange(tokens.shape[1])[None, :] < count[:, None]
        target = jnp.where(live, tokens, self.prompt_seen.shape[1])
        seen = self.prompt_seen.at[lane[:, None], target].set(True, **DROP)
        return self.replace(prompt_seen=seen)


def round_extent(
    sequence: SequenceState, *, draft_tokens: int, whole_block: bool, tree_nodes: int = 0
) -> RoundExtent:
    """Live extents of the next round, from per-row numbers (`SequenceState.gather`).

    P = min(K, max(remaining - 1, 0), capacity - F - 1), Q = P + 1; an idle row has no columns. A
    row with P = K and F + W_t <= capacity takes a tree, Q = W_t; other rows keep their chain.

    Args:
      draft_tokens: K; 0 without a draft. Static.
      whole_block: DFlash2 proposes all W columns, DFlash only Q. Static.
      tree_nodes: W_t; 0 without trees. Static.
    Source: contracts 6.1 and 8.3.
    """
    live = sequence.capacity > sequence.frontier
    room = sequence.capacity - sequence.frontier - 1
    proposals = jnp.minimum(jnp.minimum(draft_tokens, jnp.maximum(sequence.remaining - 1, 0)), room)
    proposals = jnp.where(live, proposals, 0)
    chain = columns = jnp.where(live, proposals + 1, 0)
    if tree_nodes:
        takes_tree = live & (proposals == draft_tokens) & (tree_nodes <= room + 1)
        columns = jnp.where(takes_tree, tree_nodes, chain)
    whole = jnp.where(live, draft_tokens + 1, 0)
    return RoundExtent(
        proposals=proposals, columns=columns, draft_columns=whole if whole_block else chain
    )
