"""Times rounds at official geometry with random weights: speculate + commit, beside plain steps.

    python scripts/bench_round.py --model 27b-dflash2 --draft-tokens 7 --batch 1 --context 4096

Weights, prompt and context are random (never zeros). Acceptance is forced by a fixed schedule of
mean tau - 1: the decision is overwritten before `advance` commits it, the work is not. "queued" is
the wall time of a round when the next one is dispatched without waiting, "blocking" reads every
round's outputs before the next one starts; with --device-loop, "looped" is a
round of `decode_rounds`, which asks no host (and accepts what the weights accept). An engine is
between the two: like "queued" while the device sees by itself where requests end, else "blocking".
"queued" is a mean, the others are medians over groups of rounds; bytes count each weight once, plus
K/V and state. `--dtype fp8` stores what official FP8 releases store so: layer matrices in blocks of
128 x 128; embedding, head, norms, a and b rows and the draft stay as they are.
"""

import functools
import statistics
import sys
import time
from pathlib import Path

# Works from a checkout as well as from an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import config
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import Acceptance
from dflash_jax.steps import (
    Admission,
    Models,
    Params,
    PrefillChunk,
    advance,
    begin,
    decode_rounds,
    empty_scratch,
    first_token,
    prefill_chunk,
)
from dflash_jax.steps.experts import active_experts
from dflash_jax.steps.init import random_params
from scripts import kernel_times
from scripts.round_cases import (
    GROUP,
    LOOPED,
    LOOPS,
    PREFILLS,
    WARMUP,
    accepted_counts,
    alone,
    arguments,
    pair,
)


def main() -> int:
    args = arguments()
    models = pair(args)
    print(f"command: {' '.join(sys.argv)}")
    print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(config.describe(models.target, models.draft, models.run))
    params = jax.block_until_ready(random_params(models, args.seed))
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s (read + write)")

    speculative = _measure(models, params, args, SamplingParams())
    if args.controls.temperature > 0:
        sampled = _measure(models, params, args, args.controls)
        extra = sampled["round"] - speculative["round"]
        print(f"sampled round ({args.controls}): queued {sampled['round']:.2f} ms, {extra:+.2f} ms "
              f"({extra / sampled['round']:.1%} of it) against greedy rows in the same program")
    _report("round", speculative, params.target, params.draft, models, args, bandwidth)
    if args.skip_plain:
        return 0
    plain = _measure(
        alone(models, args), Params(target=params.target, draft={}), args, SamplingParams()
    )
    _report("plain", plain, params.target, {}, models, args, bandwidth)
    tau = np.mean([accepted + 1 for accepted in accepted_counts(args)])
    how = "looped" if args.device_loop else "round"
    print(
        f"tokens/s at tau {tau:.2f}: {args.batch * tau / speculative[how] * 1e3:.1f}, "
        f"speed-up over plain {tau * plain[how] / speculative[how]:.2f}"
    )
    return 0


def _measure(models: Models, params: Params, args, controls: SamplingParams) -> dict[str, float]:
    """Milliseconds of the compiles (first calls), the prefill and the rounds of one pair."""
    batch, run = args.batch, models.run
    rows = Rows.of(range(batch))
    sampling = SamplingArrays.of([controls] * batch, models.target.public_vocab)
    state = begin(models, models.zeros(), rows, _admission(models))
    if args.random_context or models.draft is None:  # one prefill is timed, with the draft's
        state, result = _randomised(state, args.context, args.seed), {}
    else:
        state, result = _prefilled(models, params, state, rows, args)
    state, _ = first_token(models, params, state, rows, sampling)

    most = jnp.full((batch,), run.block_width, jnp.int32)
    accepted = jnp.array(np.minimum(accepted_counts(args), run.draft_tokens), jnp.int32)

    def one_round(carry, most=most):
        return _forced_round(models, params, rows, sampling, accepted, most, carry)

    began = time.perf_counter()
    scratch = empty_scratch(models, params, state, rows, sampling)
    summary = jnp.zeros((batch, run.block_width + 4), jnp.int32)
    carry = jax.block_until_ready(one_round((state, scratch, summary, jnp.int32(0)), 0 * most))
    result["round compile"] = (time.perf_counter() - began) * 1e3
    for _ in range(WARMUP):
        carry = jax.block_until_ready(one_round(carry))
    waited = args.rounds // GROUP // 4
    result["round"], carry = _queued(one_round, carry, args.rounds - waited * GROUP)
    blocking, carry = _blocking(one_round, carry, waited)
    if args.profile:
        result["kernels"], carry = _profiled(one_round, carry)
    result["blocking"] = statistics.median(blocking)
    state, scratch, _, _ = carry
    if models.target.moe is not None:
        extent = models.extent(state.sequence.gather(rows.lane))
        counts = active_experts(models, params, state, rows, scratch.proposal, extent)
        result["experts"] = float(jnp.mean(counts))
    if args.device_loop:
        result["looped"], result["loop idle"] = _looped(
            models, params, state, rows, sampling, args.profile
        )
    stats = jax.devices()[0].memory_stats() or {}
    result["peak GB"] = stats.get("peak_bytes_in_use", 0) / 1e9
    return result


def _prefilled(models: Models, params: Params, state, rows, args):
    """The state after the context, and what the chunks took, dispatched without waiting; the first
    and the last, which may be shorter, run before to compile. --profile looks at the last once
    more."""
    batch, vocabulary = args.batch, models.target.public_vocab
    prompt = np.random.default_rng(args.seed).integers(0, vocabulary, (batch, args.context))
    chunks = []
    for start in range(0, args.context, args.chunk):
        piece = prompt[:, start : start + args.chunk]
        chunks.append(PrefillChunk.text(models, piece, [piece.shape[1]] * batch, [start] * batch))

    def run(some):
        nonlocal state
        began = time.perf_counter()
        for chunk in some:
            state = prefill_chunk(models, params, state, rows, chunk)
        jax.block_until_ready(state)
        return time.perf_counter() - began

    result = {"prefill compile": 1e3 * run([chunks[0], chunks[-1]])}
    if args.profile:
        run(chunks[:-1])
        result["prefill kernels"] = kernel_times.record(lambda: run(chunks[-1:]), 1)
    taken = []
    for _ in range(PREFILLS):
        state = jax.block_until_ready(begin(models, state, rows, _admission(models)))
        taken.append(run(chunks))
    result["prefill rate"] = batch * args.context / statistics.median(taken)
    return state, result


@functools.partial(jax.jit, static_argnums=0, donate_argnums=6)
def _forced_round(models, params, rows, sampling, accepted, most, carry):
    """`advance` as if of round i `accepted[i]` proposals had matched. The schedule lies on the
    device, and the number of the round: no address changes from round to round."""
    state, scratch, summary, number = carry
    count = accepted[jnp.minimum(number, len(accepted) - 1)]
    forced = _forced(scratch.acceptance, scratch.proposal.tokens, count)
    scratch = scratch.replace(acceptance=forced)
    return *advance(models, params, state, rows, sampling, scratch, most, summary), number + 1


def _queued(one_round, carry, rounds: int):
    """Milliseconds a round of so many, none of them waited for, and what they leave; by the clock
    before the first and behind the last, since a busy host is late to see what lies between."""
    began = _at(carry)
    for _ in range(rounds):
        carry = one_round(carry)
    return (_at(carry) - began) / rounds * 1e3, carry


def _at(mark) -> float:
    jax.block_until_ready(mark)
    return time.perf_counter()


def _blocking(one_round, carry, groups: int):
    """Milliseconds a round of every group, each waited for by the host, and what they leave."""
    times = []
    for _ in range(groups):
        began = _at(carry)
        for _ in range(GROUP):
            carry = one_round(carry)
            np.asarray(carry[2])  # what a host that decides reads before it goes on
        times.append((_at(carry) - began) / GROUP * 1e3)
    return times, carry


def _profiled(one_round, carry):
    """The kernels of GROUP queued rounds, and what they leave."""
    def work():
        nonlocal carry
        for _ in range(GROUP):
            carry = one_round(carry)
        jax.block_until_ready(carry)

    return kernel_times.record(work, GROUP), carry


def _looped(models: Models, params: Params, state, rows, sampling, profile: bool):
    """Milliseconds of a round of the device's own loop; the first call warms up and is left out.
    And microseconds a round in which no kernel ran, None unless profiled on a GPU."""
    no_end, times = jnp.full((models.run.batch, 1), -1, jnp.int32), []
    program = _loop_program(models, params, state, rows, sampling, no_end)

    def work():
        nonlocal state
        state, _ = jax.block_until_ready(program(params, state, rows, sampling, no_end))

    for _ in range(LOOPS):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) / LOOPED * 1e3)
    kernels = kernel_times.record(work, LOOPED) if profile else None
    return statistics.median(times[1:]), kernels.idle if kernels and kernels.launches else None


def _loop_program(models: Models, *operands):
    """`decode_rounds`, compiled to be launched in the same way under the profiler as without it."""
    lowered = decode_rounds.lower(models, *operands, rounds=LOOPED)
    return lowered.compile({"xla_enable_command_buffers_during_profiling": True})


def _randomised(state: DecodeState, context: int, seed: int) -> DecodeState:
    """The state as if `context` tokens were processed, with random K/V, rings and GDN states."""
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(state))))

    def fill(leaf):
        return _noise(leaf, next(keys))

    frontier = jnp.full_like(state.sequence.frontier, context)
    return state.replace(
        target=jax.tree.map(fill, state.target),
        context=jax.tree.map(fill, state.context),
        sequence=state.sequence.replace(frontier=frontier, context_frontier=frontier + 0),
    )


@functools.partial(jax.jit, donate_argnums=0)
def _noise(leaf, key):
    # One small program per shape: as one program for all leaves it compiles for minutes.
    return (0.1 * jax.random.normal(key, leaf.shape, jnp.float32)).astype(leaf.dtype)


def _admission(models: Models) -> Admission:
    run, batch = models.run, models.run.batch
    pages = jnp.arange(run.pages, dtype=jnp.int32).reshape(run.lanes, run.max_pages)
    return Admission(
        remaining=jnp.full((batch,), run.max_context, jnp.int32),
        capacity=jnp.full((batch,), run.max_context, jnp.int32),
        rope_delta=jnp.zeros((batch,), jnp.int32),
        seed=jnp.zeros((batch, 2), jnp.uint32),
        target_pages=pages,
        draft_pages=pages,
    )


def _forced(acceptance: Acceptance, tokens, accepted) -> Acceptance:
    """The acceptance as if `accepted` proposals had matched."""
    column = jnp.arange(tokens.shape[1])[None, :]
    following = jnp.roll(tokens, -1, axis=1)
    outputs = jnp.where(column < accepted, following, acceptance.outputs[:, :1])
    committed = jnp.full(acceptance.licensed.shape, accepted + 1, jnp.int32)
    outputs = jnp.where(column <= accepted, outputs, 0)
    return acceptance.replace(accepted=committed - 1, licensed=committed, outputs=outputs)


def _report(name, result, target, draft, models, args, bandwidth) -> None:
    weights = _bytes(target) + _bytes(draft) - _bytes([target["embedding"]])
    if draft:
        # The draft reads the head a second time and only a few rows of its codebooks.
        weights += _bytes([target.get("head", target["embedding"])])
        weights -= _bytes([v for k, v in draft.get("selector", {}).items() if k != "projection"])
    per_row = args.context * len(models.target.full_layers) * 2 * (
        models.target.kv_heads * models.target.head_dim * 2
    )
    gdn = models.target.gdn
    per_row += len(models.target.linear_layers) * 3 * 4 * (
        gdn.value_heads * gdn.value_dim * gdn.key_dim
    )
    if "experts" in result:
        moe, layers = models.target.moe, len(models.target.layer_types)
        one = 3 * moe.intermediate * models.target.hidden * (1 if args.dtype == "fp8" else 2)
        weights -= round((moe.num_experts - result["experts"]) * layers * one)
    total = weights + args.batch * per_row
    floor = total / bandwidth * 1e3
    print(f"{name}: queued {result['round']:.2f} ms, blocking "
          f"{result['blocking']:.2f} ms; {total / 1e9:.2f} GB, floor {floor:.2f} ms, ratio "
          f"{result['round'] / floor:.2f}")
    if "looped" in result:
        idle = result["loop idle"]
        told = "" if idle is None else f", {idle:.1f} us a round without a kernel"
        print(f"{name}: looped {result['looped']:.2f} ms, ratio {result['looped'] / floor:.2f}"
              f"{told}")
    if "experts" in result:
        print(f"{name}: {result['experts']:.1f} distinct experts a layer, counted on the device")
    if "kernels" in result:
        print(f"{name}: {chr(10).join(result['kernels'].lines())}")
    if "prefill kernels" in result:
        print(f"prefill of a chunk: {chr(10).join(result['prefill kernels'].lines())}")
    prefill = ""
    if "prefill rate" in result:
        prefill = (f"prefill {result['prefill compile'] / 1e3:.1f} s (then {args.context} tokens "
                   f"by {args.chunk}: {result['prefill rate']:.0f} tokens/s), ")
    print(f"{name}: first calls: {prefill}round {result['round compile'] / 1e3:.1f} s; "
          f"peak {result['peak GB']:.1f} GB")


def _bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of 2 GiB that change in place: an allocation, slow where
    memory is not reserved, is not in it."""
    values = jax.random.normal(jax.random.key(0), (1 << 29,), jnp.float32)
    move = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    values = jax.block_until_ready(move(values))
    began = time.perf_counter()
    for _ in range(20):
        values = move(values)
    jax.block_until_ready(values)
    return 20 * 2 * values.nbytes / (time.perf_counter() - began)


if __name__ == "__main__":
    raise SystemExit(main())
