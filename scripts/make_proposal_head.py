"""Builds an indexed proposal head from the token frequencies of a corpus, beside a draft.

    python scripts/make_proposal_head.py --target DIR --draft DIR --rows 32768 --text FILE...
    python scripts/make_proposal_head.py --target DIR --draft DIR --coverage 0.99 --ids FILE...

writes DRAFT/proposal_head.safetensors, which `generate --proposal-head indexed` uses. Special and
stop ids are always in it. Id files hold plain numbers or JSON lists of them. Coverage is reported
on `--held-out` files of the same kind, by default on the last tenth of each file, which is then not
counted. `--compare PROMPTS` (a JSON list of texts, or of lists of ids) decodes with both heads and
prints tokens and seconds a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_jax import (
    DtypePolicy,
    Models,
    Params,
    RunConfig,
    TextTokenizer,
    eos_ids,
    generate,
    load_draft,
    load_target,
    total_statistics,
)
from dflash_jax.config import TargetConfig
from dflash_jax.config.folder import read_json, read_text
from dflash_jax.weights import read_draft_config, read_target_config
from dflash_jax.weights.proposal_head import (
    FILE,
    choose_ids,
    coverage_of,
    head_rows,
    save_proposal_head,
    use_proposal_head,
)

HELD_OUT = 0.1


def read_tokens(file: Path, tokenizer: TextTokenizer | None, target: TargetConfig) -> np.ndarray:
    """Ids of a text file, or with no tokenizer of an id file.

    Raises: ValueError for a file that holds no ids of this target.
    """
    text = read_text(file)
    if tokenizer is not None:
        ids = np.asarray(tokenizer.encode(text), np.int64)
    else:
        words = text.translate(str.maketrans("[],", "   ")).split()
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"{file}: expected token ids, got something else")
        ids = np.asarray([int(word) for word in words], np.int64)
    if not ids.size or ids.max() >= target.vocab_rows:
        raise ValueError(f"{file}: expected ids in [0, {target.vocab_rows}), got others or none")
    return ids[ids < target.public_vocab]


def special_ids(folder: Path, target: TargetConfig) -> set[int]:
    """Special tokens of the tokenizer and the ids that end a text, as far as they are public."""
    ids = set(eos_ids(folder, vocab_rows=target.vocab_rows))
    if (folder / "tokenizer.json").is_file():
        for entry in read_json(folder / "tokenizer.json").get("added_tokens") or ():
            if entry.get("special"):
                ids.add(entry["id"])
    return {token for token in ids if token < target.public_vocab}


def build(arguments: argparse.Namespace) -> None:
    """Counts, chooses, writes and reports."""
    target = read_target_config(arguments.target)
    read_draft_config(arguments.draft, target)
    tokenizer = TextTokenizer.load(arguments.target) if arguments.text else None
    corpus = [read_tokens(file, tokenizer, target) for file in arguments.text or arguments.ids]
    if arguments.held_out:
        held = [read_tokens(file, tokenizer, target) for file in arguments.held_out]
    else:
        cuts = [len(ids) - round(HELD_OUT * len(ids)) for ids in corpus]
        held = [ids[cut:] for ids, cut in zip(corpus, cuts, strict=True)]
        corpus = [ids[:cut] for ids, cut in zip(corpus, cuts, strict=True)]
    counted, unseen = np.concatenate(corpus), np.concatenate(held)
    counts = np.bincount(counted, minlength=target.public_vocab)
    always = special_ids(arguments.target, target)
    ids = choose_ids(counts, rows=arguments.rows, coverage=arguments.coverage, always=always)
    rows = head_rows(arguments.target, target, ids)
    file = save_proposal_head(arguments.draft, rows, ids, target)
    print(
        f"{file}: {len(ids)} of {target.public_vocab} rows, {len(always)} of them special or stop "
        f"ids, {rows.nbytes / 1e6:.1f} MB; covers {coverage_of(ids, counted):.3%} of "
        f"{len(counted)} tokens, {coverage_of(ids, unseen):.3%} of {len(unseen)} held-out ones"
    )


def compare(arguments: argparse.Namespace) -> None:
    """Greedy decoding with the full and the indexed head: same text, tokens and seconds a round."""
    policy = DtypePolicy()
    target, target_params = load_target(arguments.target, policy)
    draft, params = load_draft(arguments.draft, target, policy)
    prompts = _prompts(arguments)
    indexed = use_proposal_head(arguments.draft, target, target_params, draft, params, policy)
    run = RunConfig(
        draft_tokens=(draft.block_size or 8) - 1, batch=len(prompts), dtypes=policy,
        max_context=max(map(len, prompts)) + arguments.max_new_tokens + 64,
    )  # fmt: skip
    told = []
    for name, (config, tree) in {"full": (draft, params), "indexed": indexed}.items():
        models = Models(target=target, draft=config, run=run)
        both = Params(target=target_params, draft=tree)
        for _ in range(2):  # the first compiles
            outputs = generate(models, both, prompts, max_new_tokens=arguments.max_new_tokens)
        total = total_statistics([output.statistics for output in outputs])
        told.append([output.tokens for output in outputs])
        print(
            f"{name}: {total.tokens_per_round:.3f} tokens a round, {total.acceptance:.1%} of the "
            f"proposals accepted, {1e3 * total.decode_seconds / max(total.rounds, 1):.2f} ms a "
            "row and round"
        )
    agree = sum(a == b for a, b in zip(*told, strict=True))
    print(f"same text: {agree} of {len(prompts)} rows")


def _prompts(arguments: argparse.Namespace) -> list[list[int]]:
    entries = json.loads(read_text(arguments.compare))
    if not isinstance(entries, list) or not all(isinstance(e, str | list) for e in entries):
        raise ValueError(f"{arguments.compare}: expected a JSON list of texts or of lists of ids")
    entries = entries[: arguments.prompts]
    if not any(isinstance(entry, str) for entry in entries):
        return entries
    tokenizer = TextTokenizer.load(arguments.target)
    return [tokenizer.encode(e) if isinstance(e, str) else e for e in entries]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a caller's fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--draft", type=Path, required=True, help=f"folder of the draft, gets {FILE}")
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument("--text", type=Path, nargs="+", help="text files to count tokens of")
    corpus.add_argument("--ids", type=Path, nargs="+", help="files of token ids to count")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--rows", type=int, help="rows of the head")
    size.add_argument("--coverage", type=float, help="share of the corpus to cover, (0, 1]")
    add("--held-out", type=Path, nargs="+", help="files to report coverage on")
    add("--compare", type=Path, metavar="PROMPTS", help="JSON list to decode both ways")
    add("--prompts", type=int, default=8, help="how many of them; default 8")
    add("--max-new-tokens", type=int, default=128, help="of each; default 128")
    arguments = parser.parse_args(argv)
    try:
        build(arguments)
        if arguments.compare is not None:
            compare(arguments)
    except (ValueError, OSError) as error:
        print(f"make_proposal_head: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
