"""Compiles the later stages of the recipe while the first one trains."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.steps import Params
from dflash_jax.training.capture import capture_batch
from dflash_jax.training.continuations import continue_batch
from dflash_jax.training.figures import measured_models
from dflash_jax.training.fit import abstract_state, train_steps
from dflash_jax.training.parameters import draft_params, start_draft, start_target, target_params
from dflash_jax.training.recipe import DRAFT_TOKENS, SERVING, Recipe
from dflash_jax.training.validate import ANCHOR_STRIDE, measure_acceptance, recall_counts


class CompileAhead:
    """Compiles the later stages' programs in threads, for the compilation cache to hold.

    It does nothing where no cache is configured.
    """

    def __init__(self, recipe: Recipe, target: TargetConfig, drafts: dict[str, DraftConfig]):
        self._pool, self._jobs = ThreadPoolExecutor(4), {}
        if not jax.config.jax_compilation_cache_dir:
            return
        shape = jax.ShapeDtypeStruct
        fitted, served = (
            jax.eval_shape(lambda d=dtypes: target_params(target, start_target(target, 0), d))
            for dtypes in (recipe.dtypes, SERVING)
        )
        length = recipe.prompt + recipe.new_tokens
        self._add("continuations", lambda: continue_batch.lower(
            recipe.writer(target), Params(target=served, draft={}),
            shape((recipe.sequences, recipe.prompt), jnp.int32), shape((), jnp.float32),
            jax.random.key(0),
        ).compile())
        some = next(iter(drafts.values()))
        self._add("features", lambda: capture_batch.lower(
            target, recipe.dtypes, some.target_layer_ids, fitted,
            shape((recipe.capture_batch, length), jnp.int32),
        ).compile())
        total = recipe.sequences * len(recipe.temperatures)
        data = {
            "tokens": shape((total, length), jnp.int32), "embedding": fitted["embedding"],
            "features": shape((total, length, some.feature_width), recipe.dtypes.activation_dtype),
        }
        for name, config in drafts.items():
            self._add(name, lambda config=config: train_steps.lower(
                recipe.draft_objective(target, config), recipe.draft.of_a_step(),
                abstract_state(jax.eval_shape(lambda: start_draft(config, 0)), recipe.draft),
                data, np.int32(1), np.int32(1),
            ).compile())
            self._add(f"validate {name}", lambda config=config: self._rounds(
                recipe, target, config
            ))

    def close(self, say: Callable[[str], None]) -> None:
        """Waits, and reports what failed: the stage has then compiled its program itself."""
        self._pool.shutdown(wait=True)
        for name, job in self._jobs.items():
            if (error := job.exception()) is not None:
                say(f"not compiled ahead: {name}: {error}")

    def _add(self, name: str, job: Callable[[], object]) -> None:
        self._jobs[name] = self._pool.submit(job)

    @staticmethod
    def _rounds(recipe: Recipe, target: TargetConfig, config: DraftConfig) -> None:
        """Runs the validation's programs on a fresh pair: a few tokens of one prompt."""
        params = Params(
            target=target_params(target, start_target(target, 0), SERVING),
            draft=draft_params(config, start_draft(config, 0), SERVING),
        )
        models = measured_models(
            target, config, recipe.held_out_prompts, recipe.prompt, recipe.held_out_tokens
        )
        measure_acceptance(models, params, [[0] * recipe.prompt], 2)
        stop = recipe.prompt + recipe.held_out_tokens
        anchors = len(range(recipe.prompt, stop - DRAFT_TOKENS, ANCHOR_STRIDE))
        recall_counts.lower(
            target, config, SERVING, DRAFT_TOKENS, params,
            jax.ShapeDtypeStruct((recipe.held_out_prompts, stop), jnp.int32),
            jax.ShapeDtypeStruct((anchors,), jnp.int32),
        ).compile()
