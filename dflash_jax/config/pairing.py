"""Rules between a target, a draft and the run choices, and a printable summary of all three.

Source: contracts 1.1 (rules 9-11), 11; `checkpoints.md` ("print the resolved geometry").
"""

from __future__ import annotations

from dflash_jax.config.geometry import DraftConfig, DraftKind, LayerKind, TargetConfig
from dflash_jax.config.rules import require
from dflash_jax.config.run import RunConfig


def check_pair(target: TargetConfig, draft: DraftConfig) -> None:
    """Raises ConfigError unless the draft fits this target.

    Hidden width and vocabulary rows are equal; captured block ids exist; the selector's candidates
    and an indexed head fit the public ids.
    """
    require(draft.hidden == target.hidden, "hidden", f"the target's {target.hidden}", draft.hidden)
    rows = target.vocab_rows
    require(draft.vocab_rows == rows, "vocab_rows", f"the target's {rows}", draft.vocab_rows)
    ids, layers = draft.target_layer_ids, target.num_layers
    legal = all(i < layers for i in ids)
    require(legal, "target_layer_ids", f"block ids in [0, {layers})", ids)
    public = target.public_vocab
    expected = f"at most public_vocab = {public}"
    require(draft.head_rows <= public, "head_rows", expected, draft.head_rows)
    if draft.selector is not None:
        candidates = draft.selector.num_candidates
        require(candidates <= public, "selector.num_candidates", expected, candidates)
        if draft.head_rows:
            expected = f"at most head_rows = {draft.head_rows}"
            legal = candidates <= draft.head_rows
            require(legal, "selector.num_candidates", expected, candidates)


def check_run(target: TargetConfig, draft: DraftConfig | None, run: RunConfig) -> None:
    """Raises ConfigError unless the run choices fit the models.

    K is 0 exactly without a draft (options of a backend need the backend) and below the capacity;
    only DFlash2 has a lattice to make trees from; the capacity is within what both models state.
    """
    tokens = run.draft_tokens
    kind = "no draft" if draft is None else draft.kind.value
    legal = not run.tree_nodes or kind == DraftKind.DFLASH2.value
    expected = f"0 with {kind} (trees need {DraftKind.DFLASH2.value})"
    require(legal, "tree_nodes", expected, run.tree_nodes)
    if draft is None:
        require(tokens == 0, "draft_tokens", "0 without a draft", tokens)
    else:
        require(tokens >= 1, "draft_tokens", "at least 1 with a draft", tokens)
        most = f"below max_context = {run.max_context}, since no more could be verified"
        require(tokens < run.max_context, "draft_tokens", most, tokens)
    for name, model in (("target", target), ("draft", draft)):
        if model is not None:
            limit = model.max_positions
            expected = f"at most the {name}'s max_positions = {limit}"
            require(run.max_context <= limit, "max_context", expected, run.max_context)


def describe(
    target: TargetConfig, draft: DraftConfig | None = None, run: RunConfig | None = None
) -> str:
    """The resolved geometry as text, one fact a line, with causality per draft layer."""
    lines = ["target", *_target_lines(target)]
    if draft is not None:
        lines.append(describe_draft(draft))
    if run is not None:
        lines += ["run", *_run_lines(run)]
        trained = None if draft is None or draft.block_size is None else draft.block_size - 1
        if trained is not None and run.draft_tokens > trained:
            lines.append(
                f"  K {run.draft_tokens} is more than block_size - 1 = {trained}, for which the "
                "draft was trained: later proposals are rarely accepted"
            )
    return "\n".join(lines)


def describe_draft(draft: DraftConfig) -> str:
    """The resolved geometry of a draft alone; see `describe`."""
    return "\n".join(["draft", *_draft_lines(draft)])


def _target_lines(target: TargetConfig) -> list[str]:
    rope, gdn, moe = target.rope, target.gdn, target.moe
    heads = f"{target.query_heads} / {target.kv_heads} / {target.head_dim}"
    lines = [
        f"  hidden {target.hidden}, layers {target.num_layers}: "
        f"{len(target.full_layers)} full, {len(target.linear_layers)} linear",
        f"  query / kv heads / head_dim: {heads}",
        f"  rotary {rope.rotary_dim(target.head_dim)} of {target.head_dim}, "
        f"theta {rope.theta:g}, mrope {rope.mrope_section}",
        f"  vocabulary rows {target.vocab_rows}, public {target.public_vocab}, "
        f"tied {target.tie_embeddings}",
        f"  norm eps {target.norm_eps:g}, max positions {target.max_positions}",
    ]
    if gdn is not None:
        lines.append(
            f"  gdn key / value heads {gdn.key_heads} / {gdn.value_heads}, dims {gdn.key_dim} / "
            f"{gdn.value_dim}, conv {gdn.conv_kernel} x {gdn.channels}"
        )
    if (fp8 := target.fp8) is not None:
        lines.append(
            f"  fp8: {fp8.count} matrices in blocks of {fp8.block_rows} x {fp8.block_columns}"
        )
    if moe is None:
        return [*lines, f"  mlp {target.intermediate}"]
    return [
        *lines,
        f"  moe {moe.num_experts} experts, top {moe.experts_per_token}, routed "
        f"{moe.intermediate}, shared {moe.shared_intermediate}",
    ]


def _draft_lines(draft: DraftConfig) -> list[str]:
    lines = [
        f"  {draft.kind.value}: hidden {draft.hidden}, mlp {draft.intermediate}, "
        f"layers {draft.draft_layers}",
        f"  query / kv heads / head_dim: {draft.query_heads} / {draft.kv_heads} / {draft.head_dim}",
        f"  captured target blocks {list(draft.target_layer_ids)}, mask id {draft.mask_token_id}",
        f"  theta {draft.rope_theta:g}, norm eps {draft.norm_eps:g}, "
        f"max positions {draft.max_positions}, block_size {draft.block_size}",
        f"  embedding {'own' if draft.own_embedding else 'of the target'}, "
        f"head {f'{draft.head_rows} rows with ids' if draft.head_rows else 'of the target'}",
    ]
    for i, (kind, causal) in enumerate(zip(draft.layer_types, draft.causal, strict=True)):
        window = f", window {draft.window}" if kind is LayerKind.SLIDING else ""
        mask = "causal" if causal else "bidirectional"
        lines.append(f"  layer {i}: {kind.value}{window}, {mask}")
    if draft.conv is not None:
        lines.append(
            f"  conv taps {draft.conv.taps}, group {draft.conv.group_width}; selector rank "
            f"{draft.selector.rank}, candidates {draft.selector.num_candidates}"
        )
    return lines


def _run_lines(run: RunConfig) -> list[str]:
    dtypes = run.dtypes
    tree = f"tree {run.tree_nodes} columns, {run.tree_paths} paths" if run.tree_nodes else "chain"
    return [
        f"  K {run.draft_tokens}, W {run.block_width}, batch {run.batch}, lanes {run.lanes}, "
        f"slots {run.slots}; {tree}",
        f"  context {run.max_context}, page {run.page_size} ({run.pages} pages), chunk {run.chunk}",
        f"  dtypes activation {dtypes.activation}, context value {dtypes.context_value}, "
        f"param {dtypes.param}, logits {dtypes.logits}; implementation {run.implementation}",
    ]
