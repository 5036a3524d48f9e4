"""The model card of the shipped pair, from the report of the run that made it."""

import json

CARD = "MODEL_CARD.md"
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
itself wrote behind training prompts ({heats}).

## Recipe

    {command}

On {device}: target {target_steps} steps, drafts {dflash_steps} and {dflash2_steps} steps, AdamW
with warm-up and cosine, gradient clipping; blocks of an anchor and {draft_tokens} masks at random
anchors (a share {shorter} of the DFlash draft's with fewer masks, as at the end of a budget),
cross-entropy on the token at each mask's position weighted by exp(-i / {gamma}), for
DFlash2 the same over the selector's candidates behind the true predecessor. Losses are in
`report.json`. Seconds of each stage:

    {seconds}

Sizes and budgets:

    {recipe}

## Held-out acceptance, K = {draft_tokens}

{prompts} prompts of {prompt} tokens from held-out files, {new_tokens} new tokens each
(`{prompt_file}`); 95% bootstrap intervals over prompts. Measured in bfloat16 on
{measured}; the row "when training ended" on {device}. A device that rounds
otherwise writes other texts.

| | DFlash | DFlash2 |
|---|---|---|
{rows}

Recall is over blocks at every eighth position of the target's own greedy continuations, whatever
came before in the block. min(p, q) is summed over the vocabulary and averaged over the proposals
that were judged; the accepted share of these has to agree with it. The figures again, from the
folders, into this file and `report.json`:

    python scripts/make_tiny_pair.py --measure FOLDER
"""


def model_card(report: dict) -> str:
    """MODEL_CARD.md from a finished report."""
    corpus, recipe = report["corpus"], report["recipe"]
    acceptance, heats = report["dflash"]["acceptance"], recipe["temperatures"]
    shares = (f"{heats.count(t)} of {len(heats)} at temperature {t:g}" for t in sorted(set(heats)))
    return TEMPLATE.format(
        ids=corpus["ids"], python=corpus["python"], files=corpus["train"]["files"],
        bytes=corpus["train"]["bytes"], tokens=corpus["train"]["tokens"],
        held_files=corpus["held_out"]["files"], held_tokens=corpus["held_out"]["tokens"],
        target=report["target"]["parameters"], target_steps=report["target"]["steps"],
        dflash=report["dflash"]["parameters"], dflash_steps=report["dflash"]["steps"],
        dflash2=report["dflash2"]["parameters"], dflash2_steps=report["dflash2"]["steps"],
        sequences=report["continuations"]["sequences"], heats=", ".join(shares),
        command=report["command"], device=report["device"], measured=report["measured"],
        seconds=", ".join(f"{name} {value:g}" for name, value in report["seconds"].items()),
        draft_tokens=len(acceptance["conditional"]), gamma=recipe["gamma"],
        shorter=recipe["shorter"],
        recipe=json.dumps(recipe), prompts=acceptance["prompts"], prompt=recipe["prompt"],
        new_tokens=acceptance["new_tokens"], prompt_file="held_out_prompts.json",
        rows="\n".join(_rows(report["dflash"], report["dflash2"])),
    )


def _rows(*drafts: dict):
    def row(name, *cells):
        return f"| {name} | {' | '.join(cells)} |"

    for title, name in (("greedy", "acceptance"), ("temperature 1", "sampled")):
        found = [draft[name] for draft in drafts]
        yield row(f"**{title}: tokens per round**",
                  *(f"**{_interval(one['tokens_per_round'])}**" for one in found))
        yield row("rounds", *(str(one["rounds"]) for one in found))
        for i in range(len(found[0]["conditional"])):
            yield row(f"position {i + 1}, accepted given all before",
                      *(_interval(one["conditional"][i]) for one in found))
    yield row("greedy, tokens per round, when training ended",
              *(_interval(draft["training_run"]) for draft in drafts))
    for title, name in (("accepted share of judged proposals", "accepted"),
                        ("mean sum of min(p, q)", "expected"), ("their difference", "excess")):
        yield row(f"temperature 1: {title}", *(_interval(d["agreement"][name]) for d in drafts))
    yield row("judged proposals", *(str(d["agreement"]["judged"]) for d in drafts))
    for depth in ("at_1", "at_16"):
        yield row(
            f"Recall@{depth[3:]}, positions 1..",
            *(", ".join(f"{share:.3f}" for share in d["recall"][depth]) for d in drafts),
        )


def _interval(found: dict) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
