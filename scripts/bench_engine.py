"""Host work of an engine per round: what the device has to wait for, and what it never does.

    python scripts/bench_engine.py --batch 8 --rounds 200
    python scripts/bench_engine.py --model 27b-dflash2 --batch 8 --context 32768

Runs B sampled requests with text, on the shipped pair or on random weights of official geometry,
and prints the median and the spread (10th to 90th percentile) of

- the host's parts of a round. "advance call" hands the device the one program that commits a round
  and runs the next; "decision" is what the host makes of a result; "accounting" and "publication"
  enter and show it; "turnaround" is all host work from a result to the end of the next such call.
  The device sees by itself where these requests end, so the call comes before the result and all of
  that happens while the device runs. With --stop-string the host has to decide first: then the
  device waits for the decision and the call, and for nothing else.
- the device's idle time a round, from a profiler trace, by the host's part at that time. While the
  host waits for a result the gaps are those between the kernels of a program and between programs.

Random weights accept next to nothing, so that a commit is as short as can be and hides the least.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_jax.assets import tiny_pair_path
from dflash_jax.config import DtypePolicy, RunConfig
from dflash_jax.engine import rows, schedule
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.text import TextTokenizer
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.steps.init import random_params
from dflash_jax.weights import load_draft, load_target
from scripts import device_idle
from scripts.round_cases import PAIRS

PROMPT = "def read_lines(path):\n    with open(path) as f:\n"
SHIPPED = "shipped"
WAITING = "waiting for the result"
PARTS = (WAITING, "decision", "advance call", "turnaround", "accounting", "publication")
UNAVOIDABLE = ("decision", "advance call")
WARMUP = 10


def main() -> None:
    options = _arguments()
    print(f"command: {' '.join(sys.argv)}")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.model}, "
          f"B = {options.batch}, {options.context} tokens of context")
    clock, engine = Clock(), make_engine(options)
    clock.attach(engine)
    for prompt, seed in zip(prompts(engine, options), range(options.batch), strict=True):
        engine.submit(
            prompt, max_new_tokens=engine.models.run.max_context - len(prompt), eos_ids=(),
            stop_strings=["\N{SNOWMAN}"] if options.stop_string else [],
            sampling=SamplingParams(temperature=0.7, seed=seed),
            on_tokens=lambda number, tokens: None,
        )
    start = time.perf_counter()
    clock.run(WARMUP)
    print(f"first calls and prompts: {time.perf_counter() - start:.1f} s")
    clock.rounds.clear()
    clock.run(options.rounds)
    accepted = sum(row.request.statistics.accepted for row in engine._schedule.rows.values())
    print(f"{len(clock.rounds)} rounds, {accepted} proposals accepted so far; milliseconds")
    table(PARTS, clock.rounds)
    trace = device_idle.record(lambda: clock.run(options.traced))
    print_idle(device_idle.idle_by_round(trace, WAITING))
    print_memory(engine)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(SHIPPED, *PAIRS), default=SHIPPED)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--context", type=int, default=64, help="tokens of a random prompt; the "
                        "shipped pair has its own")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--traced", type=int, default=30, help="rounds under the profiler")
    parser.add_argument("--stop-string", action="store_true", help="one that the host looks for")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args()


def make_engine(options: argparse.Namespace) -> Engine:
    """An engine without checkpoints that holds the prompts and all rounds."""
    policy = DtypePolicy.exact() if options.dtype == "float32" else DtypePolicy()
    rounds = WARMUP + options.rounds + options.traced + 8
    need = options.context + rounds * (options.draft_tokens + 1)
    run = RunConfig(
        draft_tokens=options.draft_tokens, batch=options.batch, max_context=-(-need // 64) * 64,
        chunk=options.chunk, dtypes=policy,
    )
    tokenizer = TextTokenizer.load(tiny_pair_path("target"))
    if options.model == SHIPPED:
        target, target_params = load_target(tiny_pair_path("target"), policy)
        draft, draft_params = load_draft(tiny_pair_path("dflash2"), target, policy)
        models = Models(target=target, draft=draft, run=run)
        params = Params(target=target_params, draft=draft_params)
    else:
        make_target, make_draft = PAIRS[options.model]
        models = Models(target=make_target(), draft=make_draft(), run=run)
        params, tokenizer = random_params(models, seed=0), Folded(tokenizer)
    return Engine(models, params, tokenizer=tokenizer, checkpoints=())


class Folded:
    """The shipped tokenizer's text for ids of a larger vocabulary: decoding has its usual price."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer

    def decode(self, ids) -> str:
        size = self._tokenizer.vocab_size
        return self._tokenizer.decode([token % size for token in ids])


def prompts(engine: Engine, options: argparse.Namespace) -> list:
    """The built-in text, or random ids."""
    if options.model == SHIPPED:
        return [PROMPT] * options.batch
    vocabulary = engine.models.target.public_vocab
    rng = np.random.default_rng(0)
    return list(rng.integers(0, vocabulary, (options.batch, options.context)))


def table(parts, rounds: list[dict[str, float]]) -> None:
    """Median and spread of each part, in milliseconds."""
    for part in parts:
        low, middle, high = np.percentile([one.get(part, 0.0) for one in rounds], (10, 50, 90))
        print(f"  {part:24} {middle:8.3f}  ({low:.3f} .. {high:.3f})")


def print_idle(rounds: list[dict[str, float]]) -> None:
    """Where the device was idle, and the answer: how long it waited for host work in vain."""
    print(f"device idle by what the host did, {len(rounds)} rounds under the profiler; "
          "milliseconds a round")
    table((*[part for part in PARTS if part in rounds[0]], device_idle.REST), rounds)
    known = (WAITING, *UNAVOIDABLE)
    needed = np.median([sum(one.get(part, 0.0) for part in UNAVOIDABLE) for one in rounds])
    vain = np.median([sum(time for part, time in one.items() if part not in known)
                      for one in rounds])
    print(f"idle from result to next round {needed:.3f} ms, for other host work {vain:.3f} ms")


def print_memory(engine: Engine) -> None:
    """Bytes of the weights and of the state's groups, and what the device says."""
    state = engine._lanes.state
    groups = {
        "weights": engine.params, "target pages": state.target.kv,
        "draft pages": state.context.pages, "GDN states": state.target.gdn,
        "draft rings": state.context.rings, "whole state": state,
    }
    sizes = (f"{name} {sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 1e9:.3f}"
             for name, tree in groups.items())
    stats = jax.devices()[0].memory_stats() or {}
    told = (f"{name} {stats[name] / 1e9:.3f}" for name in ("bytes_in_use", "peak_bytes_in_use")
            if name in stats)
    print("GB: " + ", ".join([*sizes, *told]))


class Clock:
    """Times the parts of full rounds: those in which every row decodes."""

    def __init__(self):
        self.rounds: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._result = 0.0

    def attach(self, engine: Engine) -> None:
        """Puts a stopwatch around the calls that make up a round."""
        lanes, self._engine = engine._lanes, engine
        lanes.result = self._timed(lanes.result, WAITING, self._mark)
        lanes.last_result = self._timed(lanes.last_result, WAITING, self._mark)
        lanes.advance = self._timed(lanes.advance, "advance call", self._turn)
        rows.preview = self._timed(rows.preview, "decision")
        schedule.account = self._timed(schedule.account, "accounting")
        schedule.publish = self._timed(schedule.publish, "publication")

    def run(self, rounds: int) -> None:
        """Steps until there are so many more full rounds, or nothing is left."""
        end = len(self.rounds) + rounds
        while len(self.rounds) < end and self._engine.step():
            self._end_of_step()

    def _end_of_step(self) -> None:
        """Keeps the parts if the step was a full round that went on into the next."""
        live = self._engine._schedule.rows
        full = len(live) == self._engine.models.run.batch and "turnaround" in self._now
        if full and all(row.decoding for row in live.values()):
            self.rounds.append(self._now)
        self._now = {}

    def _timed(self, function, part, after=contextlib.nullcontext):
        def timed(*args, **kwargs):
            start = time.perf_counter()
            with device_idle.span(part):
                result = function(*args, **kwargs)
            self._now[part] = self._now.get(part, 0.0) + 1e3 * (time.perf_counter() - start)
            after()
            return result

        return timed

    def _mark(self) -> None:
        self._result = time.perf_counter()

    def _turn(self) -> None:
        self._now["turnaround"] = 1e3 * (time.perf_counter() - self._result)


if __name__ == "__main__":
    main()
