"""Times the published loop, step by step, under a forced schedule."""

import statistics
import time
from types import SimpleNamespace

import torch

from scripts.round_cases import WARMUP


def wait(device: torch.device) -> None:
    """Waits for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Names of steps and when the device reached their begin."""

    def __init__(self, device: torch.device):
        self.device, self.names, self.stamps = device, [], []

    def add(self, name: str) -> None:
        """Marks the begin of a step; a GPU is not waited for."""
        stamp = time.perf_counter()
        if self.device.type == "cuda":
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        self.names.append(name)
        self.stamps.append(stamp)

    def rounds(self) -> list[dict[str, float]]:
        """Milliseconds of every step, by round; a round begins with the first name."""
        wait(self.device)
        found: list[dict[str, float]] = []
        for i, name in enumerate(self.names[:-1]):
            if name == self.names[0]:
                found.append({})
            found[-1][name] = self._between(self.stamps[i], self.stamps[i + 1])
        return found

    def _between(self, first, second) -> float:
        if self.device.type == "cuda":
            return first.elapsed_time(second)
        return (second - first) * 1e3


class ForcedTarget(torch.nn.Module):
    """What the package takes for its target: `model`, with forced scores and marks.

    The first call is the prefill; `widths` holds the columns of every later one. Rounds after
    those of `counts` accept everything.
    """

    def __init__(self, model: torch.nn.Module, marks: Marks, counts: list[int]):
        super().__init__()
        self.model, self.config, self.lm_head = model, model.config, model.lm_head
        self.marks, self.left, self.widths = marks, iter(counts), []
        self.prefilled = False

    @property
    def device(self) -> torch.device:
        return self.model.device

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, input_ids, **options):
        if not self.prefilled:
            self.prefilled = True
            return self.model(input_ids, **options)
        self.widths.append(input_ids.shape[1])
        self.marks.add("verify")
        output = self.model(input_ids, **options)
        self.marks.add("accept")
        force(output.logits[0], input_ids[0, 1:], next(self.left, input_ids.shape[1]))
        return output


def force(logits: torch.Tensor, proposals: torch.Tensor, accepted: int) -> None:
    """Changes scores [K + 1, V] in place: their argmax agrees with `accepted` of K proposals."""
    columns = proposals[:, None]
    logits[:-1].scatter_(1, columns[:accepted], float("inf"))
    logits[accepted : len(proposals)].scatter_(
        1, columns[accepted : accepted + 1], float("-inf")
    )


def measure(
    pair: SimpleNamespace, context: int, seed: int, counts: list[int], width: int
) -> SimpleNamespace:
    """Runs the package's loop over `counts`, accepted proposals a round, in blocks of `width`.

    Args:
      pair: the `package`'s model module, `target`, `draft` and their `device`.
      context: random tokens of the prompt.
    Returns:
      The medians of `steps` and of their `total` in milliseconds, its `spread`, the `clock` of the
      loop itself, `prefill`, the token counts that it `published`, their mean `tau` (the first
      WARMUP rounds left out of all but the clock and the counts), and `peak` bytes.
    Raises: RuntimeError if the counts are not those of the schedule, or a block has another width.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(
        0, pair.target.config.vocab_size, (1, context), generator=generator
    ).to(pair.device)
    marks = Marks(pair.device)
    hooks = [
        pair.draft.register_forward_pre_hook(lambda *_: marks.add("draft")),
        pair.draft.register_forward_hook(lambda *_: marks.add("propose")),
    ]
    # Enough for the last round of the schedule to have its full width; what is left after it is
    # run, and not counted.
    target = ForcedTarget(pair.target, marks, counts)
    result = pair.package.dflash_generate(
        pair.draft, target, prompt,
        sum(accepted + 1 for accepted in counts[:-1]) + width + 1, None,
        block_size=width, return_stats=True,
    )
    marks.add("end")
    for hook in hooks:
        hook.remove()
    published, widths = result.acceptance_lengths[: len(counts)], target.widths[: len(counts)]
    if published != [accepted + 1 for accepted in counts]:
        raise RuntimeError(f"published: expected {counts} plus one each, got {published}")
    if set(widths) != {width}:
        raise RuntimeError(f"widths: expected {width} in every round, got {widths}")
    timed = marks.rounds()[WARMUP : len(counts)]
    totals = [sum(steps.values()) for steps in timed]
    clock = result.time_per_output_token * result.num_output_tokens
    return SimpleNamespace(
        steps={name: statistics.median(one[name] for one in timed) for name in timed[0]},
        total=statistics.median(totals),
        spread=max(totals) - min(totals),
        clock=clock / len(result.acceptance_lengths) * 1e3,
        prefill=result.time_to_first_token * 1e3,
        tau=statistics.mean(published[WARMUP:]),
        published=published,
        width=width,
        peak=torch.cuda.max_memory_allocated() if pair.device.type == "cuda" else 0,
    )
