"""Forms of torch for cases of the op benchmark."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from scripts.ops import catalogue, draft, heads, products
from scripts.ops.case import MOST_COPIES, REPEATS, ROTATED_BYTES, Case

PUBLIC, VOCABULARY = catalogue.PUBLIC, catalogue.VOCABULARY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """Fields:
      case: of our benchmark; its name and bytes are used, and in tests its operands.
      make: (device, generator) -> operands of one call, tensors.
      forms: name -> function of the operands.
    """

    case: Case
    make: Callable
    forms: Mapping[str, Callable]


def peers(full: bool) -> list[Peer]:
    """All of them; `full` adds what it adds in our benchmark."""
    found = [swiglu(8, 17408, 5120), added(8, 5120, 17408)]
    found += [best(7, 5120), lowest(7, 5120), select(7), paged(1, 8, 4096), ring(1, 8, 2048)]
    found += [experts(8), context(1, 5)]
    if full:
        found += [experts(1), experts(64), context(8, 5)]
        # The 27B's in_proj, out_proj and its a and b rows, then eight requests at a time.
        found += [added(8, 16480, 5120), added(8, 5120, 6144), added(8, 96, 5120)]
        found += [swiglu(64, 17408, 5120), added(64, 5120, 17408)]
        found += [best(7, 2048), lowest(15, 2048), best(56, 5120), best(120, 5120), select(120)]
        found += [paged(1, 8, 32768), paged(8, 8, 4096), paged(8, 8, 32768), ring(8, 8, 2048)]
        # The 35B's projections: no case of ours has these sizes yet.
        found += [added(8, 12352, 2048), added(8, 2048, 4096), swiglu(8, 512, 2048)]
    if delta_rules() is not None:
        found += [delta(batch, 8) for batch in ((1, 8) if full else (1,))]
    return found


def random(device, generator, *shape: int, dtype=torch.bfloat16, scale=1.0) -> torch.Tensor:
    """Normal operands."""
    drawn = torch.empty(shape, dtype=dtype, device=device)
    return drawn.normal_(0.0, scale, generator=generator)


def added(tokens: int, rows: int, width: int) -> Peer:
    """A projection and a residual."""
    def make(device, generator):
        draw = functools.partial(random, device, generator)
        return draw(tokens, width), draw(rows, width, scale=width**-0.5), draw(tokens, rows)

    return Peer(
        case=products.added(tokens, rows, width), make=make,
        forms={
            "torch F.linear, +": lambda x, matrix, residual: functional.linear(x, matrix)
            + residual,
            "torch addmm": lambda x, matrix, residual: torch.addmm(residual, x, matrix.T),
        },
    )


def swiglu(tokens: int, inner: int, width: int) -> Peer:
    """Gate and up with SwiGLU."""
    def run(x, matrix):
        gate, up = functional.linear(x, matrix).chunk(2, dim=-1)
        return functional.silu(gate) * up

    return Peer(
        case=products.mixed(tokens, inner, width), forms={"torch F.linear, silu, *": run},
        make=functools.partial(_product, tokens, 2 * inner, width),
    )


def _product(tokens, rows, width, device, generator):
    draw = functools.partial(random, device, generator)
    return draw(tokens, width), draw(rows, width, scale=width**-0.5)


def best(tokens: int, width: int) -> Peer:
    """The 16 best rows of a head."""
    def run(hidden, head):
        return functional.linear(hidden, head)[:, :PUBLIC].topk(16, dim=-1).values

    return Peer(
        case=heads.best(tokens, width), forms={"torch F.linear, topk": run},
        make=functools.partial(_product, tokens, VOCABULARY, width),
    )


def lowest(tokens: int, width: int) -> Peer:
    """The best row of a head; returns its score, from which our case judges it."""
    def run(hidden, head):
        return functional.linear(hidden, head)[:, :PUBLIC].max(dim=-1).values

    return Peer(
        case=heads.lowest(tokens, width), forms={"torch F.linear, max": run},
        make=functools.partial(_product, tokens, VOCABULARY, width),
    )


def select(rows: int) -> Peer:
    """The 16 best of full vocabulary rows, scores at hand."""
    def run(scores, *, ordered):
        return scores[:, :PUBLIC].topk(16, dim=-1, sorted=ordered).values

    return Peer(
        case=catalogue.select(rows),
        make=lambda *where: (random(*where, rows, VOCABULARY, dtype=torch.float32),),
        forms={
            "torch topk": functools.partial(run, ordered=True),
            "torch topk unsorted": functools.partial(run, ordered=False),
        },
    )


def experts(tokens: int, sizes=(256, 8, 2048, 512)) -> Peer:
    """The experts of one layer, by products of groups of rows; nothing in it waits for a count."""
    count, k, hidden, inner = sizes

    def make(device, generator):
        draw = functools.partial(random, device, generator)
        best = draw(tokens, count, dtype=torch.float32).topk(k, dim=-1)
        return (
            draw(tokens, hidden), best.indices.int(), best.values.softmax(dim=-1),
            draw(count, 2 * inner, hidden, scale=0.02), draw(count, hidden, inner, scale=0.04),
        )

    def run(x, chosen, weights, gate_up, down):
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        numbers = torch.arange(count, device=x.device, dtype=flat.dtype)
        ends = (flat[None] <= numbers[:, None]).sum(dim=1, dtype=torch.int32)
        token = order // k
        mixed = functional.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends)
        gate, up = mixed.chunk(2, dim=-1)
        made = functional.grouped_mm(
            functional.silu(gate) * up, down.transpose(1, 2), offs=ends
        )
        scaled = made.float() * weights.flatten()[order, None]
        return torch.zeros(x.shape, device=x.device).index_add_(0, token, scaled)

    return Peer(
        case=catalogue.experts(tokens, sizes), make=make, forms={"torch grouped_mm": run}
    )


def context(batch: int, columns: int) -> Peer:
    """Features to context rows of a 27B draft, without head norms, rotation and storage: less than
    our case does."""
    hidden, rows = draft.HIDDEN, draft.LAYERS * 2 * draft.KV_HEADS * draft.DIM

    def make(device, generator):
        draw = functools.partial(random, device, generator)
        features = draft.FEATURES
        return (
            draw(batch, columns, features), draw(hidden), draw(hidden, features, scale=0.01),
            draw(rows, hidden, scale=0.01),
        )

    def run(features, norm, first, second):
        middle = functional.rms_norm(functional.linear(features, first), norm.shape, norm, 1e-6)
        return functional.linear(middle, second)

    return Peer(
        case=draft.context_product(batch, columns), make=make,
        forms={"torch linear, rms_norm, linear": run},
    )


def paged(batch: int, width: int, context: int) -> Peer:
    """Attention of one full 27B layer, keys and values in one piece instead of pages.

    Operands: query [B, 24, W, 256], key and value [B, 4, context + W, 256].
    """
    return Peer(
        case=catalogue.paged(batch, width, context),
        make=functools.partial(_attention, batch, width, (24, 4), context + width, 256),
        forms={
            "torch sdpa, mask": lambda query, key, value: attend(
                query, key, value, distance(query, key) >= 0
            ),
            "torch sdpa, lower right": lambda query, key, value: attend(
                query, key, value, causal_lower_right(query.shape[2], key.shape[2])
            ),
        },
    )


def ring(batch: int, width: int, capacity: int) -> Peer:
    """Attention of one local draft layer, the ring unrolled; without a mask it sees W keys more.

    Operands: query [B, 32, W, 128], key and value [B, 8, capacity + W, 128].
    """
    return Peer(
        case=catalogue.ring(batch, width, capacity),
        forms={
            "torch sdpa, window": lambda query, key, value: attend(
                query, key, value, distance(query, key) < capacity
            ),
            "torch sdpa, no mask": attend,
        },
        make=functools.partial(_attention, batch, width, (32, 8), capacity + width, 128),
    )


def attend(query, key, value, mask=None) -> torch.Tensor:
    """Attention of grouped heads."""
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )


def distance(query, key) -> torch.Tensor:
    """How far a key [Lk] lies before a query [Lq], when both end together: [Lq, Lk]."""
    column = torch.arange(key.shape[2], device=query.device)
    row = key.shape[2] - query.shape[2] + torch.arange(query.shape[2], device=query.device)
    return row[:, None] - column


def _attention(batch, width, counts, length, dim, device, generator):
    draw = functools.partial(random, device, generator)
    stored = [draw(batch, counts[1], length, dim) for _ in range(2)]
    return draw(batch, counts[0], width, dim), *stored


def delta_rules() -> dict[str, Callable] | None:
    """flash-linear-attention's forms of the gated delta rule, or None where it is absent."""
    try:
        from fla.ops import gated_delta_rule
    except ImportError:
        return None
    return {
        "fla recurrent": gated_delta_rule.fused_recurrent_gated_delta_rule,
        "fla chunk": gated_delta_rule.chunk_gated_delta_rule,
    }


def delta(batch: int, width: int) -> Peer:
    """GDN of one 27B layer over a block; the state after the whole block comes with it.

    Operands: query and key (a head's repetitions at hand) and value [B, W, 48, 128], decay and beta
    [B, W, 48] fp32, state [B, 48, key dim 128, value dim 128] fp32.
    """
    def make(device, generator):
        draw = functools.partial(random, device, generator)
        gates = [draw(batch, width, 48, dtype=torch.float32) for _ in range(2)]
        return (
            *(draw(batch, width, 48, 128) for _ in range(3)),
            -0.1 * functional.softplus(gates[0]), torch.sigmoid(gates[1]),
            draw(batch, 48, 128, 128, dtype=torch.float32, scale=0.1),
        )

    return Peer(
        case=catalogue.verify(batch, width, chain=True), make=make,
        forms={name: functools.partial(delta_output, rule)
               for name, rule in delta_rules().items()},
    )


def delta_output(rule: Callable, query, key, value, decay, beta, state) -> torch.Tensor:
    """Outputs [B, W, Hv, Dv] of a rule with flash-linear-attention's arguments."""
    return rule(
        query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )[0]


@torch.inference_mode()
def microseconds(peer: Peer, form: str, device: torch.device, *, graph: bool) -> float:
    """Microseconds of a call, the median over replays of many calls on different operands."""
    generator = torch.Generator(device=device).manual_seed(0)
    one = peer.make(device, generator)
    held = max(peer.case.bytes, sum(x.nbytes for x in one))
    copies = int(min(MOST_COPIES, max(3, ROTATED_BYTES // held)))
    sets = [one, *(peer.make(device, generator) for _ in range(copies - 1))]
    call, results = peer.forms[form], []

    def work():
        results[:] = [call(*operands) for operands in sets]

    if device.type == "cuda" and graph:
        work = recorded(work)
    work()
    taken = [elapsed(work, device) for _ in range(REPEATS)]
    return statistics.median(taken) / copies


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of `work`, after a first run that lets libraries choose and compile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def elapsed(work: Callable[[], None], device: torch.device, repeats: int = 4) -> float:
    """Microseconds of `work`, by events where the device has them."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats * 1e6
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / repeats * 1e3


def copy_bandwidth(device: torch.device, count: int | None = None) -> float:
    """Bytes per second, read plus written, of `x + 1` on fp32: 2 GiB on a GPU."""
    count = count or (1 << 29 if device.type == "cuda" else 1 << 22)
    source = torch.ones(count, device=device).uniform_()
    target = torch.empty_like(source)

    def work():
        torch.add(source, 1.0, out=target)

    work()
    return 2 * source.nbytes / (elapsed(work, device, repeats=20) * 1e-6)
