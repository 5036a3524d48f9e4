"""What a caller gives a request: every form that works, and every other one refused by name.

All refusals come before any device work and leave the engine as it was.
"""

import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingParams
from tests.engine import scenes
from tests.engine.scenes import alone, prompts

BAD_LISTS = [5, None, True, 1.5, "ab", b"ab", {1: 2}, np.array(3)]


def submit(engine, **options):
    options = {"prompt": [1, 2, 3], "max_new_tokens": 4, **options}
    return engine.submit(options.pop("prompt"), **options)


@pytest.fixture(scope="module")
def shared():
    """One engine, which every refusal leaves idle."""
    return scenes.engine()


@pytest.fixture
def idle(shared):
    yield shared
    assert shared.idle and not len(shared._store)


@pytest.mark.parametrize("given", BAD_LISTS)
@pytest.mark.parametrize("name", ["eos_ids", "stop_strings", "stop_sequences", "prompt"])
def test_what_is_no_list_is_refused_by_name(idle, name, given):
    """Text is a prompt, and None stands for the engine's EOS ids."""
    if (name, given) in [("prompt", "ab"), ("eos_ids", None)] if not isinstance(
        given, np.ndarray
    ) else []:
        return
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        submit(idle, **{name: given})


@pytest.mark.parametrize(("options", "message"), [
    ({"eos_ids": [[1]]}, r"eos_ids: expected token ids, got \[1\]"),
    ({"eos_ids": [True]}, "eos_ids: expected token ids, got True"),
    ({"stop_strings": [5]}, "stop_strings: expected strings that are not empty, got 5"),
    ({"stop_strings": [b"a"]}, "stop_strings: expected strings that are not empty, got b'a'"),
    ({"stop_sequences": [1, 2]}, r"stop_sequences\[0\]: expected a list of token ids, got 1"),
    ({"stop_sequences": ["ab"]}, r"stop_sequences\[0\]: expected a list of token ids, got 'ab'"),
    ({"stop_sequences": [["a"]]}, r"stop_sequences: expected ids in \[0, 257\), got 'a'"),
    ({"max_new_tokens": True}, "max_new_tokens: expected an integer >= 1, got True"),
    ({"max_new_tokens": 4.0}, "max_new_tokens: expected an integer >= 1, got 4.0"),
    ({"max_new_tokens": None}, "max_new_tokens: expected an integer >= 1, got None"),
    ({"on_tokens": 3}, "on_tokens: expected a function or None, got 3"),
    ({"sampling": None}, "sampling: expected SamplingParams, got None"),
    ({"sampling": {"temperature": 1}}, "sampling: expected SamplingParams, got {"),
    ({"embeddings": 3}, "embeddings: expected Embeddings, got int"),
    ({"reuse": "no"}, "reuse: expected True or False, got 'no'"),
    ({"wait": 0}, "wait: expected True or False, got 0"),
    ({"prompt": [1, "a"]}, r"prompt: expected ids in \[0, 250\), got 'a'"),
    ({"prompt": [[1, 2]]}, r"prompt: expected ids in \[0, 250\), got \[1, 2\]"),
    ({"prompt": ""}, "prompt: expected at least one token"),
])
def test_values_of_another_type_are_refused_by_name(idle, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        submit(idle, **options)


@pytest.mark.parametrize(("call", "message"), [
    (lambda engine: engine.generate(5, max_new_tokens=3), "prompts: expected a list of prompts"),
    (lambda engine: engine.generate("abc", max_new_tokens=3), "prompts: expected a list"),
    (lambda engine: engine.generate([1, 2], max_new_tokens=3), "prompt: expected a list"),
    (lambda engine: engine.find(5), "ids: expected a list of token ids, got 5"),
    *[
        (lambda engine, name=name: getattr(engine, name)(3), "request: expected a Request, got 3")
        for name in ("cancel", "stream", "astream", "wait_for", "read", "fork", "checkpoint")
    ],
    (lambda engine: engine.force(3, [1]), "request: expected a Request, got 3"),
    (lambda engine: engine.save(3, "folder"), "image: expected a StateImage, got 3"),
    *[
        (lambda engine, name=name: getattr(engine, name)(None), "image: expected a StateImage")
        for name in ("restore", "drop", "replicate")
    ],
])
def test_arguments_of_another_type_are_refused_by_name(idle, call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(idle)


@pytest.mark.parametrize(("options", "message"), [
    ({"count": 1.5}, "count: expected an integer >= 1, got 1.5"),
    ({"count": True}, "count: expected an integer >= 1, got True"),
    ({"count": 0}, "count: expected an integer >= 1, got 0"),
    ({"sampling": SamplingParams()}, "sampling: expected a list of SamplingParams"),
    ({"sampling": [3]}, "sampling: expected SamplingParams, got 3"),
    ({"count": 2, "sampling": [SamplingParams()]}, "sampling: expected 2 entries, got 1"),
    ({"wait": 1}, "wait: expected True or False, got 1"),
    ({"prompt": [1]}, "changes: expected some of max_new_tokens, eos_ids,"),
    ({"statistics": None}, "changes: expected some of max_new_tokens, eos_ids,"),
    ({"row": 7}, "changes: expected some of max_new_tokens, eos_ids,"),
    ({"stop_strings": "a"}, "stop_strings: expected a list of strings, got 'a'"),
    ({"on_tokens": 3}, "on_tokens: expected a function or None, got 3"),
    ({"max_new_tokens": 1}, "max_new_tokens: expected more than the . published, got 1"),
])
def test_a_fork_with_wrong_options_does_nothing(options, message):
    """Not even on the device: the features that wait for the draft still wait."""
    engine = scenes.engine(checkpoints=())
    request = engine.submit(prompts()[1], max_new_tokens=9)
    while not request.tokens:
        engine.step()
    free, state = engine._pools.num_free_slots, engine._lanes.state
    with pytest.raises(ValueError, match=f"^{message}"):
        engine.fork(request, **options)
    assert (engine._pools.num_free_slots, len(engine._store)) == (free, 0)
    assert engine._lanes.state is state
    assert engine.wait_for(request).tokens == alone(prompts()[1], 9).tokens


@pytest.mark.parametrize("ids", [5, "ab", None, {1: 2}])
def test_forced_tokens_of_another_type_are_refused_by_name(ids):
    engine = scenes.engine(checkpoints=())
    request = engine.submit(prompts()[0], max_new_tokens=9)
    while not request.tokens:
        engine.step()
    with pytest.raises(ValueError, match="^ids: expected a list of token ids, got"):
        engine.force(request, ids)
    engine.force(request, iter([7, 8]))
    assert request.tokens[-2:] == [7, 8]


@pytest.mark.parametrize(("options", "message"), [
    ({"tokenizer": 3}, "tokenizer: expected one that decodes, or None, got 3"),
    ({"eos_ids": 3}, "eos_ids: expected a list of token ids, got 3"),
    ({"eos_ids": [999]}, r"eos_ids: expected ids in \[0, 257\), got 999"),
    ({"checkpoints": "prompt"}, "checkpoints: expected a list of names, got 'prompt'"),
    ({"checkpoints": ["prompts"]}, "checkpoints: expected some of .*, got 'prompts'"),
    ({"checkpoints": [3]}, "checkpoints: expected some of .*, got 3"),
    ({"device_bytes": -1}, "device_bytes: expected an integer >= 0 or None, got -1"),
    ({"host_bytes": "1 GB"}, "host_bytes: expected an integer >= 0 or None, got '1 GB'"),
    ({"tree_nodes": 8}, "tree_nodes: expected a list of widths, or 'auto', got 8"),
    ({"tree_nodes": "wide"}, "tree_nodes: expected widths or 'auto', got 'wide'"),
    ({"tree_nodes": ["a"]}, "tree_nodes: "),
    ({"tree_nodes": [True]}, "tree_nodes: "),
])
def test_an_engine_with_wrong_options_is_refused_by_name(options, message):
    models, params = scenes.pair()
    with pytest.raises(ValueError, match=f"^{message}"):
        scenes.Engine(models, params, **options)


def test_what_is_no_pair_is_refused_by_name():
    models, params = scenes.pair()
    with pytest.raises(ValueError, match="models: expected Models, got int"):
        scenes.Engine(3, params)
    with pytest.raises(ValueError, match="models: expected Models, got int"):
        scenes.generate(3, params, [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match="params: expected Params, got int"):
        scenes.Engine(models, 3)


@pytest.mark.parametrize(("options", "message"), [
    ({"prompts": 5}, "prompts: expected a list of prompts, got 5"),
    ({"prompts": [5]}, r"prompts\[0\]: expected a list of token ids, got 5"),
    ({"eos_ids": 3}, "eos_ids: expected a list of token ids, got 3"),
    ({"on_tokens": 3}, "on_tokens: expected a function or None, got 3"),
    ({"sampling": 3}, "sampling: expected a list of SamplingParams, or one for all, got 3"),
    ({"sampling": [3]}, "sampling: expected SamplingParams, got 3"),
    ({"tree_nodes": 8}, "tree_nodes: expected a list of widths, or 'auto', got 8"),
])
def test_generate_refuses_them_by_name_too(options, message):
    options = {"prompts": [[1, 2]], "max_new_tokens": 3, **options}
    with pytest.raises(ValueError, match=f"^{message}"):
        scenes.generate(*scenes.pair(), options.pop("prompts"), **options)


def test_iterators_are_read_once_and_kept():
    engine = scenes.engine()
    request = engine.submit(
        iter(prompts()[2]), max_new_tokens=np.int32(4), eos_ids=iter([249]),
        stop_strings=iter(["\N{SNOWMAN}"]), stop_sequences=iter([iter([249, 249])]),
    )
    assert engine.wait_for(request).tokens == alone(prompts()[2], 4).tokens
    assert (request.max_new_tokens, request.stop_sequences) == (4, ((249, 249),))
    assert type(request.max_new_tokens) is int


def test_ids_may_be_numpy_integers():
    engine = scenes.engine()
    request = engine.submit(np.array(prompts()[2]), max_new_tokens=4, eos_ids=np.array([249]))
    assert engine.wait_for(request).tokens == alone(prompts()[2], 4).tokens
    assert {type(token) for token in (*request.prompt, *request.eos_ids)} == {int}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt: expected at least one token"),
        ({"prompt": [250]}, r"prompt: expected ids in \[0, 250\), got 250"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer >= 1, got 0"),
        ({"max_new_tokens": 126}, r"max_context: expected at least 129 .*, got 128"),
        ({"eos_ids": [-1]}, "eos_ids: expected ids"),
        ({"stop_strings": [""]}, "stop_strings: expected strings that are not empty"),
        ({"prompt": [1.0]}, r"prompt: expected ids in \[0, 250\), got 1.0"),
        ({"stop_sequences": [[]]}, "stop_sequences: expected at least one id"),
        ({"sampling": 3}, "sampling: expected SamplingParams, got 3"),
        ({"sampling": scenes.SamplingParams(logit_bias={300: 1.0})}, "logit_bias: expected ids"),
        ({"prompt": [{"role": "user"}], "tokenizer": None}, "expected token ids without a token"),
        ({"stop_strings": ["a"], "tokenizer": None}, "stop_strings: expected none without"),
        (
            {"embeddings": scenes.embeddings(np.zeros((1, 3)), [1])},
            r"embeddings.rows: expected \[1, 64\], got \[1, 3\]",
        ),
        ({"embeddings": scenes.embeddings(np.zeros((1, 64)), [3])}, "embeddings.index: expected"),
    ],
)
def test_faults_of_the_caller_are_named_before_device_work(options, message):
    engine = scenes.engine()
    if "tokenizer" in options:
        engine.tokenizer = options.pop("tokenizer")
    options = {"prompt": [1, 2, 3], "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        engine.submit(options.pop("prompt"), **options)
    assert engine.idle
