"""Writes a tiny random target and draft in Hugging Face layout, with a byte tokenizer.

    python scripts/make_tiny_weights.py --out DIR [--moe] [--draft dflash2] [--seed 0]

makes DIR/target (config.json, model.safetensors, tokenizer.json, tokenizer_config.json,
generation_config.json) and DIR/draft (config.json, model.safetensors). The weights are random:
proposals are rarely accepted, but every path of the library runs on them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.config import (
    DraftConfig,
    DraftKind,
    DtypePolicy,
    TargetConfig,
    describe,
    tiny_draft,
    tiny_target,
)
from dflash_jax.weights.export import save_draft, save_target
from dflash_jax.weights.init import random_draft, random_target

DRAFTS = {"dflash": DraftKind.DFLASH, "dflash2": DraftKind.DFLASH2}
START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = (TEXT_END, START, END)
RESERVED = 5  # rows above the tokenizer's ids; the mask id is one of them
BLOCK_SIZE = 8
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)


def byte_tokenizer() -> Tokenizer:
    """One id a byte, no merges, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer and the generation defaults beside the target."""
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(text) for text in (END, TEXT_END)]
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": TEXT_END,
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": ends, "pad_token_id": ends[1]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def configs(public: int, *, moe: bool, kind: DraftKind) -> tuple[TargetConfig, DraftConfig]:
    """The tiny pair over a vocabulary of `public` ids and a few reserved rows."""
    rows = public + RESERVED
    target = tiny_target(moe, vocab_rows=rows, public_vocab=public)
    draft = tiny_draft(kind, vocab_rows=rows, mask_token_id=rows - 1, block_size=BLOCK_SIZE)
    return target, draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--moe", action="store_true", help="experts instead of a dense MLP")
    parser.add_argument("--draft", choices=DRAFTS, default="dflash2")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer, policy = byte_tokenizer(), DtypePolicy()
    public = tokenizer.get_vocab_size(with_added_tokens=True)
    target, draft = configs(public, moe=args.moe, kind=DRAFTS[args.draft])
    target_params = random_target(target, policy, seed=args.seed)
    draft_params = random_draft(draft, policy, seed=args.seed + 1)
    save_target(args.out / "target", target, target_params)
    save_draft(args.out / "draft", draft, draft_params, target_layers=target.num_layers)
    write_tokenizer(args.out / "target", tokenizer)
    print(describe(target, draft))


if __name__ == "__main__":
    main()
