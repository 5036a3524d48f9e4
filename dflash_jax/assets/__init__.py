"""The shipped pair: a tiny target and two drafts, with the report of the run that made them.

`MODEL_CARD.md` says what they are, how they were made and how good they are.
"""

from pathlib import Path

DRAFTS = ("dflash2", "dflash")


def tiny_pair_path(part: str) -> Path:
    """Where a part of the shipped pair lies.

    Args:
      part: "target", "dflash" or "dflash2" for a Hugging Face folder; the name of another file.
    Raises: FileNotFoundError if the package was installed without it.
    """
    place = Path(__file__).parent / part
    if not place.exists():
        raise FileNotFoundError(f"assets: expected {part} in {place.parent}, got none")
    return place
