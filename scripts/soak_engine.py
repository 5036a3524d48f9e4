"""Many short requests through one engine: memory and traces must not grow.

    python scripts/soak_engine.py --requests 10000

Runs on a random tiny pair, B = 8, with prompts of a few tokens that share prefixes, greedy and
sampled, some of them cancelled. Prints host and device memory and the number of traces after each
tenth; the exit status is 1 if anything grew after the first tenth.
"""

import argparse
import gc
import random
import resource
import sys
import time

import jax

from dflash_jax.config import DraftKind, DtypePolicy, RunConfig, tiny_draft, tiny_target
from dflash_jax.engine import lanes
from dflash_jax.engine.engine import Engine
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, advance, begin, commit, images, materialize, prefill_chunk
from dflash_jax.steps.init import random_params

STEPS = (
    advance, begin, commit, materialize, prefill_chunk, images.resume,
    images.read_slot, images.write_slot, images.read_pages, images.write_pages,
)
SLACK = 1.02  # of host memory, for the allocator


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    engine = make_engine(options.batch)
    rng = random.Random(options.seed)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, B = {options.batch}")
    start, seen = time.perf_counter(), []
    tenth = max(options.requests // 10, 1)
    for first in range(0, options.requests, tenth):
        tokens = serve(engine, rng, min(tenth, options.requests - first))
        gc.collect()
        seen.append(figures(engine))
        print(
            f"{first + tenth:6} requests, {time.perf_counter() - start:7.1f} s, {tokens} tokens; "
            + ", ".join(f"{name} {value}" for name, value in seen[-1].items()), flush=True,
        )
    # The first tenth warms up: programs, image slots and allocator arenas fill.
    grown = [
        name for name, value in seen[-1].items()
        if value > seen[min(1, len(seen) - 1)][name] * (SLACK if name == "host KiB" else 1)
    ]
    print(f"grown: {', '.join(grown) or 'nothing'}")
    return bool(grown)


def make_engine(batch: int) -> Engine:
    """A tiny target with a DFlash draft, a context of 128 and a few slots for images."""
    run = RunConfig(
        draft_tokens=3, batch=batch, slots=batch + 4, max_context=128, page_size=16, chunk=32,
        dtypes=DtypePolicy.exact(),
    )
    models = Models(tiny_target(), tiny_draft(DraftKind.DFLASH), run)
    return Engine(models, random_params(models, seed=1), host_bytes=1 << 20)


def serve(engine: Engine, rng: random.Random, count: int) -> int:
    """Runs that many requests, at most 32 of them waiting at a time; the tokens published."""
    stems = [[rng.randrange(250) for _ in range(rng.randint(2, 20))] for _ in range(8)]
    submitted, tokens, live = 0, 0, []
    while submitted < count or live:
        while submitted < count and len(live) < 32:
            prompt = rng.choice(stems) + [rng.randrange(250) for _ in range(rng.randint(1, 12))]
            sampling = SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=submitted)
            live.append(
                engine.submit(prompt, max_new_tokens=rng.randint(1, 8), sampling=sampling)
            )
            submitted += 1
        if rng.random() < 0.05:
            engine.cancel(rng.choice(live))
        engine.step()
        tokens += sum(len(one.tokens) for one in live if one.finish_reason is not None)
        live = [one for one in live if one.finish_reason is None]
    return tokens


def figures(engine: Engine) -> dict[str, int]:
    """What must not grow."""
    pools, on_device = engine._pools, [one.holding for one in engine._store if one.holding]
    held = {page for holding in on_device for page in holding.target_pages}
    pools.check(on_device)
    return {
        "traces": sum(step._cache_size() for step in (*STEPS, lanes._first, lanes._set_row)),
        "device KiB": sum(array.nbytes for array in jax.live_arrays()) // 1024,
        "host KiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "pages lost": pools.target.num_pages - pools.target.num_free - len(held),
    }


if __name__ == "__main__":
    sys.exit(main())
