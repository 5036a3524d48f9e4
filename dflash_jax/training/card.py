"""The model card of the shipped pair, from the report of the run that made it."""

import json
import statistics
import textwrap

from dflash_jax.training.recipe import DRAFTS

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
SEEDS = """
## Other seeds

The same recipe with other seeds of target, text and drafts, judged by the same prompts: tokens per
round with 95% intervals over prompts, the greedy ones when training ended. "Inside" and "outside"
say whether a figure lies in the first row's interval; that one is over prompts alone and knows
nothing of seeds. The last row is over the {count} seeds of the table.

| seed | DFlash, greedy | DFlash2, greedy | DFlash, temperature 1 | DFlash2, temperature 1 |
|---|---|---|---|---|
{rows}

{runs}

To add another run's report to `report.json` and to this table:

    python scripts/make_tiny_pair.py --card FOLDER --retrained REPORT
"""


def model_card(report: dict) -> str:
    """MODEL_CARD.md from a finished report."""
    corpus, recipe = report["corpus"], report["recipe"]
    acceptance, heats = report["dflash"]["acceptance"], recipe["temperatures"]
    shares = (f"{heats.count(t)} of {len(heats)} at temperature {t:g}" for t in sorted(set(heats)))
    card = TEMPLATE.format(
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
    return card + _seeds(report) if report.get("retrained") else card


def _seeds(report: dict) -> str:
    """The section on the runs that `retrained.add_retrained` put into the report."""
    own = [report[name]["training_run"] for name in DRAFTS]
    own += [report[name]["sampled"]["tokens_per_round"] for name in DRAFTS]
    rows = [_row(f"{report['recipe']['seed']}, this pair", *map(_interval, own))]
    values = [[one["value"]] for one in own]
    runs = [f"- Temperature 1 of this pair: {report['measured']}."]
    for run in report["retrained"]:
        found = [run[name][figure] for figure in ("training_run", "sampled") for name in DRAFTS]
        cells = (f"{_interval(one)}, {_side(one, first)}"
                 for one, first in zip(found, own, strict=True))
        rows.append(_row(run["seed"], *cells))
        for column, one in zip(values, found, strict=True):
            column.append(one["value"])
        steps = ", ".join(map(str, run["steps"].values()))
        runs.append(f"- Seed {run['seed']}: `{run['command']}` on {run['device']}, steps {steps}; "
                    f"temperature 1 on {run['measured']}.")
    spread = (f"{statistics.mean(column):.3f}, {statistics.stdev(column):.3f}"
              for column in values)
    rows.append(_row("mean, standard deviation", *spread))
    remark = [f"\n{textwrap.fill(report['remark'], 100)}"] if report.get("remark") else []
    return SEEDS.format(
        count=len(values[0]), rows="\n".join(rows), runs="\n".join(runs + remark)
    )


def _side(found: dict, first: dict) -> str:
    return "inside" if first["low"] <= found["value"] <= first["high"] else "outside"


def _row(name, *cells) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _rows(*drafts: dict):
    for title, name in (("greedy", "acceptance"), ("temperature 1", "sampled")):
        found = [draft[name] for draft in drafts]
        yield _row(f"**{title}: tokens per round**",
                   *(f"**{_interval(one['tokens_per_round'])}**" for one in found))
        yield _row("rounds", *(str(one["rounds"]) for one in found))
        for i in range(len(found[0]["conditional"])):
            yield _row(f"position {i + 1}, accepted given all before",
                       *(_interval(one["conditional"][i]) for one in found))
    yield _row("greedy, tokens per round, when training ended",
               *(_interval(draft["training_run"]) for draft in drafts))
    for title, name in (("accepted share of judged proposals", "accepted"),
                        ("mean sum of min(p, q)", "expected"), ("their difference", "excess")):
        yield _row(f"temperature 1: {title}", *(_interval(d["agreement"][name]) for d in drafts))
    yield _row("judged proposals", *(str(d["agreement"]["judged"]) for d in drafts))
    for depth in ("at_1", "at_16"):
        yield _row(
            f"Recall@{depth[3:]}, positions 1..",
            *(", ".join(f"{share:.3f}" for share in d["recall"][depth]) for d in drafts),
        )


def _interval(found: dict) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
