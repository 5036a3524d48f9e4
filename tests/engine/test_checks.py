"""What a caller may get wrong is one ValueError that names it, before any device work."""

import numpy as np
import pytest

from dflash_jax.config import ConfigError, DraftKind, RunConfig, tiny_draft, tiny_target
from dflash_jax.engine.checks import check_device, check_params, check_prompts
from dflash_jax.engine.generate import run_draft_tokens
from dflash_jax.steps import Models

RUN = {"draft_tokens": 0, "batch": 2, "max_context": 32}
MODELS = Models(target=tiny_target(), draft=None, run=RunConfig(**RUN))


@pytest.mark.parametrize("prompts", [[(1, 2)], [np.array([1, 2])], [[np.int32(3)], [4]]])
def test_integers_of_any_kind_are_token_ids(prompts):
    check_prompts(MODELS, prompts, 4, eos_ids={5})


@pytest.mark.parametrize(
    "prompts, name",
    [
        ([[True, False]], "prompts[0]: expected ids"),
        ([[1.9]], "prompts[0]: expected ids"),
        ([["a"]], "prompts[0]: expected ids"),
        ([[1], [None]], "prompts[1]: expected ids"),
        ([1, 2], "prompts[0]: expected a list of token ids"),
        (["12"], "prompts[0]: expected a list of token ids"),
        ([[250]], "prompts[0]: expected ids in [0, 250), got 250"),
        ([[-1]], "prompts[0]: expected ids in [0, 250), got -1"),
        ([[]], "prompts[0]: expected at least one token"),
        ([[1]] * 3, "prompts: expected 1..2"),
        ([[1] * 29], "max_context: expected at least 33"),
    ],
)
def test_prompts_are_refused_by_row(prompts, name):
    with pytest.raises(ValueError) as error:
        check_prompts(MODELS, prompts, 4)
    assert str(error.value).startswith(name)


@pytest.mark.parametrize("budget", [0, -1, True, 2.5, "3", None])
def test_budgets_are_refused(budget):
    with pytest.raises(ValueError, match="max_new_tokens: expected an integer >= 1"):
        check_prompts(MODELS, [[1]], budget)


@pytest.mark.parametrize("eos_ids", ["5", 5, [257], [-1], [True], [None]])
def test_eos_ids_are_refused(eos_ids):
    with pytest.raises(ValueError, match="eos_ids: expected"):
        check_prompts(MODELS, [[1]], 4, eos_ids)


def test_params_of_no_kind_are_refused():
    with pytest.raises(ValueError, match="params: expected Params, got NoneType"):
        check_params(MODELS, None)


def test_a_kernel_that_this_device_lacks_is_refused():
    run = RunConfig(**RUN, implementation="pallas")
    with pytest.raises(ValueError, match="implementation: expected auto or xla on cpu"):
        check_device(Models(target=tiny_target(), draft=None, run=run))


@pytest.mark.parametrize("requested", [0, -3, 1.5, True])
def test_draft_tokens_are_refused(requested):
    with pytest.raises(ValueError, match="draft_tokens: expected an integer >= 1"):
        run_draft_tokens(tiny_draft(DraftKind.DFLASH2), requested)


def test_more_draft_tokens_than_positions_are_refused():
    run = RunConfig(**{**RUN, "draft_tokens": 32})
    with pytest.raises(ConfigError, match="draft_tokens: expected below max_context = 32"):
        Models(target=tiny_target(), draft=tiny_draft(DraftKind.DFLASH2), run=run)


@pytest.mark.parametrize("field", ["target", "run"])
def test_models_of_no_kind_are_refused(field):
    parts = {"target": tiny_target(), "draft": None, "run": RunConfig(**RUN), field: None}
    with pytest.raises(ConfigError, match=f"{field}: expected"):
        Models(**parts)
