"""How many of the licensed outputs a round keeps. Pure, on host values (contracts 9.1)."""

from collections.abc import Sequence

from dflash_jax.engine.request import Request


def preview(request: Request, outputs: Sequence[int], licensed: int) -> int:
    """Chooses N, the length of the prefix of y_1..y_L that is committed and published.

    A request that has been ended (cancelled, or a fault of its row) keeps nothing. Otherwise the
    prefix stops just after the first EOS id and at the remaining budget; N < L therefore means
    that the request ends with this round.

    Args:
      request: the row's request; its remaining budget is positive while it runs.
      outputs: y_1..y_L first, anything behind.
      licensed: L >= 1.
    Returns:
      N with 0 <= N <= L, and N = 0 only when the request has been ended.
    Raises:
      ValueError: a running request has no licensed output or no budget.
    Source: contracts 9.1.
    """
    if request.finish_reason is not None:
        return 0
    if licensed < 1 or request.remaining < 1:
        raise ValueError(
            f"licensed, remaining: expected both >= 1, got {licensed}, {request.remaining}"
        )
    limit = min(licensed, request.remaining)
    for index, token in enumerate(outputs[:limit]):
        if token in request.eos_ids:
            return index + 1
    return limit
