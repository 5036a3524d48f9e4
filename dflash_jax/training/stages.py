"""Objectives and the two stages: a target on a token stream, a draft on its target's own text."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, DraftKind, DtypePolicy, TargetConfig, check_pair
from dflash_jax.training.fit import FitConfig, FitResult, fit
from dflash_jax.training.forward import (
    block_labels,
    draft_forward,
    random_anchors,
    random_proposals,
    target_forward,
    target_logits,
)
from dflash_jax.training.loss import draft_loss, next_token_loss
from dflash_jax.training.parameters import draft_params, start_draft, start_target, target_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetObjective:
    """Next-token loss on random stretches of a stream.

    batch, length: stretches per step, tokens of each.
    """

    config: TargetConfig
    dtypes: DtypePolicy
    batch: int
    length: int

    def __call__(self, master, tokens, key):
        """tokens: [n] int32, the stream."""
        start = jax.random.randint(key, (self.batch, 1), 0, len(tokens) - self.length + 1)
        window = tokens[start + jnp.arange(self.length)]
        params = target_params(self.config, master, self.dtypes)
        hidden = target_forward(
            self.config, self.dtypes, params, window, embedding=master["embedding"]
        ).hidden
        logits = target_logits(self.config, params, hidden)
        return next_token_loss(logits, window, self.config.public_vocab), {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftObjective:
    """Block loss at random anchors of random sequences.

    draft_tokens: K. batch, blocks: sequences per step, anchors in each.
    prompt: positions that the target did not write; anchors come after them.
    gamma: positions over which the weight of a mask falls by e.
    shorter: share of a DFlash draft's blocks that have fewer masks than K. Its block has as many
      as may be verified (contracts 5.1), fewer at the end of a text; a draft that never saw such a
      block may propose nothing useful there. A DFlash2 block always has K.
    """

    target: TargetConfig
    draft: DraftConfig
    dtypes: DtypePolicy
    draft_tokens: int
    batch: int
    blocks: int
    prompt: int
    gamma: float
    selector_weight: float = 1.0
    shorter: float = 0.25

    def __post_init__(self):
        check_pair(self.target, self.draft)

    def __call__(self, master, data, key):
        """data: of `draft_data`."""
        row_key, anchor_key, shorter_key = jax.random.split(key, 3)
        row = jax.random.randint(row_key, (self.batch,), 0, len(data["tokens"]))
        tokens, features = data["tokens"][row], data["features"][row]
        last = tokens.shape[1] - 1 - self.draft_tokens
        anchors = random_anchors(anchor_key, self.batch, self.blocks, self.prompt, last)
        proposals = random_proposals(
            shorter_key, anchors.shape, self.draft_tokens,
            self.shorter if self.draft.kind is DraftKind.DFLASH else 0.0,
        )
        params = draft_params(self.draft, master, self.dtypes)
        hidden = draft_forward(
            self.draft, self.dtypes, params, data["embedding"], tokens, features, anchors,
            draft_tokens=self.draft_tokens, proposals=proposals,
        )
        head = data["embedding"] if self.target.tie_embeddings else data["head"]
        found = draft_loss(
            self.draft, params, head, hidden, jnp.take_along_axis(tokens, anchors, axis=1),
            block_labels(tokens, anchors, self.draft_tokens), proposals,
            public_vocab=self.target.public_vocab, gamma=self.gamma,
            selector_weight=self.selector_weight,
        )
        return found.total, {
            "head": found.head, "selector": found.selector, "recall": found.recall,
            "tokens_per_round": found.tokens_per_round,
        }


def draft_data(target: TargetConfig, params, tokens, features) -> dict:
    """What a draft's objective reads, on the device.

    Args:
      params: the target module's variables. tokens: [N, T] int32. features: [N, T, n_tap * H].
    """
    data = {"tokens": jnp.asarray(tokens, jnp.int32), "features": features,
            "embedding": params["embedding"]}
    return data if target.tie_embeddings else {**data, "head": params["head"]}


def fit_target(
    objective: TargetObjective, tokens: np.ndarray, config: FitConfig, *,
    folder: str | Path | None = None, name: str = "target",
) -> FitResult:
    """Trains a fresh target on a stream [n] int32.

    Raises: ValueError if the stream is too short or holds ids that are not public.
    """
    public = objective.config.public_vocab
    if len(tokens) < objective.length:
        raise ValueError(f"tokens: expected at least {objective.length}, got {len(tokens)}")
    if tokens.min() < 0 or tokens.max() >= public:
        raise ValueError(f"vocabulary: expected ids in [0, {public}), got {tokens.max()}")
    start = start_target(objective.config, config.seed)
    return fit(
        objective, start, jnp.asarray(tokens, jnp.int32), config, name=name, folder=folder,
        identity={"objective": repr(objective)},
    )


def check_room(objective: DraftObjective, length: int) -> None:
    """Raises ValueError if sequences of `length` tokens leave no room for the anchors."""
    room = length - objective.prompt - objective.draft_tokens
    if room < objective.blocks:
        raise ValueError(f"blocks: expected at most {room} anchors behind a prompt of "
                         f"{objective.prompt} in {length} tokens, got {objective.blocks}")


def fit_draft(
    objective: DraftObjective, data: dict, config: FitConfig, *,
    folder: str | Path | None = None, name: str = "draft",
) -> FitResult:
    """Trains a fresh draft.

    Raises: ValueError if the sequences leave no room for anchors or hold ids that are not public.
    """
    tokens, public = np.asarray(data["tokens"]), objective.target.public_vocab
    check_room(objective, tokens.shape[1])
    if tokens.min() < 0 or tokens.max() >= public:
        raise ValueError(f"vocabulary: expected ids in [0, {public}), got {tokens.max()}")
    start = start_draft(objective.draft, config.seed)
    return fit(
        objective, start, data, config, name=name, folder=folder,
        identity={"objective": repr(objective)},
    )
