"""Runs the published PyTorch models and collects what ours is compared with (NumPy, float32)."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache, Qwen3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetRun:
    """One pass over a token list.

    blocks: [L, T, H] residual after each block; logits: [T, V];
    recurrent: by linear layer [value heads, key dim, value dim];
    conv: by linear layer [channels, kernel], newest last;
    keys, values: by full layer [kv heads, T, head dim].
    """

    blocks: np.ndarray
    logits: np.ndarray
    recurrent: list[np.ndarray]
    conv: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]


def text_model(model: torch.nn.Module) -> torch.nn.Module:
    """The decoder stack of a multimodal or a text-only target."""
    return getattr(model.model, "language_model", model.model)


@torch.inference_mode()
def run_target(model: torch.nn.Module, ids: list[int], parts: list[int] | None = None) -> TargetRun:
    """Runs `ids` with a cache, in one call or in calls of the given lengths."""
    stack, config = text_model(model), model.config.get_text_config()
    cache = DynamicCache(config=config)
    residuals: list[list[torch.Tensor]] = [[] for _ in stack.layers]
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out, sink=sink: sink.append(_first(out)[0]))
        for layer, sink in zip(stack.layers, residuals, strict=True)
    ]
    calls = torch.tensor([ids]).split(parts or [len(ids)], dim=1)
    logits = [model(call, past_key_values=cache, use_cache=True).logits[0] for call in calls]
    for hook in hooks:
        hook.remove()
    linear = [i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    return TargetRun(
        blocks=np.stack([torch.cat(parts).numpy() for parts in residuals]),
        logits=torch.cat(logits).numpy(),
        recurrent=[cache.layers[i].recurrent_states[0][0].numpy() for i in linear],
        conv=[cache.layers[i].conv_states[0][0].numpy() for i in linear],
        keys=[cache.layers[i].keys[0].numpy() for i in full],
        values=[cache.layers[i].values[0].numpy() for i in full],
    )


def greedy(model: torch.nn.Module, prompt: list[int], budget: int) -> tuple[list[int], TargetRun]:
    """`budget` greedy tokens, and the states once all but the last of them are processed.

    Each token is chosen by a run over everything before it; the states come from a cached decode,
    one token a call.
    """
    output: list[int] = []
    while len(output) < budget:
        output.append(int(run_target(model, prompt + output).logits[-1].argmax()))
    processed = prompt + output[:-1]
    return output, run_target(model, processed, parts=[len(prompt)] + [1] * (budget - 1))


def _first(output):
    return output[0] if isinstance(output, tuple) else output


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftRun:
    """One masked block after a context.

    context: [F, H]; context_keys, context_values: by layer [Hkv, F, D];
    layers: [N, W, H]; hidden: [W, H]; logits: [W-1, V]; tokens: [W-1] greedy proposals.
    """

    context: np.ndarray
    context_keys: list[np.ndarray]
    context_values: list[np.ndarray]
    layers: np.ndarray
    hidden: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray


def features_of(blocks: np.ndarray, layer_ids: list[int]) -> np.ndarray:
    """[L, T, H] residuals -> [T, taps * H] in the recorded order."""
    return np.concatenate([blocks[i] for i in layer_ids], axis=-1)


@torch.inference_mode()
def run_draft(draft, target, features: np.ndarray, anchor: int, width: int) -> DraftRun:
    """Runs one block of `width` columns after `features` [F, taps * H]."""
    block = torch.full((1, width), draft.mask_token_id)
    block[0, 0] = anchor
    embedding = functional.embedding(block, target.get_input_embeddings().weight)
    layers: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out: layers.append(_first(out)[0]))
        for layer in draft.layers
    ]
    context, count = torch.from_numpy(features)[None], features.shape[0]
    cache = _UncutCache()
    hidden = draft(
        target_hidden=context,
        noise_embedding=embedding,
        position_ids=torch.arange(count + width)[None],
        past_key_values=cache,
    )
    for hook in hooks:
        hook.remove()
    head = target.get_output_embeddings()
    logits = draft.compute_logits(hidden[:, 1:], head)
    if hasattr(draft, "candidate_selector"):
        tokens = draft.propose(hidden[:, 1:], block[:, 0], head, 0.0)[0]
    else:
        tokens = logits.argmax(-1)
    return DraftRun(
        context=draft.hidden_norm(draft.fc(context))[0].numpy(),
        context_keys=[key[0, :, :count].numpy() for key, _ in cache.rows],
        context_values=[value[0, :, :count].numpy() for _, value in cache.rows],
        layers=torch.stack(layers).numpy(),
        hidden=hidden[0].numpy(),
        logits=logits[0].numpy(),
        tokens=tokens[0].numpy(),
    )


class _UncutCache:
    """Keeps the keys and values a layer was given, all of them."""

    def __init__(self):
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key, value, _layer, _arguments):
        self.rows.append((key, value))
        return key, value


@torch.inference_mode()
def selector_scores(
    draft, hidden: np.ndarray, logits: np.ndarray, anchor: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unary scores and candidates [K, C] in rank order, and all edges [K, C, C].

    The published selector scores only the predecessor it chose; this repeats its line for each.
    """
    selector = draft.candidate_selector
    unary, candidates = torch.from_numpy(logits).topk(selector.top_k, dim=-1, sorted=True)
    query = selector.hidden_projection(torch.from_numpy(hidden))
    first = torch.full_like(candidates[:1], anchor)
    predecessors = torch.cat([first, candidates[:-1]])
    edges = unary[:, None, :] + torch.einsum(
        "kpr,kcr->kpc",
        selector.predecessor_codebook(predecessors) * query[:, None],
        selector.successor_codebook(candidates),
    )
    return unary.numpy(), candidates.numpy(), edges.numpy()


@torch.inference_mode()
def convolve(convolution, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    """A published convolution: prepared x, the output side's increments, finished y."""
    prepared, closing = convolution.prepare(torch.from_numpy(x))
    return (
        prepared.numpy(),
        closing.numpy(),
        convolution.finish(torch.from_numpy(y), closing).numpy(),
    )


class RecomputingTarget(torch.nn.Module):
    """A target without a cache, for the published loop.

    The published loop over transformers' hybrid cache is no oracle: `crop` does not roll the
    recurrent state back. This wrapper keeps only token ids and recomputes everything in each call.
    The cache that the loop passes around is filled with one dummy position per token, so that its
    own bookkeeping works.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.config = Qwen3Config(
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            hidden_size=2,
            head_dim=2,
            layer_types=["full_attention"],
        )
        self.ids: list[int] = []
        self.calls = 0

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def lm_head(self) -> torch.nn.Module:
        return self.model.get_output_embeddings()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, input_ids, *, position_ids, past_key_values, logits_to_keep=0, **_unused):
        start, count = int(position_ids[0, 0]), input_ids.shape[1]
        self.calls += 1
        self.ids = self.ids[:start] + input_ids[0].tolist()
        dummy = torch.zeros(1, 1, count, 2)
        past_key_values.update(dummy, dummy, 0)
        run = run_target(self.model, self.ids)
        blocks = [torch.from_numpy(block[start:])[None] for block in run.blocks]
        logits = torch.from_numpy(run.logits[start:])[None]
        return SimpleNamespace(
            logits=logits[:, -logits_to_keep:] if logits_to_keep else logits,
            hidden_states=[None, *blocks],
        )


def fit_draft(draft, target, prompt: list[int], output: list[int], *, steps: int) -> None:
    """Fits a draft to one greedy continuation, so that acceptance is neither none nor all."""
    ids = prompt + output
    features = torch.from_numpy(
        features_of(run_target(target, ids).blocks, draft.target_layer_ids).copy()
    )[None]
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    starts = range(len(prompt), len(ids) - draft.block_size)
    for step in range(steps):
        start = starts[(5 * step) % len(starts)]
        block = torch.full((1, draft.block_size), draft.mask_token_id)
        block[0, 0] = ids[start]
        hidden = draft(
            target_hidden=features[:, :start],
            noise_embedding=embedding[block].detach(),
            position_ids=torch.arange(start + draft.block_size)[None],
        )
        labels = torch.tensor(ids[start + 1 : start + draft.block_size])
        loss = functional.cross_entropy(hidden[0, 1:] @ head.detach().T, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
