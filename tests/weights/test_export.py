"""Params -> files -> params, bit for bit, and the script that writes a tiny pair."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.config import ConvConfig, DraftKind, DtypePolicy, tiny_draft, tiny_target
from dflash_jax.weights import indexed_head, load_draft, load_target
from dflash_jax.weights.export import save_draft, save_target
from dflash_jax.weights.init import LOGIT_SPREAD, random_draft, random_target
from scripts import make_tiny_weights
from tests.weights.handmade import draft_tensors, target_tensors

FIRST, SECOND = DraftKind.DFLASH, DraftKind.DFLASH2
EXACT, MIXED = DtypePolicy.exact(), DtypePolicy()


def assert_bits_equal(actual, expected):
    paths = [jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (actual, expected)]
    assert [path for path, _ in paths[0]] == [path for path, _ in paths[1]]
    for (path, left), (_, right) in zip(*paths, strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes(), path


@pytest.mark.parametrize("policy", [EXACT, MIXED])
@pytest.mark.parametrize(
    "config",
    [tiny_target(), tiny_target(moe=True), tiny_target(tie_embeddings=True)],
    ids=["dense", "moe", "tied"],
)
def test_target_round_trip_is_exact(tmp_path, config, policy):
    params = random_target(config, policy, seed=3)
    save_target(tmp_path, config, params)
    loaded, again = load_target(tmp_path, policy, public_vocab=config.public_vocab)
    assert loaded == config
    assert_bits_equal(again, params)


@pytest.mark.parametrize("policy", [EXACT, MIXED])
@pytest.mark.parametrize(
    "config",
    [
        tiny_draft(FIRST, causal=(True, False), block_size=16),
        tiny_draft(SECOND),
        tiny_draft(SECOND, conv=ConvConfig(taps=3, group_width=8), causal=(True, True)),
        tiny_draft(FIRST, own_embedding=True),
    ],
    ids=["dflash", "dflash2", "dflash2-3-taps", "own-embedding"],
)
def test_draft_round_trip_is_exact(tmp_path, config, policy):
    params = random_draft(config, policy, seed=3)
    save_draft(tmp_path, config, params, target_layers=tiny_target().num_layers)
    loaded, again = load_draft(tmp_path, tiny_target(), policy)
    assert loaded == config
    assert_bits_equal(again, params)


@pytest.mark.parametrize("kind", [FIRST, SECOND])
def test_indexed_head_round_trip_is_exact(tmp_path, kind):
    base = tiny_draft(kind)
    rows = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    ids = np.array([7, 3, 249, 0, 12, 100, 50, 6, 5])
    params = random_draft(base, EXACT, seed=1)
    config, params = indexed_head(tiny_target(), base, params, rows, ids)
    save_draft(tmp_path, config, params)
    loaded, again = load_draft(tmp_path, tiny_target(), EXACT)
    assert loaded == config
    assert_bits_equal(again, params)


def test_files_have_the_names_and_shapes_of_released_ones(tmp_path):
    for moe in (False, True):
        config = tiny_target(moe)
        save_target(tmp_path, config, random_target(config, MIXED, seed=0))
        expected = {n: a.shape for n, a in target_tensors(moe, prefix="model.").items()}
        assert {
            n: a.shape for n, a in load_file(tmp_path / "model.safetensors").items()
        } == expected
    for kind in (FIRST, SECOND):
        config = tiny_draft(kind)
        save_draft(tmp_path, config, random_draft(config, MIXED, seed=0))
        expected = {n: a.shape for n, a in draft_tensors(second=kind is SECOND).items()}
        assert {
            n: a.shape for n, a in load_file(tmp_path / "model.safetensors").items()
        } == expected


def test_causality_that_a_file_cannot_express_is_an_error(tmp_path):
    config = tiny_draft(FIRST, causal=(False, True))
    with pytest.raises(ValueError, match="^causal: "):
        save_draft(tmp_path, config, random_draft(config, EXACT, seed=0))


def test_wrong_shape_of_a_parameter_is_an_error(tmp_path):
    config = tiny_target()
    params = random_target(config, EXACT, seed=0)
    wider = dataclasses.replace(config, hidden=128)
    with pytest.raises(ValueError, match=r"expected shape .*, got "):
        save_target(tmp_path, wider, params)


@pytest.mark.parametrize("tied", [False, True])
def test_random_logits_have_the_stated_spread_with_and_without_an_own_head(tied):
    config = tiny_target(tie_embeddings=tied)
    params = random_target(config, EXACT, seed=0)
    normed = np.random.default_rng(1).standard_normal((50, config.hidden))
    logits = normed @ np.asarray(params["embedding" if tied else "head"]).T
    assert np.std(logits) == pytest.approx(LOGIT_SPREAD, rel=0.05)


def test_public_vocab_is_not_stored_with_a_target(tmp_path):
    config = tiny_target()
    save_target(tmp_path, config, random_target(config, EXACT, seed=0))
    loaded, _ = load_target(tmp_path, EXACT)
    assert loaded == dataclasses.replace(config, public_vocab=config.vocab_rows)


def test_random_draft_with_an_own_head_is_refused():
    with pytest.raises(ValueError, match="^head_rows: "):
        random_draft(tiny_draft(FIRST, head_rows=3), EXACT, seed=0)


@pytest.mark.parametrize("options", [["--moe", "--draft", "dflash"], ["--seed", "4"]])
def test_script_writes_a_pair_that_loads(tmp_path, monkeypatch, options, capsys):
    monkeypatch.setattr(sys, "argv", ["make_tiny_weights.py", "--out", str(tmp_path), *options])
    make_tiny_weights.main()
    assert "bidirectional" in capsys.readouterr().out
    target, _ = load_target(tmp_path / "target", MIXED)
    draft, _ = load_draft(tmp_path / "draft", target, MIXED)
    assert (target.public_vocab, target.vocab_rows) == (259, 264)
    assert draft.mask_token_id >= target.public_vocab
    assert (target.moe is not None, draft.kind is FIRST) == (("--moe" in options),) * 2
    generation = json.loads((tmp_path / "target" / "generation_config.json").read_text())
    assert all(0 <= i < target.public_vocab for i in generation["eos_token_id"])


def test_byte_tokenizer_round_trips_any_text():
    tokenizer = make_tiny_weights.byte_tokenizer()
    text = "tab\té ✎ \x00 end"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [258]
