"""The old place of `exact_match`, which lives in text_match now."""

from turnwise.scoring.text_match import exact_match

__all__ = ["exact_match"]
