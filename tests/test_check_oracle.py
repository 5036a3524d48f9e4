"""`scripts/check_oracle.py` passes on the small kit and notices one percent of damage anywhere.

The library runs once; only the comparisons are repeated.
"""

import dataclasses
import json

import numpy as np
import pytest

from scripts import check_oracle
from scripts.oracle.compare import Exact, Floats, Input, compare
from scripts.oracle.kit import Golden, KitError, golden_paths, read_golden
from scripts.oracle.loaded import LoadedKit
from scripts.oracle.run import check_kit, checks_of

DAMAGE = 0.01


@pytest.fixture(scope="module")
def kit_folder(repository_root):
    return repository_root / "tests" / "data" / "kit_tiny"


@pytest.fixture(scope="module")
def computed(kit_folder):
    """Every golden of the kit with what the library makes of it."""
    kit = LoadedKit(kit_folder)
    goldens = [read_golden(path) for path in golden_paths(kit_folder)]
    return [(golden, checks_of(golden, kit)) for golden in goldens]


def _damaged(golden: Golden, name: str, array: np.ndarray) -> Golden:
    return dataclasses.replace(golden, arrays={name: array})


def _failures(golden: Golden, checks) -> int:
    return sum(line.ok is False for line in compare(golden, checks))


def _named(computed, kind):
    """(golden, checks, name) of every array with a check of a kind."""
    for golden, checks in computed:
        for name in golden.arrays:
            if any(isinstance(check, kind) for check in checks[name]):
                yield golden, checks, name


def test_every_array_of_the_small_kit_agrees(computed):
    lines = [line for golden, checks in computed for line in compare(golden, checks)]
    assert not [str(line) for line in lines if line.ok is False]
    assert sum(line.ok is True for line in lines) > 160


def test_every_kind_of_golden_is_in_the_small_kit(computed):
    kinds = {golden.kind for golden, _ in computed}
    assert kinds == {"target", "greedy", "draft", "e2e", "selector_ties", "dist", "verify"}


def test_one_percent_of_a_float_array_spread_evenly_is_noticed(computed):
    generator = np.random.default_rng(0)
    for golden, checks, name in _named(computed, Floats):
        array = golden[name].astype(np.float64)
        noise = generator.standard_normal(array.shape)
        noise *= DAMAGE * np.linalg.norm(array) / np.linalg.norm(noise)
        damaged = _damaged(golden, name, (array + noise).astype(np.float32))
        assert _failures(damaged, checks) == len(checks[name]), f"{golden.stem}/{name}"


def test_one_percent_of_a_float_array_in_one_value_is_noticed(computed):
    for golden, checks, name in _named(computed, Floats):
        array = golden[name].copy()
        for place in (0, array.size // 2, array.size - 1):
            one = array.copy()
            one.flat[place] += DAMAGE * np.linalg.norm(array)
            damaged = _damaged(golden, name, one)
            assert _failures(damaged, checks) == len(checks[name]), f"{golden.stem}/{name}"


def test_one_percent_is_noticed_where_values_are_small(computed):
    for golden, checks, name in _named(computed, Floats):
        small = [Floats(np.asarray(c.value) * 1e-4, c.absolute) for c in checks[name]]
        tiny = _damaged(golden, name, golden[name] * np.float32(1e-4))
        assert _failures(tiny, {name: small}) == 0, f"{golden.stem}/{name}"
        scaled = _damaged(golden, name, tiny[name] * np.float32(1 + DAMAGE))
        assert _failures(scaled, {name: small}) == len(small), f"{golden.stem}/{name}"


def test_one_id_off_by_one_is_noticed(computed):
    for golden, checks, name in _named(computed, Exact):
        for check in checks[name]:
            where = np.ones(golden[name].shape[:1], bool) if check.where is None else check.where
            for row in (np.flatnonzero(where)[0], np.flatnonzero(where)[-1]):
                array = golden[name].copy()
                array[row] += 1
                damaged = _damaged(golden, name, array)
                assert _failures(damaged, {name: [check]}) == 1, f"{golden.stem}/{name}"


def test_a_value_that_is_not_finite_fails(computed):
    golden, checks, name = next(_named(computed, Floats))
    value = np.array(checks[name][0].value)
    value.flat[0] = np.nan
    assert _failures(_damaged(golden, name, golden[name]), {name: [Floats(value)]}) == 1


def test_an_array_or_a_file_without_a_check_fails(computed, tmp_path, kit_folder):
    golden, checks = computed[0]
    stranger = _damaged(golden, "unheard", np.zeros(3))
    assert _failures(stranger, checks) == 1
    (tmp_path / "golden").mkdir()
    np.savez(tmp_path / "golden" / "unheard.npz", value=np.zeros(3))
    assert [line.ok for line in check_kit(tmp_path)] == [False]


def test_a_golden_without_its_models_fails_and_does_not_end_the_run(tmp_path):
    (tmp_path / "golden").mkdir()
    np.savez(tmp_path / "golden" / "greedy_absent.npz", prompt0=np.arange(3))
    np.savez(tmp_path / "golden" / "target_absent.npz", ids=np.arange(3))
    lines = list(check_kit(tmp_path))
    assert [line.ok for line in lines] == [False, False]
    assert "targets/absent" in lines[0].error


def test_a_kit_without_goldens_is_an_error(tmp_path):
    with pytest.raises(KitError, match="golden"):
        list(check_kit(tmp_path))


def test_a_folder_that_is_no_kit_is_one_line_and_exit_status_two(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "absent"):
        assert check_oracle.main([str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert err.startswith("check_oracle.py: error: kit: expected files ")


def test_goldens_are_chosen_by_their_models(kit_folder):
    lines = list(check_kit(kit_folder, targets=["other"], drafts=["other"]))
    assert {line.name.split("/")[0] for line in lines} == {"selector_ties"}


def test_only_inputs_are_not_compared(computed):
    inputs = {name for _, _, name in _named(computed, Input)}
    assert "logits" in inputs and "hidden_w2" not in inputs
    sampled = [entry for entry in computed if entry[0].kind in ("dist", "verify")]
    silent = {name for _, _, name in _named(sampled, Input)}
    assert silent == {"prompt", "public_vocab", "anchor", "ranks"}


def test_sampled_goldens_without_settings_or_with_strange_ones_fail(tmp_path, kit_folder):
    for part in ("targets", "drafts"):
        (tmp_path / part).symlink_to(kit_folder / part)
    (tmp_path / "golden").mkdir()
    for name in ("dist_tiny.npz", "verify_tiny__tiny_dflash2.npz"):
        (tmp_path / "golden" / name).symlink_to(kit_folder / "golden" / name)
    for manifest, error in (
        (None, "expected settings of dist_tiny, got none"),
        ({"notes": {"dist_tiny": {"plain": {"settings": {"typical": 0.5}}}}}, "got ['typical']"),
    ):
        if manifest is not None:
            (tmp_path / "manifest.json").write_text(json.dumps(manifest), "utf-8")
        lines = list(check_kit(tmp_path))
        assert [line.ok for line in lines] == [False, False]
        assert error in lines[0].error and "manifest.json" in lines[1].error
