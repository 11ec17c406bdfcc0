"""How near a training comes to Bayes' optimum, on drawn prompts of which it is known (`predictor_prompts`).

All of it goes the way of a user's data: records in a file, read as `polyphase predictor train --from-scratch` reads
them, split, trained, saved, loaded again, and judged by `evaluate` on prompts that were drawn afterwards.
"""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from lab.bench.predictor_checkpoints import fine_tuning_rate
from lab.bench.predictor_prompts import BUCKETS, Drawn, Generator
from predictor.checkpoint import TOKENIZER_FILE
from predictor.data.examples import Example, load_examples
from predictor.evaluate import Evaluation
from predictor.loading import has_cuda
from predictor.served import ServedTokenizer, load_served

PROMPTS, FRESH, SEED = 20_000, 10_000, 1
SIZE, INPUT_TOKENS, THREADS = "small", 64, 2
WANT = 0.95  # of the optimum


def run_bayes() -> dict[str, Any]:
    """Train from nothing, judge by fresh prompts. The aim: WANT of what whoever knows the generator is right of."""
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
    """The classifier beside the optimum, beside who sees less, and beside the baselines."""
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
    """By the accuracy over the optimum."""
    return {"accuracy of the optimum": {"want": f">= {WANT:g}", "got": round(ratio, 4), "met": ratio >= WANT}}


def _served(folder: Path, drawn: list[Drawn]) -> ServedTokenizer:
    """A served model's tokenizer, which cuts prompts to what a predictor is sent."""
    from predictor.scratch import train_tokenizer

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
