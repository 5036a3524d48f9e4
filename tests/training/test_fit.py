"""The optimiser's loop: overfitting, resuming, refusing, and losing nothing that is finished."""

import errno
import json
import shutil
from collections import namedtuple

import jax
import numpy as np
import pytest

from dflash_jax.training import results
from dflash_jax.training.fit import CHECKPOINT, FitConfig, fit, learning_rate
from dflash_jax.training.stages import DraftObjective, TargetObjective, fit_draft, fit_target
from dflash_jax.training.validate import measure_acceptance
from tests.steps.harness import assert_same_bytes
from tests.training import scenes

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("name", [pytest.param("dflash", marks=pytest.mark.slow), "dflash2"])
def test_a11_an_overfitted_sequence_is_accepted_whole_by_the_librarys_round(name):
    """Shifted labels, causal noise masks or an ignored tied head would leave acceptance near 0."""
    prompt = scenes.tokens()[0, : scenes.PROMPT].tolist()
    plain = scenes.models(name)
    outputs = measure_acceptance(plain, scenes.pair(name, scenes.shaken_draft(name)), [prompt],
                                 scenes.LENGTH - scenes.PROMPT)[1]
    ids = np.array([prompt + list(outputs[0].tokens)], np.int32)
    config = scenes.quick(steps=250, learning_rate=5e-3, warmup_steps=10, log_every=50)
    fitted = fit_draft(scenes.objective(name), scenes.data(name, ids), config)
    found, outputs = measure_acceptance(
        plain, scenes.pair(name, fitted.params), [prompt], 1 + 3 * (scenes.K + 1)
    )
    statistics = outputs[0].statistics
    assert statistics.rounds == 3
    # The last round may verify one less: its budget ends with the bonus.
    assert statistics.accepted == statistics.drafted >= 3 * scenes.K - 1
    assert list(outputs[0].tokens) == ids[0, scenes.PROMPT :][: len(outputs[0].tokens)].tolist()
    assert found.conditional[0].value == 1.0


def run(folder=None, steps=6, **fields):
    """A few steps of a tiny target, from the same start."""
    objective = TargetObjective(config=scenes.TARGET, dtypes=scenes.DTYPES, batch=2, length=24)
    return fit_target(
        objective, scenes.tokens().ravel(), scenes.quick(steps=steps, **fields), folder=folder
    )


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path, monkeypatch):
    whole = run()
    # Stopped after 4 of 6 steps: the loop ends there, the schedule does not.
    with monkeypatch.context() as patch:
        def stop(self, done, total, **values):
            if done >= 5:
                raise KeyboardInterrupt

        patch.setattr("dflash_jax.training.progress.Progress.show", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, save_every=2)
    resumed = run(tmp_path, save_every=2)
    assert resumed.history[0][0] > 1, "it started over"
    assert_same_bytes(resumed.params, whole.params)


def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(tmp_path):
    run(tmp_path, steps=2, save_every=1)
    with pytest.raises(ValueError, match="learning_rate: expected 0.5"):
        run(tmp_path, save_every=1, learning_rate=0.5)
    files = [file for file in (tmp_path / CHECKPOINT / "state").rglob("*") if file.is_file()]
    victim = max(files, key=lambda file: file.stat().st_size)
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{victim.name}: expected .*damaged checkpoint"):
        run(tmp_path, save_every=1)
    victim.unlink()
    with pytest.raises(ValueError, match="got no file"):
        run(tmp_path, save_every=1)
    (tmp_path / CHECKPOINT / results.MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest\.json: expected a manifest"):
        run(tmp_path, save_every=1)
    shutil.rmtree(tmp_path / CHECKPOINT / "state")
    (tmp_path / CHECKPOINT / results.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"manifest\.json: expected the manifest"):
        run(tmp_path, save_every=1)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 10))
    assert run(tmp_path, steps=3, save_every=1).steps == 3
    assert "disk full" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_results_are_whole_or_absent(tmp_path, monkeypatch):
    folder = tmp_path / "result"
    with results.replacing(folder) as partial:
        (partial / "file").write_text("first", encoding="utf-8")
    with pytest.raises(RuntimeError), results.replacing(folder) as partial:
        (partial / "file").write_text("half", encoding="utf-8")
        raise RuntimeError
    assert (folder / "file").read_text(encoding="utf-8") == "first"
    with results.replacing(folder) as partial:
        (partial / "file").write_text("second", encoding="utf-8")
    assert (folder / "file").read_text(encoding="utf-8") == "second"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 10))
    with pytest.raises(OSError, match="disk full") as caught:
        with results.replacing(folder, need_bytes=11):
            raise AssertionError("nothing may be written")
    assert caught.value.errno == errno.ENOSPC and str(folder) in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["result"]


def test_the_rate_rises_linearly_and_falls_to_its_share():
    config = FitConfig(steps=100, learning_rate=2.0, warmup_steps=10, final_share=0.1)
    rates = [float(learning_rate(config, np.int32(step), np.int32(100))) for step in range(101)]
    np.testing.assert_allclose(rates[:3], [0.2, 0.4, 0.6], rtol=1e-6)
    assert max(rates) == pytest.approx(2.0) and rates.index(max(rates)) in (9, 10)
    assert rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_a_budget_in_seconds_ends_the_run():
    def loss(params, data, key):
        return (params["x"] ** 2).sum(), {}

    params = {"x": jax.numpy.ones((2, 2))}
    found = fit(loss, params, {}, scenes.quick(steps=10**8, seconds=0.5, log_every=20))
    assert 1 < found.steps < 10**8 and found.seconds < 5


def test_wrong_inputs_are_refused_by_name():
    good = scenes.objective("dflash")
    far = scenes.tiny_draft(scenes.DraftKind.DFLASH, target_layer_ids=(1, 4))
    with pytest.raises(ValueError, match="target_layer_ids"):
        DraftObjective(**(vars(good) | {"draft": far}))
    other = scenes.tiny_draft(scenes.DraftKind.DFLASH, vocab_rows=300, mask_token_id=299)
    with pytest.raises(ValueError, match="vocab_rows: expected the target's 257"):
        DraftObjective(**(vars(good) | {"draft": other}))
    ids = scenes.tokens().copy()
    ids[0, 3] = 251
    with pytest.raises(ValueError, match=r"vocabulary: expected ids in \[0, 250\), got 251"):
        fit_draft(good, {"tokens": ids}, scenes.quick())
    with pytest.raises(ValueError, match="blocks: expected at most 25 anchors"):
        fit_draft(scenes.objective("dflash", blocks=26), {"tokens": scenes.tokens()},
                  scenes.quick())
    data = scenes.data("dflash", scenes.tokens())
    with pytest.raises(ValueError, match="features: expected"):
        fit_draft(good, {**data, "features": data["features"][..., :64]}, scenes.quick())
    for field in ("steps", "log_every", "learning_rate", "seconds"):
        with pytest.raises(ValueError, match=field):
            scenes.quick(**{field: 0})


def test_a_manifest_lists_every_file(tmp_path):
    (tmp_path / "a").write_text("a", encoding="utf-8")
    results.seal(tmp_path, {"step": 3})
    assert results.unseal(tmp_path) == {"step": 3}
    listed = json.loads((tmp_path / results.MANIFEST).read_text(encoding="utf-8"))["files"]
    assert list(listed) == ["a"]
