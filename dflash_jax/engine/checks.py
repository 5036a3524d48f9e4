"""What a caller may get wrong, found on the host before any device work."""

from collections.abc import Collection, Mapping, Sequence
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.engine.request import Embeddings, OnTokens, Request
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.steps.init import abstract_params

MAX_OFFSET = 1 << 30  # of rotation positions: their sums stay within int32


def check_prompts(
    models: Models,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
) -> None:
    """Raises ValueError, naming what is needed and what there is, unless ``generate`` can run."""
    check_models(models)
    run, public = models.run, models.target.public_vocab
    prompts = listed("prompts", "prompts", prompts)
    if not 1 <= len(prompts) <= run.batch:
        raise ValueError(f"prompts: expected 1..{run.batch} (batch), got {len(prompts)}")
    if not is_integer(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected an integer >= 1, got {max_new_tokens!r}")
    check_ids("eos_ids", listed("eos_ids", "token ids", eos_ids), models.target.vocab_rows)
    for row, prompt in enumerate(prompts):
        check_ids(f"prompts[{row}]", listed(f"prompts[{row}]", "token ids", prompt), public)
        if len(prompt) == 0:
            raise ValueError(f"prompts[{row}]: expected at least one token, got none")
        need = len(prompt) + max_new_tokens
        if need > run.max_context:
            raise ValueError(
                f"max_context: expected at least {need} "
                f"(prompts[{row}] {len(prompt)} + max_new_tokens {max_new_tokens}), "
                f"got {run.max_context}"
            )


def check_request(models: Models, request: Request) -> None:
    """Raises ValueError, naming the field, unless an engine of these models can run the request."""
    run, public = models.run, models.target.public_vocab
    check_ids("prompt", request.prompt, public)
    if len(request.prompt) == 0:
        raise ValueError("prompt: expected at least one token, got none")
    most = request.max_new_tokens
    if not is_integer(most) or most < 1:
        raise ValueError(f"max_new_tokens: expected an integer >= 1, got {most!r}")
    if request.remaining < 1:
        raise ValueError(
            f"max_new_tokens: expected more than the {len(request.tokens)} published, got {most}"
        )
    need = len(request.prompt) + most
    if need > run.max_context:
        raise ValueError(
            f"max_context: expected at least {need} (prompt {len(request.prompt)} + "
            f"max_new_tokens {most}), got {run.max_context}"
        )
    check_ids("eos_ids", request.eos_ids, models.target.vocab_rows)
    for sequence in request.stop_sequences:
        check_ids("stop_sequences", sequence, models.target.vocab_rows)
        if not sequence:
            raise ValueError("stop_sequences: expected at least one id in each, got none")
    for string in request.stop_strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop_strings: expected strings that are not empty, got {string!r}")
    if request.stop_strings and request.decode is None:
        raise ValueError("stop_strings: expected none without a tokenizer")
    check_sampling("sampling", request.sampling, public)
    check_callback(request.on_tokens)
    if request.embeddings is not None:
        _check_embeddings(models, request)


def check_sampling(name: str, sampling, public_vocab: int) -> None:
    """Raises ValueError unless it holds controls for that vocabulary."""
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"{name}: expected SamplingParams, got {sampling!r}")
    check_ids("logit_bias", sampling.logit_bias, public_vocab)
    if sampling.allowed_ids is not None:
        check_ids("allowed_ids", sampling.allowed_ids, public_vocab)


def check_callback(on_tokens: OnTokens | None) -> None:
    """Raises ValueError unless it can be called, or is None."""
    if on_tokens is not None and not callable(on_tokens):
        raise ValueError(f"on_tokens: expected a function or None, got {on_tokens!r}")


def check_flag(name: str, value) -> None:
    """Raises ValueError unless it is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_bytes(name: str, value) -> None:
    """Raises ValueError unless it is a number of bytes, or None."""
    if value is not None and not (is_integer(value) and value >= 0):
        raise ValueError(f"{name}: expected an integer >= 0 or None, got {value!r}")


def _check_embeddings(models: Models, request: Request) -> None:
    given, tokens = request.embeddings, len(request.prompt)
    if not isinstance(given, Embeddings):
        raise ValueError(f"embeddings: expected Embeddings, got {type(given).__name__}")
    kinds = {"rows": jnp.floating, "index": jnp.integer, "positions": jnp.integer}
    for name, kind in kinds.items():
        dtype = getattr(getattr(given, name), "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, kind):
            got = type(getattr(given, name)).__name__ if dtype is None else dtype
            raise ValueError(f"embeddings.{name}: expected a {kind.__name__} array, got {got}")
    if not is_integer(given.rope_delta) or not -MAX_OFFSET < given.rope_delta < MAX_OFFSET:
        raise ValueError(
            f"embeddings.rope_delta: expected an integer within 2^30, got {given.rope_delta!r}"
        )
    rows, index = np.shape(given.rows), np.asarray(given.index)
    if len(rows) != 2 or rows[1] != models.target.hidden or rows[0] != index.size:
        expected = f"[{index.size}, {models.target.hidden}]"
        raise ValueError(f"embeddings.rows: expected {expected}, got {list(rows)}")
    places = index.tolist()
    if index.ndim != 1 or places != sorted(set(places)) or not all(
        is_integer(place) and 0 <= place < tokens for place in places
    ):
        raise ValueError(f"embeddings.index: expected increasing places below {tokens}")
    if np.shape(given.positions) != (tokens, 3):
        got = list(np.shape(given.positions))
        raise ValueError(f"embeddings.positions: expected [{tokens}, 3], got {got}")
    places = np.asarray(given.positions)
    if places.size and not (0 <= places.min() and places.max() < MAX_OFFSET):
        raise ValueError(
            f"embeddings.positions: expected 0..2^30, got {places.min()}..{places.max()}"
        )


def check_models(models: Models) -> None:
    """Raises ValueError unless it is a pair's geometry."""
    if not isinstance(models, Models):
        raise ValueError(f"models: expected Models, got {type(models).__name__}")


def check_params(models: Models, params: Params) -> None:
    """Raises ValueError unless every leaf has the path, shape and dtype that the models declare."""
    check_models(models)
    if not isinstance(params, Params):
        raise ValueError(f"params: expected Params, got {type(params).__name__}")
    expected, given = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (abstract_params(models), params)
    )
    faults = [f"{path}: missing" for path in expected.keys() - given.keys()]
    faults += [f"{path}: not declared by the models" for path in given.keys() - expected.keys()]
    for path in expected.keys() & given.keys():
        want, have = expected[path], given[path]
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            faults.append(
                f"{path}: expected {want.shape} {want.dtype}, got {have.shape} {have.dtype}"
            )
    if faults:
        raise ValueError(f"params: {len(faults)} leaves differ: " + "; ".join(sorted(faults)[:8]))


def check_device(models: Models) -> None:
    """Raises ValueError when the run names an implementation that this device cannot run."""
    backend = jax.default_backend()
    if models.run.implementation == "pallas" and backend != "gpu":
        raise ValueError(f"implementation: expected auto or xla on {backend}, got 'pallas'")


def is_integer(value) -> bool:
    """Whether a caller's number counts something: an int or a NumPy integer, not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def listed(name: str, items: str, given) -> tuple:
    """What a list, an array or another iterable holds.

    Raises: ValueError for text and mappings, which hold something else than was meant, and for
      what holds nothing.
    """
    if not isinstance(given, str | bytes | Mapping):
        try:
            return tuple(given)
        except TypeError:
            pass  # said below, with the name
    raise ValueError(f"{name}: expected a list of {items}, got {given!r}")


def plain_ids(name: str, ids) -> tuple:
    """Listed ids, NumPy's integers as Python's; what is no integer stays, to be refused by name."""
    ids = listed(name, "token ids", ids)
    return tuple(int(token) if is_integer(token) else token for token in ids)


def check_ids(name: str, ids: Collection, end: int) -> None:
    """Raises ValueError unless all of them are ids in [0, end)."""
    for token in ids:
        if not is_integer(token) or not 0 <= token < end:
            raise ValueError(f"{name}: expected ids in [0, {end}), got {token!r}")
