"""Explanations of requests: timelines as sentences about decisions, their reasons, spans and outcomes."""

from shared.explain.reasons import phrase
from shared.explain.story import Explanation, Sentence, explain

__all__ = ["Explanation", "Sentence", "explain", "phrase"]
