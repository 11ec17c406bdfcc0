"""A request's timeline in sentences: what was decided and on what it rested, where the time went, how it ended."""

from shared.explain.reasons import phrase
from shared.explain.story import Explanation, Sentence, explain

__all__ = ["Explanation", "Sentence", "explain", "phrase"]
