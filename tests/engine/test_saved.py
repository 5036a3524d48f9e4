"""Images on disk: what is loaded goes on as the original would, what is not whole is refused."""

import errno
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from dflash_jax.engine.request import Embeddings, FinishReason
from tests.engine import scenes
from tests.engine.scenes import GREEDY, alone, finish, prompts, sampled

BUDGET = 40
BOTH = pytest.mark.parametrize("sampling", [GREEDY, sampled(3)], ids=["greedy", "sampled"])
HEADER, TENSORS = "image.json", "image.safetensors"


def started(engine, steps, sampling=GREEDY, n=1, budget=BUDGET):
    """A request after that many steps."""
    request = engine.submit(prompts()[n], max_new_tokens=budget, sampling=sampling)
    for _ in range(steps):
        engine.step()
    return request


def fill(folder, n=1, budget=BUDGET):
    """A folder with the image of a request in its middle."""
    engine = scenes.engine(checkpoints=())
    engine.save(engine.checkpoint(started(engine, 5, n=n, budget=budget)), folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    fill(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    for name in (HEADER, TENSORS):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    return tmp_path


def assert_whole(request, sampling):
    assert tuple(request.tokens) == alone(prompts()[1], BUDGET, sampling).tokens
    assert request.text == scenes.Letters().decode(request.tokens)


@BOTH
def test_a_saved_conversation_goes_on_in_another_process(tmp_path, sampling):
    engine = scenes.engine(checkpoints=())
    request = started(engine, 5, sampling)
    assert request.tokens
    engine.save(engine.checkpoint(request), tmp_path)
    other = scenes.engine(checkpoints=())
    image = other.load(tmp_path)
    again = other.restore(image)
    finish(other)
    assert_whole(again, sampling)
    follow = (*image.tokens, 9)
    reused = other.submit(follow, max_new_tokens=5)
    finish(other)
    assert reused.statistics.reused_tokens == image.frontier
    assert tuple(reused.tokens) == alone(follow, 5).tokens


def test_other_weights_and_models_are_refused_by_name(saved):
    models, params = scenes.pair()
    final = params.target["final_norm"]["weight"]
    flipped = {**params.target, "final_norm": {"weight": final.at[3].add(1e-6)}}
    other = scenes.Engine(models, params.replace(target=flipped))
    with pytest.raises(ValueError, match='image.json: weights: expected "[0-9a-f]{64}", got'):
        other.load(saved)
    with pytest.raises(ValueError, match="image.json: draft: expected"):
        scenes.engine("dflash2").load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["identity"].update(format=1), "format: expected 2, got 1"),
        (lambda header: header["identity"].update(page_size=64), "page_size: expected 16, got 64"),
        (lambda header: header["identity"]["dtypes"].update(param="bfloat16"), "dtypes: expected"),
        (lambda header: header["identity"]["target"].update(hidden=65), "target: expected"),
        (lambda header: header.update(digest="0"), "expected the digest"),
        (lambda header: header["tokens"].extend(range(16)), "expected the digest"),
    ],
)
def test_a_folder_of_another_kind_is_refused_by_name(saved, tmp_path, change, message):
    header = json.loads((saved / "image.json").read_text())
    change(header)
    (tmp_path / "image.json").write_text(json.dumps(header))
    (tmp_path / "image.safetensors").write_bytes((saved / "image.safetensors").read_bytes())
    with pytest.raises(ValueError, match=message):
        scenes.engine().load(tmp_path)


def test_a_folder_written_halfway_is_never_loaded(saved, tmp_path):
    content = (saved / "image.safetensors").read_bytes()
    (tmp_path / "image.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="image.json: expected a file"):
        scenes.engine().load(tmp_path)
    (tmp_path / "image.json").write_bytes((saved / "image.json").read_bytes())
    (tmp_path / "image.safetensors").write_bytes(content[:-8])
    with pytest.raises(ValueError, match="image.safetensors, image.json: expected the digest"):
        scenes.engine().load(tmp_path)


def test_numpy_numbers_are_saved(tmp_path):
    fill(tmp_path, budget=np.int64(BUDGET))
    engine = scenes.engine()
    again = engine.restore(engine.load(tmp_path))
    finish(engine)
    assert_whole(again, GREEDY)


@pytest.mark.parametrize("fault", ["serialising", "tensors", "header"])
def test_a_failed_save_keeps_the_old_image_and_leaves_nothing_behind(
    copied, monkeypatch, fault
):
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    if fault == "serialising":
        monkeypatch.setattr("dflash_jax.engine.saved.save", lambda tensors: 1 / 0)
    else:
        write, name = Path.write_bytes, TENSORS if fault == "tensors" else HEADER

        def full(file, content):
            if name in file.name:
                raise OSError(errno.ENOSPC, "disk full")
            return write(file, content)

        monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises((ZeroDivisionError, OSError)):
        fill(copied, n=0)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in copied.iterdir()} == before


@pytest.mark.parametrize("field, value", [
    ("tokens", "changed"), ("tokens", None), ("tokens", "x"), ("identity", None),
    ("identity", []), ("request", None), ("request", "x"), ("request", "missing"),
])
def test_a_changed_header_is_refused(copied, field, value):
    header = json.loads((copied / HEADER).read_text())
    if value == "missing":
        del header[field]
    else:
        header[field] = [header[field][0] ^ 1, *header[field][1:]] if value == "changed" else value
    (copied / HEADER).write_text(json.dumps(header))
    with pytest.raises(ValueError, match=HEADER):
        scenes.engine().load(copied)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"identity": {}}'])
def test_a_header_that_is_none_is_refused_by_name(copied, content):
    (copied / HEADER).write_bytes(content)
    with pytest.raises(ValueError, match=HEADER):
        scenes.engine().load(copied)


def test_a_missing_tensor_file_is_refused(copied):
    (copied / TENSORS).unlink()
    with pytest.raises(ValueError, match=f"{TENSORS}: expected a file"):
        scenes.engine().load(copied)


def signed(folder, content):
    """Puts other tensors into a folder, with a header that vouches for them."""
    header = json.loads((folder / HEADER).read_text())
    stated = {name: header[name] for name in ("tokens", "request")}
    text = json.dumps(stated, sort_keys=True).encode()
    header["digest"] = hashlib.sha256(content + text).hexdigest()
    (folder / HEADER).write_text(json.dumps(header))
    (folder / TENSORS).write_bytes(content)


@pytest.mark.parametrize("change", ["missing", "longer", "other dtype", "no tensors"])
def test_tensors_that_do_not_fit_are_refused_by_name_whatever_the_digest_says(copied, change):
    tensors = load((copied / TENSORS).read_bytes())
    name = next(name for name in sorted(tensors) if "pages" in name)
    if change == "missing":
        del tensors[name]
    elif change == "longer":
        tensors[name] = np.concatenate([tensors[name]] * 2, axis=1)
    elif change == "other dtype":
        tensors[name] = tensors[name].astype(np.float16)
    signed(copied, b"\0" * 9 if change == "no tensors" else save(tensors))
    with pytest.raises(ValueError, match=f"{TENSORS}: "):
        scenes.engine().load(copied)


@pytest.mark.parametrize("folder", [5, None, b"image"])
def test_what_is_no_path_is_refused_by_name(folder):
    engine = scenes.engine()
    image = engine.checkpoint(started(engine, 3))
    with pytest.raises(ValueError, match="folder: expected a path"):
        engine.save(image, folder)
    with pytest.raises(ValueError, match="folder: expected a path"):
        engine.load(folder)


def test_text_that_an_ended_turn_let_out_is_not_said_again_after_a_load(tmp_path):
    """The turn ends while a part of a stop string is held; the image holds nothing back then."""
    whole = alone(prompts()[1], BUDGET).tokens
    said = scenes.Letters().decode(whole)
    engine = scenes.engine()
    request = engine.submit(
        prompts()[1], max_new_tokens=12, stop_strings=[said[11] + "\N{SNOWMAN}"]
    )
    engine.wait_for(request)
    assert (request.text, request.finish_reason) == (said[:12], FinishReason.LENGTH)
    engine.save(engine.find(request.ledger), tmp_path)
    other = scenes.engine()
    for where in (engine, other):
        image = where.find(request.ledger) if where is engine else where.load(tmp_path)
        again = where.restore(image, max_new_tokens=20)
        finish(where)
        assert again.text == said[:20]


def test_images_keep_supplied_embeddings_and_the_rotation_behind_them(tmp_path):
    """A picture of 2 rows and 3 columns, and text in steps of 9: forks, restores, files agree."""
    places = np.arange(4, 10)
    line = 9 * np.concatenate([np.arange(4), np.full(6, 4), np.arange(6, 26)])
    positions = np.stack([line, line, line], axis=1).astype(np.int32)
    positions[places, 1] += np.arange(6) // 3
    positions[places, 2] += np.arange(6) % 3
    given = Embeddings(
        rows=np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32), index=places,
        positions=positions, rope_delta=9 * 26 - 30,
    )
    engine = scenes.engine()
    options = {
        "max_new_tokens": 24, "embeddings": given,
        "sampling": scenes.SamplingParams(temperature=1.5, seed=2),
    }
    whole = engine.wait_for(engine.submit(prompts()[1], **options)).tokens
    straight = scenes.embeddings(given.rows, places, 30)
    other = engine.submit(prompts()[1], **(options | {"embeddings": straight}))
    assert engine.wait_for(other).tokens != whole  # the positions count
    request = engine.submit(prompts()[1], **options)
    engine.step()
    images = [engine.checkpoint(request)]  # in the middle of the prompt
    while len(request.tokens) < 8:
        engine.step()
    images.append(engine.checkpoint(request))
    (child,) = engine.fork(request)
    again = [engine.restore(image) for image in images]
    finish(engine)
    for index, image in enumerate(images):
        engine.save(image, tmp_path / str(index))
        again.append(engine.restore(engine.load(tmp_path / str(index))))
    finish(engine)
    for one in (request, child, *again):
        assert tuple(one.tokens) == whole
    assert len(engine._store) == 4  # the kept ones and the loaded ones, no turn
