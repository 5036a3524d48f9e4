"""All held-out figures of a draft, and of the folders of a finished pair."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

from dflash_jax.config import DraftConfig, DtypePolicy, RunConfig, TargetConfig
from dflash_jax.config.folder import read_json
from dflash_jax.engine.checks import check_prompts
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.training.agreement import Agreement, measure_agreement
from dflash_jax.training.card import CARD, model_card
from dflash_jax.training.progress import REPORT, Progress
from dflash_jax.training.recipe import DRAFT_TOKENS, DRAFTS, SERVING
from dflash_jax.training.results import write_text
from dflash_jax.training.validate import Acceptance, Recall, measure_acceptance, measure_recall
from dflash_jax.weights import load_draft, load_target

PROMPTS = "held_out_prompts.json"
SAMPLED = SamplingParams(temperature=1.0)
AGREEMENT_ROUNDS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftFigures:
    """Fields:
      acceptance, sampled: greedy, and at temperature 1.
      agreement: of the accepted share and sum_v min(p, q), at temperature 1.
      recall: over the greedy texts.
    """

    acceptance: Acceptance
    sampled: Acceptance
    agreement: Agreement
    recall: Recall


def measured_models(
    target: TargetConfig, draft: DraftConfig, prompts: int, length: int, new_tokens: int,
    dtypes: DtypePolicy = SERVING,
) -> Models:
    """All prompts, of `length` tokens each, in one batch."""
    run = RunConfig(
        draft_tokens=DRAFT_TOKENS, batch=prompts, max_context=length + new_tokens, chunk=length,
        dtypes=dtypes,
    )
    return Models(target, draft, run)


def measure_draft(
    target: TargetConfig, draft: DraftConfig, params: Params, prompts: list[list[int]],
    new_tokens: int,
) -> DraftFigures:
    """Figures of a pair in bfloat16 on equally long held-out prompts.

    Raises: ValueError: the checks of `generate`, or prompts of several lengths.
    """
    length = len(prompts[0])
    models = measured_models(target, draft, len(prompts), length, new_tokens)
    acceptance, outputs = measure_acceptance(models, params, prompts, new_tokens)
    sampled, _ = measure_acceptance(models, params, prompts, new_tokens, sampling=SAMPLED)
    rounds = min(AGREEMENT_ROUNDS, new_tokens)
    longer = measured_models(
        target, draft, len(prompts), length, 1 + rounds * (DRAFT_TOKENS + 1)
    )
    texts = [prompt + list(item.tokens) for prompt, item in zip(prompts, outputs, strict=True)]
    return DraftFigures(
        acceptance=acceptance, sampled=sampled,
        agreement=measure_agreement(longer, params, prompts, rounds, sampling=SAMPLED),
        recall=measure_recall(
            target, draft, SERVING, params, np.array(texts, np.int32), draft_tokens=DRAFT_TOKENS,
            first=length,
        ),
    )


def measure_folders(folder: Path) -> dict[str, DraftFigures]:
    """Measures FOLDER/dflash and FOLDER/dflash2 again, and rewrites report.json and the card.

    Reads FOLDER/target, FOLDER/held_out_prompts.json and FOLDER/report.json, whose facts of the
    training stay as they are.

    Raises: ValueError naming a file that is missing or not what it should be.
    """
    say = Progress("measure").say
    report = read_json(folder / REPORT)
    prompts = read_prompts(folder / PROMPTS)
    if len(lengths := {len(prompt) for prompt in prompts}) != 1:
        raise ValueError(f"{PROMPTS}: expected prompts of one length, got {sorted(lengths)}")
    new_tokens = report["recipe"]["held_out_tokens"]
    target, target_params = load_target(folder / "target", SERVING)
    drafts = {name: load_draft(folder / name, target, SERVING) for name in DRAFTS}
    for draft, _ in drafts.values():
        models = measured_models(target, draft, len(prompts), len(prompts[0]), new_tokens)
        check_prompts(models, prompts, new_tokens)
    found = {}
    for name, (draft, params) in drafts.items():
        pair = Params(target=target_params, draft=params)
        found[name] = measure_draft(target, draft, pair, prompts, new_tokens)
        report[name] |= dataclasses.asdict(found[name])
        say(f"{name}: {found[name].acceptance.tokens_per_round} tokens per round")
    report["measured"] = device()
    write_report(folder, report)
    return found


def write_report(folder: Path, report: dict) -> None:
    """report.json and the model card of a finished pair."""
    card = model_card(report)
    write_text(folder / REPORT, json.dumps(report) + "\n")
    write_text(folder / CARD, card)


def read_prompts(file: Path) -> list[list[int]]:
    """Raises: ValueError unless the file holds lists of integers, none of them empty."""
    try:
        rows = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: expected a JSON list of id lists, got {error}") from error
    good = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    if not good or not all(type(token) is int for row in rows for token in row):
        raise ValueError(f"{file}: expected a JSON list of id lists, got something else")
    return rows


def device() -> str:
    """Where a figure comes from, in words."""
    return f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
