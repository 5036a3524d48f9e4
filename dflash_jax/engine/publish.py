"""What the caller sees of a round. Runs only after the round's commit has been issued.

Order of a round on the host (contracts 9.5): preview -> commit -> ``account`` -> ``publish``, where
``account`` counts the outputs against the budget and ends the request if the decision says so. A
commit that fails therefore publishes nothing.
"""

import numpy as np

from dflash_jax.engine.preview import Decision
from dflash_jax.engine.request import FinishReason, Piece, Request


def account(request: Request, decision: Decision) -> None:
    """Enters the N committed outputs of one row; N = 0 enters nothing.

    Args:
      request: the row's request; gets the tokens, and a finish reason when they end it.
      decision: of this round's `preview`, whose commit has been issued.
    Source: contracts 9.5.
    """
    if not decision.tokens:
        return
    request.watch = decision.watch
    request.tokens.extend(decision.tokens)
    request.statistics.new_tokens = len(request.tokens)
    request.pieces.append(Piece(tokens=decision.tokens, text=decision.text))
    if decision.reason is not None:
        request.end(decision.reason)


def publish(request: Request, decision: Decision) -> None:
    """Shows the caller the outputs that have been entered.

    Effects: calls ``request.on_tokens`` once; an answer of False cancels a request that goes on.
    """
    if not decision.tokens or request.on_tokens is None:
        return
    answer = request.on_tokens(request.row, list(decision.tokens))
    if isinstance(answer, bool | np.bool_) and not answer:
        request.end(FinishReason.CANCELLED)
