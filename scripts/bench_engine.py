"""Host work of an engine per round: what the device may have to wait for, and what it never does.

    python scripts/bench_engine.py --batch 8 --rounds 200

Runs B sampled requests of the shipped pair, with text and a stop string each, and prints the median
and the spread (10th to 90th percentile) of the parts of a round. "decision" is the one thing
between a round's result and its commit; "turnaround" is all host work from the result to the next
round's start, which includes handing both programs to the device; "publication" happens while the
device runs the next round.
"""

import argparse
import time

import jax
import numpy as np

from dflash_jax.assets import tiny_pair_path
from dflash_jax.config import DtypePolicy, RunConfig
from dflash_jax.engine import schedule
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.text import TextTokenizer
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.weights import load_draft, load_target

PROMPT = "def read_lines(path):\n    with open(path) as f:\n"
PARTS = (
    "waiting for the result", "decision", "commit call", "accounting", "speculate call",
    "turnaround", "publication",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    clock, engine = Clock(), make_engine(options)
    clock.attach(engine)
    for seed in range(options.batch):
        engine.submit(
            PROMPT, max_new_tokens=engine.models.run.max_context - 64, eos_ids=(),
            stop_strings=["\N{SNOWMAN}"], sampling=SamplingParams(temperature=0.7, seed=seed),
            on_tokens=lambda number, tokens: None,
        )
    while len(clock.rounds) < options.rounds and engine.step():
        clock.end_of_step()
    tokens = 1 + sum(row.request.statistics.accepted for row in engine._schedule.rows.values())
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, B = {options.batch}, {len(clock.rounds)} rounds, "
          f"{tokens} proposals accepted; milliseconds")
    for part in PARTS:
        times = 1e3 * np.array([one.get(part, 0.0) for one in clock.rounds[10:]])
        low, middle, high = np.percentile(times, (10, 50, 90))
        print(f"{part:24} {middle:8.3f}  ({low:.3f} .. {high:.3f})")


def make_engine(options) -> Engine:
    """The shipped pair with DFlash2, without checkpoints."""
    policy = DtypePolicy.exact() if options.dtype == "float32" else DtypePolicy()
    target, target_params = load_target(tiny_pair_path("target"), policy)
    draft, draft_params = load_draft(tiny_pair_path("dflash2"), target, policy)
    run = RunConfig(draft_tokens=7, batch=options.batch, max_context=2048, dtypes=policy)
    return Engine(
        Models(target=target, draft=draft, run=run),
        Params(target=target_params, draft=draft_params),
        tokenizer=TextTokenizer.load(tiny_pair_path("target")), checkpoints=(),
    )


class Clock:
    """Times the parts of full rounds: those in which every row decodes."""

    def __init__(self):
        self.rounds: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._result = 0.0

    def attach(self, engine: Engine) -> None:
        """Puts a stopwatch around the calls that make up a round."""
        lanes, self._engine = engine._lanes, engine
        lanes.result = self._timed(lanes.result, "waiting for the result", self._mark)
        lanes.commit = self._timed(lanes.commit, "commit call")
        lanes.speculate = self._timed(lanes.speculate, "speculate call", self._turn)
        schedule.preview = self._timed(schedule.preview, "decision")
        schedule.account = self._timed(schedule.account, "accounting")
        schedule.publish = self._timed(schedule.publish, "publication")

    def end_of_step(self) -> None:
        """Keeps the parts if the step was a full round."""
        rows = self._engine._schedule.rows
        full = len(rows) == self._engine.models.run.batch and "turnaround" in self._now
        if full and all(row.decoding for row in rows.values()):
            self.rounds.append(self._now)
        self._now = {}

    def _timed(self, function, part, after=None):
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self._now[part] = self._now.get(part, 0.0) + time.perf_counter() - start
            if after is not None:
                after()
            return result

        return timed

    def _mark(self) -> None:
        self._result = time.perf_counter()

    def _turn(self) -> None:
        if "decision" in self._now:
            self._now["turnaround"] = time.perf_counter() - self._result


if __name__ == "__main__":
    main()
