"""A picture of a run: acceptance by position, and how many tokens its rounds gave."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.engine.request import Statistics

KINDS = (".pdf", ".png", ".svg")


def check_plot(file: Path) -> None:
    """Raises ValueError unless `write_plot` will be able to write a picture of this name."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: expected matplotlib, which is not installed: "
                         "pip install -e '.[plot]', or 'dflash_jax[plot]'")
    if file.suffix.lower() not in KINDS:
        raise ValueError(f"--plot: expected a file that ends in {', '.join(KINDS)}, got {file}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--plot: expected a folder {file.parent}, got none")


def write_plot(file: Path, statistics: Statistics, rounds: Sequence[int], title: str) -> None:
    """Writes the picture; its kind is the file's ending.

    Args:
      statistics: of all rows. rounds: tokens of each round.
    Raises: OSError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    by_position = statistics.accepted_by_position
    positions = range(1, len(by_position) + 1)
    before = [statistics.rounds, *by_position][: len(by_position)]
    left.bar(positions, [_share(n, statistics.rounds) for n in by_position], color="tab:green",
             label="with all before it")
    left.plot(positions, [_share(n, m) for n, m in zip(by_position, before, strict=True)],
              color="black", marker="o", label="given all before it")
    left.set(xlabel="position of the proposal", ylabel="share of rounds that accept it",
             ylim=(0.0, 1.25), xticks=list(positions))
    left.legend(loc="upper center", ncols=2)
    widest = max(rounds, default=1)
    counts = [rounds.count(width) for width in range(1, widest + 1)]
    right.bar(range(1, widest + 1), counts, color="tab:blue")
    mean = statistics.tokens_per_round
    right.axvline(mean, color="black", linestyle="--", label=f"{mean:.2f} on average")
    right.set(xlabel="tokens of a round", ylabel="rounds", xticks=list(range(1, widest + 1)))
    right.legend()
    figure.savefig(file)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
