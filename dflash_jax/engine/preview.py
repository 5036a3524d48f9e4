"""How many of the licensed outputs a round keeps. Pure, on host values (contracts 9.1)."""

import dataclasses
from collections.abc import Sequence

from dflash_jax.engine.request import FinishReason, Request
from dflash_jax.engine.watch import Watch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a round means for one request, before any of it has happened.

    Fields:
      tokens: y_1..y_N, which are committed and then published.
      reason: why the request ends with this round; None when it goes on.
      text: text to show with them.
      watch: the request's watch after them.
    """

    tokens: tuple[int, ...]
    reason: FinishReason | None
    text: str
    watch: Watch

    @property
    def committed(self) -> int:
        """N."""
        return len(self.tokens)


def preview(request: Request, outputs: Sequence[int], licensed: int) -> Decision:
    """Chooses N, the length of the prefix of y_1..y_L that is committed and published.

    A request that has been ended (cancelled, or a fault of its row) keeps nothing. Otherwise the
    prefix stops just after the first EOS id, stop sequence or stop string, also one that began in
    an earlier round, and at the remaining budget; N < L therefore means that the request ends with
    this round. An EOS id has no text, so it completes no stop string; it comes before a stop
    sequence that it completes, and all of them before the budget.

    Args:
      request: the row's request; its remaining budget is positive while it runs. It is not changed.
      outputs: y_1..y_L first, anything behind.
      licensed: L >= 1.
    Returns:
      the decision; 0 <= N <= L, and N = 0 only when the request has been ended.
    Raises:
      ValueError: a running request has no licensed output or no budget.
    Source: contracts 9.1.
    """
    if request.finish_reason is not None:
        return Decision(tokens=(), reason=request.finish_reason, text="", watch=request.watch)
    if licensed < 1 or request.remaining < 1:
        raise ValueError(
            f"licensed, remaining: expected both >= 1, got {licensed}, {request.remaining}"
        )
    tokens = tuple(outputs[: min(licensed, request.remaining)])
    reason = FinishReason.LENGTH if len(tokens) == request.remaining else None
    for index, token in enumerate(tokens):
        if token in request.eos_ids:
            tokens, reason = tokens[: index + 1], FinishReason.EOS
            break
    eos = tokens[-1:] if reason is FinishReason.EOS else ()
    sight = request.watch.push(tokens[: len(tokens) - len(eos)])
    watch, text = sight.watch, sight.text
    if sight.stopped:
        tokens, reason = tokens[: sight.used], FinishReason.STOP
    elif eos:
        watch = watch.silent(*eos)
    if reason is not None:
        watch, rest = watch.finish()
        text += rest
    return Decision(tokens=tokens, reason=reason, text=text, watch=watch)
