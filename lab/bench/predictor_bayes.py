"""A generator of prompts and lengths whose best possible accuracy is known, and how near to it a training comes.

Lengths are shaped like ShareGPT's: 22, 26, 24, 16, 11 and 1 % in buckets of 200 tokens. A prompt says two things of its
length, each by one of several words: what is asked for, at its head, and how, at its end; between them stand up to 300
words that say nothing. Neither alone tells as much as both.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.buckets import Buckets
from predictor.data.examples import Example, split_of

SHARES = (0.22, 0.26, 0.24, 0.16, 0.11, 0.01)
BUCKETS = Buckets(200, len(SHARES))
WORDS = 4  # that mean the same
FILLERS = 300
EXAMPLES, FRESH, SEED = 10_000, 4_000, 11
ASKED, MANNER = 0.60, 0.60  # how often a part of a prompt points at the true bucket
AIM = 0.95
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Generator:
    """asked, manner: [bucket, meaning], the probability of each meaning of either part, given the true bucket."""

    prior: Floats
    asked: Floats
    manner: Floats

    @classmethod
    def shaped(cls) -> "Generator":
        """Like ShareGPT's lengths."""
        return cls(np.asarray(SHARES), _pointing(ASKED), _pointing(MANNER))

    @property
    def joint(self) -> Floats:
        """[bucket, asked, manner]; sums to 1."""
        joint: Floats = self.prior[:, None, None] * self.asked[:, :, None] * self.manner[:, None, :]
        return joint

    @property
    def optimum(self) -> float:
        """How often who knows all of this is right: exact."""
        return float(self.joint.max(axis=0).sum())

    @property
    def by_one_part(self) -> float:
        """The same of who reads the better one of the two parts alone."""
        return float(max(self.joint.sum(axis=part).max(axis=0).sum() for part in (1, 2)))

    def best(self, asked: int, manner: int) -> int:
        """The likeliest bucket of a prompt that means this."""
        return int(self.joint[:, asked, manner].argmax())

    def examples(self, count: int, seed: int) -> tuple[list[Example], float]:
        """Drawn prompts with lengths; and how often `best` is right of them."""
        rng, right, found = Random(seed), 0, []
        fillers = [_word(Random(number)) for number in range(FILLERS)]
        meanings = range(len(SHARES))
        for _ in range(count):
            bucket = rng.choices(meanings, SHARES)[0]
            asked, manner = (rng.choices(meanings, part[bucket].tolist())[0] for part in (self.asked, self.manner))
            right += self.best(asked, manner) == bucket
            between = rng.choices(fillers, k=int(300 * rng.random() ** 3))
            words = [rng.choice(fillers), _said("asked", asked, rng), *between, _said("manner", manner, rng)]
            text = " ".join([*words, rng.choice(fillers)])
            tokens = rng.randrange(bucket * BUCKETS.width_tokens, (bucket + 1) * BUCKETS.width_tokens)
            found.append(Example(text, len(words) + 1, tokens, split_of(text)))
        return found, right / count


def run_bayes() -> dict[str, Any]:
    """Train from nothing on drawn prompts, and judge it by freshly drawn ones."""
    from predictor.evaluate import evaluate
    from predictor.fine_tune import FineTuning
    from predictor.model import load_classifier
    from predictor.train import train_checkpoint

    generator = Generator.shaped()
    examples, _ = generator.examples(EXAMPLES, SEED)
    fresh, best = generator.examples(FRESH, SEED + 1)
    plan = FineTuning(BUCKETS, "", "small", epochs=10.0, learning_rate=5e-4, patience=2, progress=False)
    with tempfile.TemporaryDirectory(prefix="polyphase-bayes-") as folder:
        out, began_s = Path(folder) / "checkpoint", monotonic()
        train_checkpoint(examples, out, "synthetic", plan)
        took_s = monotonic() - began_s
        found = evaluate(load_classifier(out), examples, fresh)
    share = found.scores.accuracy / generator.optimum
    figures = {
        "bayes_optimum": generator.optimum,
        "bayes_optimum_of_one_part": generator.by_one_part,
        "bayes_best_on_the_drawn": best,
        "bayes_accuracy": found.scores.accuracy,
        "bayes_commonest": found.majority.accuracy,
        "bayes_prompt_length": found.prompt_length.accuracy,
        "bayes_calibration_error": found.scores.calibration_error,
        "bayes_share_of_optimum": share,
        "bayes_training_s": took_s,
    }
    aim = {"want": f"at least {AIM:g} of the best possible", "got": round(share, 4), "met": share >= AIM}
    note = f"bayes: {EXAMPLES} drawn prompts to train on, {FRESH} others to judge by; `train --from-scratch small`"
    return {"figures": figures, "aims": {"synthetic lengths": aim}, "notes": [note]}


def _pointing(right: float) -> Floats:
    """Each bucket is meant so often; what is meant wrongly is a bucket near it more often than one far away."""
    count = len(SHARES)
    apart = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    near = np.where(apart > 0, 0.5**apart, 0.0)
    pointing: Floats = np.eye(count) * right + near / near.sum(axis=1, keepdims=True) * (1.0 - right)
    return pointing


def _said(part: str, meaning: int, rng: Random) -> str:
    return _word(Random(f"{part} {meaning} {rng.randrange(WORDS)}"))


def _word(rng: Random) -> str:
    return "".join(rng.choice("bdfglmnprst") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
