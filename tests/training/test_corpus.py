"""The corpus: a split by file name that never moves, and what is refused."""

import json

import numpy as np
import pytest

from dflash_jax.engine.request import FinishReason, Output, Statistics
from dflash_jax.engine.text import TextTokenizer, eos_ids
from dflash_jax.training.capture import capture
from dflash_jax.training.corpus import (
    END_OF_TEXT,
    Document,
    encode,
    is_held_out,
    prompts_by_file,
    random_windows,
    read_documents,
    train_tokenizer,
    write_tokenizer,
)
from dflash_jax.training.prepared import load_prepared, prepare, save_prepared
from dflash_jax.training.validate import summarize
from tests.training import scenes

TEXT = "def f(x):\n    return x + 1\n\n"
HELD, KEPT = "chunk.py", "argparse.py"


def documents():
    return [Document(name=HELD, text=TEXT * 9), Document(name=KEPT, text=TEXT * 40)]


def test_the_held_out_split_is_fixed():
    """Names of the standard library and their side, as the shipped pair was trained."""
    sides = {name: is_held_out(name) for name in FIXED}
    assert sides == FIXED
    share = np.mean([is_held_out(f"package/module_{i}.py") for i in range(4000)])
    assert 0.04 < share < 0.06


def test_documents_come_sorted_without_tables_and_undecodable_files(tmp_path):
    for name in ("b.py", "a/c.py", "encodings/cp1.py", "__pycache__/x.py", "d.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "empty.py").touch()
    assert [document.name for document in read_documents(tmp_path)] == ["a/c.py", "b.py"]
    with pytest.raises(ValueError, match="corpus: expected .c files"):
        read_documents(tmp_path, ".c")


def test_a_tokenizer_gives_back_its_text_and_learns_from_training_files_only(tmp_path):
    secret = Document(name=HELD, text="zyxzyxzyx " * 200)
    tokenizer = train_tokenizer([secret, documents()[1]], 270)
    assert tokenizer.get_vocab_size() == 270
    assert not any("zyx" in entry for entry in tokenizer.get_vocab())
    write_tokenizer(tmp_path, tokenizer)
    loaded = TextTokenizer.load(tmp_path)
    text = "naïve = '€' # \t\n    def "
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.chat([{"role": "user", "content": "def f"}]) == loaded.encode("def f")
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert eos_ids(tmp_path) == {end} and end == 269
    assert encode(tokenizer, documents())[0][-1] == end


def test_a_prepared_corpus_returns_as_it_was_saved(tmp_path):
    made = prepare(documents(), 280)
    save_prepared(tmp_path / "p", made)
    found = load_prepared(tmp_path / "p")
    np.testing.assert_array_equal(found.train, made.train)
    assert [row.tolist() for row in found.held_out] == [row.tolist() for row in made.held_out]
    assert found.facts == made.facts and found.facts["held_out"]["files"] == 1
    (tmp_path / "p" / "tokens.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"tokens\.npz"):
        load_prepared(tmp_path / "p")


def test_too_little_text_is_refused_by_name():
    with pytest.raises(ValueError, match="held_out split"):
        prepare(documents()[1:], 280)
    with pytest.raises(ValueError, match="ids: expected at least 257"):
        train_tokenizer(documents(), 200)
    with pytest.raises(ValueError, match="corpus: expected at least 8 tokens, got 3"):
        random_windows(np.arange(3), 2, 8, 0)
    with pytest.raises(ValueError, match="prompts: expected a document of more than 8"):
        prompts_by_file([np.arange(8)], 1, 8, 0)


def test_captured_features_are_read_again_only_for_the_same_call(tmp_path):
    def captured(ids, layer_ids=(1, 3)):
        return capture(scenes.TARGET, scenes.training_dtypes("bfloat16"), layer_ids, params, ids,
                       batch=2, folder=tmp_path / "cache")

    params = {**scenes.target_params(scenes.TARGET, scenes.target(),
                                     scenes.training_dtypes("bfloat16"))}
    first = captured(scenes.tokens())
    stamp = (tmp_path / "cache" / "features.npy").stat().st_mtime_ns
    again = captured(scenes.tokens())
    assert (tmp_path / "cache" / "features.npy").stat().st_mtime_ns == stamp
    assert again.dtype == first.dtype and (again == first).all()
    other = captured((scenes.tokens() + 1) % 250)
    assert not (other == first).all()
    (tmp_path / "cache" / "features.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"features\.npy: expected .*damaged"):
        captured(scenes.tokens())


def test_figures_and_intervals_over_prompts():
    def output(rounds, *accepted):
        statistics = Statistics(rounds=rounds, accepted=sum(accepted), new_tokens=9,
                                accepted_by_position=list(accepted))
        return Output(tokens=(1,), finish_reason=FinishReason.LENGTH, statistics=statistics)

    found = summarize([output(10, 8, 4), output(30, 12, 3)], 3)
    assert found.rounds == 40 and found.prompts == 2
    assert found.tokens_per_round.value == pytest.approx(1 + 27 / 40)
    # Resampling two prompts gives one of them alone, or both.
    assert found.tokens_per_round.low == pytest.approx(1 + 15 / 30)
    assert found.tokens_per_round.high == pytest.approx(1 + 12 / 10)
    shares = [item.value for item in found.conditional]
    assert shares == pytest.approx([20 / 40, 7 / 20, 0.0])
    assert json.dumps(shares)


FIXED = {
    "chunk.py": True,
    "concurrent/futures/process.py": True,
    "copyreg.py": True,
    "ctypes/macholib/__init__.py": True,
    "ctypes/test/test_objects.py": True,
    "argparse.py": False,
    "asyncio/tasks.py": False,
    "collections/__init__.py": False,
    "json/decoder.py": False,
    "typing.py": False,
}
