"""A draft's own embedding and head, and indexed heads (pitfalls F1, F2)."""

import numpy as np
import pytest

from dflash_jax.config import DraftKind, DtypePolicy, tiny_draft, tiny_target
from dflash_jax.weights import WeightsError, indexed_head, load_draft
from dflash_jax.weights.export import draft_json
from tests.weights.handmade import draft_tensors, write

FIRST, SECOND = DraftKind.DFLASH, DraftKind.DFLASH2
EXACT = DtypePolicy.exact()
TARGET = tiny_target()  # 257 rows, 250 public
IDS = np.array([7, 3, 249, 0, 12, 100, 50, 6, 5])


def load(folder, extra, kind=FIRST):
    tensors = draft_tensors(second=kind is SECOND) | extra
    return load_draft(write(folder, draft_json(tiny_draft(kind)), tensors), TARGET, EXACT)


def matrix(rows, seed=5):
    """Whole numbers, so that bfloat16 files hold them."""
    return np.random.default_rng(seed).integers(-9, 9, (rows, 64)).astype(np.float32)


def mapped(head, ids=IDS, **extra):
    return {"lm_head.weight": head, "d2t": ids - np.arange(len(ids)), **extra}


def test_without_own_tensors_the_draft_uses_the_targets(tmp_path):
    config, params = load(tmp_path, {})
    assert (config.own_embedding, config.head_rows) == (False, 0)
    assert "embedding" not in params and "head" not in params


def test_f2_own_embedding_and_full_head_are_used(tmp_path):
    embedding, head = matrix(257, 1), matrix(257, 2)
    extra = {"embed_tokens.weight": embedding, "model.lm_head.weight": head}
    config, params = load(tmp_path, extra)
    assert (config.own_embedding, config.head_rows) == (True, 250)
    np.testing.assert_array_equal(params["embedding"], embedding)
    np.testing.assert_array_equal(params["head"]["kernel"], head[:250])
    np.testing.assert_array_equal(params["head"]["token_ids"], np.arange(250))


def test_f1_offset_map_gives_ids_in_file_order_for_dflash(tmp_path):
    head = matrix(9)
    config, params = load(tmp_path, mapped(head))
    assert config.head_rows == 9
    np.testing.assert_array_equal(params["head"]["token_ids"], IDS)
    np.testing.assert_array_equal(params["head"]["kernel"], head)
    assert params["head"]["token_ids"].dtype == np.int32


def test_f1_dflash2_rows_are_sorted_by_token_id(tmp_path):
    head, order = matrix(9), [3, 1, 8, 7, 0, 4, 6, 5, 2]
    config, params = load(tmp_path, mapped(head), SECOND)
    assert config.head_rows == 9
    np.testing.assert_array_equal(params["head"]["token_ids"], IDS[order])
    np.testing.assert_array_equal(params["head"]["kernel"], head[order])


def flags(ids):
    mask = np.zeros(257, bool)
    mask[ids] = True
    return mask


def test_flags_must_agree_with_the_offsets(tmp_path):
    load(tmp_path / "a", mapped(matrix(9), t2d=flags(IDS)))
    with pytest.raises(WeightsError, match="t2d: expected a flag at the 9 mapped ids"):
        load(tmp_path / "b", mapped(matrix(9), t2d=flags(IDS[1:])))


@pytest.mark.parametrize("shape", [(9,), (250,), (258,), (257, 1), (1, 257)])
def test_flags_of_another_shape_than_the_vocabulary_are_refused(tmp_path, shape):
    mask = np.zeros(np.prod(shape), bool)
    mask[[i for i in IDS if i < mask.size]] = True
    with pytest.raises(WeightsError, match=r"t2d: expected .* of shape \(257,\), got BOOL"):
        load(tmp_path, mapped(matrix(9), t2d=mask.reshape(shape)))


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        ({"lm_head.weight": matrix(9)}, "lm_head.weight: expected 257 rows without d2t, got 9"),
        ({"d2t": np.arange(9)}, "d2t: an id map without lm_head.weight"),
        (mapped(matrix(9)[:, :63]), r"lm_head.weight: expected shape \(rows, 64\)"),
        (mapped(matrix(8)), r"d2t: expected .* of shape \(8,\)"),
        (mapped(matrix(2), np.array([4, 4])), "d2t: expected distinct token ids"),
        (mapped(matrix(2), np.array([0, 250])), r"d2t: expected token ids in \[0, 250\)"),
        (mapped(matrix(2), np.array([-1, 5])), r"d2t: expected token ids in \[0, 250\)"),
    ],
)
def test_faults_of_an_own_head_are_listed_with_the_others(tmp_path, extra, fault):
    with pytest.raises(WeightsError, match=fault) as error:
        load(tmp_path, extra | {"surplus": np.zeros(1, np.float32)})
    assert any("surplus: unmapped" in line for line in error.value.faults)


@pytest.mark.parametrize("kind", [FIRST, SECOND])
def test_indexed_head_attaches_rows(tmp_path, kind):
    config, params = load(tmp_path, {}, kind)
    head = matrix(9)
    with_head, both = indexed_head(TARGET, config, params, head, IDS)
    order = np.argsort(IDS) if kind is SECOND else np.arange(9)
    assert (with_head.head_rows, config.head_rows) == (9, 0)
    np.testing.assert_array_equal(both["head"]["token_ids"], IDS[order])
    np.testing.assert_array_equal(both["head"]["kernel"], head[order])
    assert "head" not in params


@pytest.mark.parametrize(
    ("rows", "ids", "field"),
    [
        (9, IDS[:8], "rows"),
        (2, np.array([1, 1]), "token_ids"),
        (2, np.array([1, 250]), "token_ids"),
        (2, np.array([1.0, 2.0]), "token_ids"),
        (0, np.array([], int), "token_ids"),
    ],
)
def test_wrong_indexed_head_names_its_argument(rows, ids, field):
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        indexed_head(TARGET, tiny_draft(FIRST), {}, matrix(rows), ids)
