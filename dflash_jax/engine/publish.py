"""What the caller sees of a round. Runs only after the round's commit has been issued.

Order of a round on the host (contracts 9.5): preview -> commit -> ``publish``, which first counts
the outputs against the budget and decides whether the request ends, then hands them out. A
commit that fails therefore publishes nothing.
"""

from collections.abc import Sequence

from dflash_jax.engine.request import FinishReason, Request


def publish(request: Request, outputs: Sequence[int]) -> None:
    """Accounts for the N committed outputs of one row and shows them to the caller.

    Args:
      request: the row's request; gets the tokens, and a finish reason when they end it.
      outputs: y_1..y_N. Empty for N = 0: nothing is counted and nothing shown.
    Effects: calls ``request.on_tokens`` once; an answer of False cancels a request that goes on.
    Source: contracts 9.5.
    """
    if not outputs:
        return
    request.tokens.extend(outputs)
    request.statistics.new_tokens = len(request.tokens)
    if outputs[-1] in request.eos_ids:
        request.end(FinishReason.EOS)
    elif request.remaining == 0:
        request.end(FinishReason.LENGTH)
    if request.on_tokens is not None and request.on_tokens(request.row, list(outputs)) is False:
        request.end(FinishReason.CANCELLED)
