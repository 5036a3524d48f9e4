"""Sampling controls by name: the family's recommendations, and a folder's own defaults."""

from pathlib import Path

from dflash_jax.config.folder import read_json
from dflash_jax.sampling.params import SamplingParams

# The recommendations of the Qwen3.5 model cards, by mode.
PRESETS = {
    "thinking": SamplingParams(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=1.5),
    "thinking-coding": SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    "instruct": SamplingParams(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=1.5),
    "instruct-reasoning": SamplingParams(temperature=1.0, top_k=40, presence_penalty=2.0),
}
_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_generation_config(folder) -> SamplingParams:
    """The controls that a folder's generation_config.json states; greedy without such a file.

    `do_sample: false`, or no `do_sample`, is greedy whatever else the file holds: that is its
    meaning there.
    Raises: ValueError naming the file if it is no JSON object, file and field for values out of
      range.
    """
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return SamplingParams()
    stated = read_json(path)
    chosen = {key: stated[key] for key in _KEYS if stated.get(key) is not None}
    if not stated.get("do_sample", False):
        chosen = {key: value for key, value in chosen.items() if key == "repetition_penalty"}
    try:
        return SamplingParams(**chosen)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
