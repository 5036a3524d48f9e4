"""Generation for a fixed batch of prompts: prefill each, then rounds until every row has ended.

A round on the host is result -> preview -> commit -> account -> publish. If no row ends with it,
the next one is started by the call that commits, and the device works while the caller is told.
Where the device sees by itself where rows end, that call comes first: it never waits for the host.
The arrays live in ``engine/device.py``; nothing here knows them, so the loop runs on any object
with its methods.
"""

import dataclasses
import logging
import time
from collections.abc import Collection, Sequence

from dflash_jax.config import DraftConfig
from dflash_jax.engine.checks import (
    check_callback,
    check_device,
    check_params,
    check_prompts,
    check_sampling,
    is_integer,
    listed,
    plain_ids,
)
from dflash_jax.engine.device import DeviceBatch, may_run_ahead
from dflash_jax.engine.preview import preview
from dflash_jax.engine.publish import account, publish
from dflash_jax.engine.request import FinishReason, OnTokens, Output, Request
from dflash_jax.engine.width import Widths, WidthTable, widths_of
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params

GREEDY = SamplingParams()
CHAIN = WidthTable((0,))
_log = logging.getLogger(__name__)


def generate(
    models: Models,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    tree_nodes: Sequence[int] | str | None = None,
    on_tokens: OnTokens | None = None,
) -> list[Output]:
    """Continues every prompt; speculation does not change what is emitted.

    A greedy row emits the target's own greedy output, a sampled row draws from the target's
    processed distribution. A row's text depends on its prompt, controls and seed alone, not on
    the other rows.

    Args:
      models: geometry and run choices; ``models.run.batch`` rows are available.
      params: weights of the target and, when ``models.draft`` is given, of the draft.
      prompts: token ids, one list a row, each id in [0, public_vocab).
      max_new_tokens: outputs per prompt, at least 1.
      eos_ids: ids that end a row; the id is part of the output.
      sampling: controls of every row, or one entry a prompt.
      tree_nodes: columns of a round by the number of live rows (entry i for i + 1, the last for
        more; 0 for a chain), or "auto"; None for ``models.run.tree_nodes`` at all times.
      on_tokens: called with (row, new ids) as they are committed; an answer of False cancels
        that row.
    Returns:
      One ``Output`` a prompt, in order.
    Raises:
      ValueError: the checks of ``engine/checks.py``, before any device work.
    """
    prompts = [
        plain_ids(f"prompts[{row}]", prompt)
        for row, prompt in enumerate(listed("prompts", "prompts", prompts))
    ]
    eos_ids = plain_ids("eos_ids", eos_ids)
    check_prompts(models, prompts, max_new_tokens, eos_ids)
    check_params(models, params)
    check_device(models)
    widths = check_widths(models, tree_nodes)
    check_callback(on_tokens)
    if isinstance(sampling, SamplingParams):
        controls = (sampling,) * len(prompts)
    else:
        controls = listed("sampling", "SamplingParams, or one for all", sampling)
    if len(controls) != len(prompts):
        raise ValueError(f"sampling: expected {len(prompts)} entries, got {len(controls)}")
    for one in controls:
        check_sampling("sampling", one, models.target.public_vocab)
    requests = [
        Request(
            row=row,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            eos_ids=frozenset(eos_ids),
            sampling=controls[row],
            on_tokens=on_tokens,
        )
        for row, prompt in enumerate(prompts)
    ]
    run_requests(DeviceBatch(models, params, controls), requests, widths)
    return [request.output() for request in requests]


def check_widths(models: Models, tree_nodes: Sequence[int] | str | None) -> Widths:
    """The widths of a run's rounds; raises ValueError unless all of them fit the run."""
    run = models.run
    widths = widths_of(run.draft_tokens, run.tree_nodes, tree_nodes)
    if tree_nodes == "auto":
        models.with_tree(run.draft_tokens + 2)  # says that a draft cannot have trees
    for nodes in widths.choices:
        models.with_tree(nodes)
    return widths


def run_draft_tokens(draft: DraftConfig | None, requested: int | None = None) -> int:
    """K of a run: what the caller asks for, else the draft's block_size - 1; 0 without a draft.

    Raises:
      ValueError: draft tokens without a draft, or neither a request nor a block size.
    """
    if draft is None:
        if requested:
            raise ValueError(f"draft_tokens: expected none without a draft, got {requested}")
        return 0
    if requested is not None:
        if not is_integer(requested) or requested < 1:
            raise ValueError(f"draft_tokens: expected an integer >= 1, got {requested!r}")
        return requested
    if draft.block_size is None:
        raise ValueError("draft_tokens: expected a number, as the draft has no block_size")
    _log.info("draft_tokens %d = block_size %d - 1", draft.block_size - 1, draft.block_size)
    return draft.block_size - 1


def run_requests(device: DeviceBatch, requests: Sequence[Request], widths: Widths = CHAIN) -> None:
    """Runs requests to their end; ``request.row`` is the row of the batch it occupies."""
    start = time.perf_counter()
    for request in requests:
        request.statistics.prompt_tokens = len(request.prompt)
        first = device.prefill(
            request.row, request.prompt, request.max_new_tokens, request.eos_ids
        )
        request.statistics.prefill_seconds = time.perf_counter() - start
        if first is None:
            request.end(FinishReason.FAULT)
        else:
            decision = preview(request, [first], 1)
            account(request, decision)
            publish(request, decision)
    if any(request.finish_reason is None for request in requests):
        device.warm_up(widths.choices)  # so that the rounds are timed without their compilation
    start = time.perf_counter()
    flight = None
    while live := [request for request in requests if request.finish_reason is None]:
        flight = _round(device, flight or _started(device, live, widths), widths)
        for request in live:
            request.statistics.decode_seconds = time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A round that the device runs: its requests, its width, when it began."""

    requests: Sequence[Request]
    nodes: int
    since: float


def _started(device: DeviceBatch, live: Sequence[Request], widths: Widths) -> _Flight:
    nodes, since = widths.choose(len(live)), time.perf_counter()
    device.speculate([request.row for request in live], nodes)
    return _Flight(live, nodes, since)


def _round(device: DeviceBatch, flight: _Flight, widths: Widths) -> _Flight | None:
    """Decides a round and tells what it gave; the next one, if this one went over into it."""
    live = [request for request in flight.requests if request.finish_reason is None]
    goes_on = len(live) == len(flight.requests) and widths.choose(len(live)) == flight.nodes
    ahead = goes_on and all(may_run_ahead(request, device.block_width) for request in live)
    if ahead:
        device.advance()  # N = L of every row, or up to its first EOS id
    result = device.last_result() if ahead else device.result()
    decisions = {}
    for request in live:
        row = request.row
        if result.fault[row]:
            request.end(FinishReason.FAULT)
        else:
            request.statistics.count_round(
                result.proposals[row], result.licensed[row] - 1, result.columns[row]
            )
        decisions[row] = preview(request, result.outputs[row], result.licensed[row])
    now, tokens = time.perf_counter(), sum(result.licensed[request.row] for request in live)
    if len(live) == len(flight.requests):
        widths.learn(len(live), flight.nodes, tokens, now - flight.since)
    if not ahead:
        goes_on &= all(decision.reason is None for decision in decisions.values())
        if goes_on:
            device.advance()  # no decision has a reason: N = L of every row
        else:
            device.commit({row: decision.committed for row, decision in decisions.items()})
    for request in live:
        account(request, decisions[request.row])
        publish(request, decisions[request.row])
    return dataclasses.replace(flight, since=now) if goes_on else None
