"""The model card of the shipped pair, from the report of the run that made it."""

import json

TEMPLATE = """# A tiny target with a DFlash and a DFlash2 draft

A byte-level BPE of {ids} ids, a Qwen3.5-family hybrid target of {target} parameters (3 Gated
DeltaNet : 1 gated attention, output gate, partial three-axis rotation, 1 + w norms, tied head), a
DFlash draft of {dflash} parameters (two local layers, one full) and a DFlash2 draft of {dflash2}
(local layers, convolution, selector). All weights are bfloat16, norms and small kernels float32.
They exist to show speculative decoding at work; the target writes Python-like text and knows
nothing.

## Data

Sources of the standard library of CPython {python}, test suite included: {files} files and {bytes}
bytes ({tokens} tokens) to train on. {held_files} files ({held_tokens} tokens) are held out, chosen
by SHA-256 of the file's name. The drafts are trained on {sequences} sequences that the target
itself wrote behind training prompts ({heats} temperature).

## Recipe

    {command}

{device}. Target {target_steps} steps, drafts {dflash_steps} and {dflash2_steps} steps, AdamW with
warm-up and cosine, gradient clipping; blocks of an anchor and {draft_tokens} masks at random
anchors, cross-entropy on the token at each mask's position weighted by exp(-i / {gamma}), for
DFlash2 the same over the selector's candidates behind the true predecessor. Everything:

    {recipe}

## Held-out acceptance, greedy, K = {draft_tokens}

{prompts} prompts of {prompt} tokens from held-out files, {new_tokens} new tokens each
(`held_out_prompts.json`); 95% bootstrap intervals over prompts.

| | DFlash | DFlash2 |
|---|---|---|
{rows}

Recall is over blocks at every eighth position of the target's own continuations, whatever came
before in the block. The same figures again, from the folders:

    python scripts/train_draft.py --validate --target OUT/target --draft OUT/dflash2 \\
        --prompts OUT/held_out_prompts.json --new-tokens {new_tokens}
"""


def model_card(report: dict, *, command: str, device: str) -> str:
    """MODEL_CARD.md from a finished report."""
    corpus, recipe = report["corpus"], report["recipe"]
    acceptance = report["dflash"]["acceptance"]
    heats = recipe["temperatures"]
    return TEMPLATE.format(
        ids=corpus["ids"], python=corpus["python"], files=corpus["train"]["files"],
        bytes=corpus["train"]["bytes"], tokens=corpus["train"]["tokens"],
        held_files=corpus["held_out"]["files"], held_tokens=corpus["held_out"]["tokens"],
        target=report["target"]["parameters"], target_steps=report["target"]["steps"],
        dflash=report["dflash"]["parameters"], dflash_steps=report["dflash"]["steps"],
        dflash2=report["dflash2"]["parameters"], dflash2_steps=report["dflash2"]["steps"],
        sequences=report["continuations"]["sequences"],
        heats=", ".join(f"{heats.count(t)} of {len(heats)} at {t:g}" for t in sorted(set(heats))),
        command=command, device=device, draft_tokens=len(acceptance["conditional"]),
        gamma=recipe["gamma"], recipe=json.dumps(recipe), prompts=acceptance["prompts"],
        prompt=recipe["prompt"], new_tokens=acceptance["new_tokens"],
        rows="\n".join(_rows(report["dflash"], report["dflash2"])),
    )


def _rows(*drafts: dict):
    def row(name, *cells):
        return f"| {name} | {' | '.join(cells)} |"

    yield row("tokens per round", *(_interval(d["acceptance"]["tokens_per_round"]) for d in drafts))
    yield row("rounds", *(str(d["acceptance"]["rounds"]) for d in drafts))
    for i in range(len(drafts[0]["acceptance"]["conditional"])):
        yield row(
            f"position {i + 1}, accepted given all before",
            *(_interval(d["acceptance"]["conditional"][i]) for d in drafts),
        )
    for depth in ("at_1", "at_16"):
        yield row(
            f"Recall@{depth[3:]}, positions 1..",
            *(", ".join(f"{share:.3f}" for share in d["recall"][depth]) for d in drafts),
        )


def _interval(found: dict) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
