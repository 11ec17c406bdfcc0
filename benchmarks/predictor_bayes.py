"""Distance between a trained length classifier and Bayes' optimum, on drawn prompts whose optimum is known.

The drawn prompts take the path of a user's data: a file of records, read as `polyphase predictor train --from-scratch`
reads it, split, trained, saved, loaded, and judged on prompts that were drawn afterwards.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.predictor_latency import fine_tuning_rate
from predictor.buckets import Buckets
from predictor.checkpoint import TOKENIZER_FILE
from predictor.evaluate import Evaluation
from predictor.examples import Example, ServedTokenizer, load_examples, load_served
from predictor.loading import has_cuda

# A prompt contains one verb and one topic; all other words carry no information. Verbs and topics are of six kinds
# each, and P(bucket | kinds) is a table, so that the accuracy of a reader who knows the table, Bayes' optimum, is
# exact. Lengths are shaped like ShareGPT's. After half of the kinds of verbs a topic means the opposite: neither word
# alone, nor the sum of both, tells what the pair tells.

Floats = NDArray[np.float64]
SHARES = (0.22, 0.26, 0.24, 0.16, 0.11, 0.01)
BUCKETS = Buckets(200, len(SHARES))
LONGEST_TOKENS = 1_600  # of the last bucket, which is open-ended
# How often a word points at the true bucket; else at another, at one so many further away each time half as often.
VERB_RIGHT, TOPIC_RIGHT, FURTHER = 0.50, 0.70, 0.5
LONG_SHARE = 0.4  # of prompts that are mostly filler
SHORT_WORDS, LONG_WORDS = (6, 60), (150, 450)
# Positions of a long prompt's evidence: the classifier does not see the middle.
FROM_HEAD, FROM_TAIL = 8, 30

VERBS = (
    ("name", "spell"),
    ("define", "translate"),
    ("list", "summarise"),
    ("explain", "describe"),
    ("compare", "discuss"),
    ("write", "compose"),
)
TOPICS = (
    ("capital", "colour"),
    ("recipe", "melody"),
    ("bridge", "planet"),
    ("policy", "engine"),
    ("history", "theorem"),
    ("saga", "constitution"),
)
OPPOSITE = (3, 4, 5)  # the kinds of verbs after which topics mean the opposite
_FILLER = (
    "the a of and to in that it with as for on at by from this which some other more than into over under after before"
    " while because although perhaps maybe really quite rather very often always never sometimes please thanks hello"
    " yesterday today tomorrow morning evening week month year house garden window table paper letter street river"
    " mountain forest ocean island village market station train road field stone water light night winter summer green"
    " blue white heavy small large early late quiet simple useful common recent modern local public private friend"
    " teacher doctor neighbour child people group story question reason result moment place number part side kind work"
    " think know want need find give take make see look use come go keep let help start"
)
FILLER = tuple(_FILLER.split())


@dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt, what its two words are of, and the answer's length."""

    prompt: str
    verb: int
    topic: int
    output_tokens: int

    def record(self) -> dict[str, Any]:
        """As `polyphase predictor train --data` reads it."""
        return {"prompt": self.prompt, "output_tokens": self.output_tokens}


@dataclass(frozen=True, slots=True)
class Generator:
    """joint: [bucket, verb, topic], the probability that a prompt has that length and words of those kinds."""

    joint: Floats

    @classmethod
    def like_sharegpt(cls) -> "Generator":
        count = len(SHARES)
        verb, topic = pointing(count, VERB_RIGHT), pointing(count, TOPIC_RIGHT)
        after = np.stack([topic[:, ::-1] if kind in OPPOSITE else topic for kind in range(count)], axis=1)
        return cls(np.asarray(SHARES)[:, None, None] * verb[:, :, None] * after)

    @property
    def evidence(self) -> Floats:
        """[verb, topic]: how often prompts have words of those kinds."""
        result: Floats = self.joint.sum(axis=0)
        return result

    @property
    def posterior(self) -> Floats:
        """[bucket, verb, topic]: P(bucket | kinds)."""
        result: Floats = self.joint / self.evidence
        return result

    @property
    def optimum(self) -> float:
        """Bayes' optimum: the mean of the highest posterior over all prompts. Exact."""
        return float(self.joint.max(axis=0).sum())

    @property
    def optimum_of_one(self) -> float:
        """The best accuracy from one of the two words alone."""
        return float(max(self.joint.sum(axis=other).max(axis=0).sum() for other in (1, 2)))

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """So many prompts: first their kinds, then the bucket by its posterior. Equal for equal seeds."""
        rng, kinds = Random(seed), len(SHARES)
        pairs = rng.choices(range(kinds * kinds), self.evidence.ravel().tolist(), k=count)
        posterior = self.posterior
        found = []
        for verb, topic in (divmod(pair, kinds) for pair in pairs):
            bucket = rng.choices(range(kinds), posterior[:, verb, topic].tolist())[0]
            found.append(Drawn(_prompt(verb, topic, rng), verb, topic, _tokens(bucket, rng)))
        return found

    def best_accuracy(self, drawn: list[Drawn]) -> float:
        """How often the table's likeliest bucket is the true one of these: with luck above the optimum, or below."""
        best = self.joint.argmax(axis=0)
        return float(np.mean([best[one.verb, one.topic] == BUCKETS.of(one.output_tokens) for one in drawn]))

    def optimum_on(self, drawn: list[Drawn]) -> float:
        """The mean of the highest posterior over these prompts."""
        highest = self.posterior.max(axis=0)
        return float(np.mean([highest[one.verb, one.topic] for one in drawn]))

    def expected_accuracy(self, drawn: list[Drawn], guesses: list[int]) -> float:
        """What those guesses are right of on average over all lengths that these prompts could have had."""
        posterior = self.posterior
        pairs = zip(drawn, guesses, strict=True)
        return float(np.mean([posterior[guess, one.verb, one.topic] for one, guess in pairs]))


def pointing(count: int, right: float) -> Floats:
    """[bucket, kind]: the probability of each kind of word, given the bucket."""
    apart = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    near = np.where(apart > 0, FURTHER**apart, 0.0)
    result: Floats = np.eye(count) * right + near / near.sum(axis=1, keepdims=True) * (1.0 - right)
    return result


def _prompt(verb: int, topic: int, rng: Random) -> str:
    pair = [rng.choice(VERBS[verb]), rng.choice(TOPICS[topic])]
    rng.shuffle(pair)
    is_long = rng.random() < LONG_SHARE
    words = rng.choices(FILLER, k=rng.randint(*(LONG_WORDS if is_long else SHORT_WORDS)))
    where = [*range(FROM_HEAD), *range(len(words) - FROM_TAIL, len(words))] if is_long else range(len(words))
    for at, word in zip(rng.sample(where, len(pair)), pair, strict=True):
        words[at] = word
    return " ".join(words)


def _tokens(bucket: int, rng: Random) -> int:
    lower, upper = BUCKETS.bounds(bucket)
    return rng.randrange(lower, min(upper, LONGEST_TOKENS))


PROMPTS, FRESH, SEED = 20_000, 10_000, 1
SIZE, INPUT_TOKENS, THREADS = "small", 64, 2
WANT = 0.95  # of the optimum


def run_bayes() -> dict[str, Any]:
    """Train from scratch and evaluate on fresh prompts. The aim is WANT of Bayes' optimum."""
    generator = Generator.like_sharegpt()
    drawn = generator.draw(PROMPTS, SEED)
    known = {one.prompt for one in drawn}
    fresh = [one for one in generator.draw(FRESH, SEED + 1) if one.prompt not in known]
    with TemporaryDirectory(prefix="polyphase-bench-") as folder:
        served = _served(Path(folder) / "served", drawn)
        examples = _as_a_user(Path(folder) / "train.jsonl", drawn, served)
        judged_by = _as_a_user(Path(folder) / "fresh.jsonl", fresh, served)
        began_s = monotonic()
        found = _trained(Path(folder) / "checkpoint", examples, judged_by)
        training_s = monotonic() - began_s
    figures = {"bayes_training_s": training_s, **shares(generator, fresh, found)}
    figures |= _rates(examples)
    aim = aim_of(figures["bayes_ratio"])
    note = (
        f"bayes: {PROMPTS} drawn prompts, and {len(fresh)} others to judge by; "
        f"`train --from-scratch {SIZE} --input-tokens {INPUT_TOKENS}`, else its defaults"
    )
    return {"figures": {name: round(value, 4) for name, value in figures.items()}, "aims": aim, "notes": [note]}


def shares(generator: Generator, fresh: list[Drawn], found: Evaluation) -> dict[str, float]:
    """The classifier beside the optimum, beside the optimum of one word, and beside the baselines."""
    return {
        "bayes_accuracy": found.scores.accuracy,
        "bayes_optimum": generator.optimum,
        "bayes_optimum_on_these": generator.optimum_on(fresh),
        "bayes_table_accuracy_on_these": generator.best_accuracy(fresh),
        "bayes_ratio": found.scores.accuracy / generator.optimum,
        "bayes_optimum_of_one_word": generator.optimum_of_one,
        "bayes_commonest_accuracy": found.majority.accuracy,
        "bayes_prompt_length_accuracy": found.prompt_length.accuracy,
        "bayes_calibration_error": found.scores.calibration_error,
    }


def aim_of(ratio: float) -> dict[str, Any]:
    return {"accuracy of the optimum": {"want": f">= {WANT:g}", "got": round(ratio, 4), "met": ratio >= WANT}}


def _served(folder: Path, drawn: list[Drawn]) -> ServedTokenizer:
    """A served model's tokenizer, which cuts prompts to what a predictor is sent."""
    from predictor.fine_tune import train_tokenizer

    folder.mkdir()
    train_tokenizer((one.prompt for one in drawn), SIZE).save(str(folder / TOKENIZER_FILE))
    return load_served(str(folder))


def _as_a_user(file: Path, drawn: list[Drawn], served: ServedTokenizer) -> list[Example]:
    file.write_text("\n".join(json.dumps(one.record()) for one in drawn), encoding="utf-8")
    return load_examples([file], served)


def _trained(folder: Path, examples: list[Example], judged_by: list[Example]) -> Evaluation:
    from predictor.evaluate import evaluate
    from predictor.model import load_classifier
    from predictor.train import train_checkpoint

    train_checkpoint(examples, folder, "drawn", _plan())
    return evaluate(load_classifier(folder, THREADS), [one for one in examples if one.split == "train"], judged_by)


def _plan() -> Any:
    """A `FineTuning` as the command line makes it of `--from-scratch` and `--input-tokens`."""
    from predictor.fine_tune import FineTuning
    from predictor.train import default_epochs, default_learning_rate

    return FineTuning(
        BUCKETS,
        from_scratch=SIZE,
        input_tokens=INPUT_TOKENS,
        epochs=default_epochs(SIZE),
        learning_rate=default_learning_rate(SIZE),
    )


def _rates(examples: list[Example]) -> dict[str, float]:
    """Prompts a second: of this training, on its device; on a GPU also of a network of OPT-125M's size."""
    rates = {f"fine_tuning_{SIZE}_prompts_per_s": fine_tuning_rate(examples, _plan())}
    if has_cuda():
        full = replace(_plan(), from_scratch="base", input_tokens=128, bf16=True)
        rates["fine_tuning_base_bf16_prompts_per_s"] = fine_tuning_rate(examples, full)
    return rates
