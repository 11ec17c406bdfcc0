"""Answer lengths, predicted while the prompt is computed, beside the true ones."""

import asyncio

from lab.demo import jobs
from lab.demo.client import ApiClient
from lab.demo.findings import Section
from services.launcher.suite import Suite

SOURCE = "classifier"
MAX_TOKENS = 512
AT_ONCE = 4
READABLE = 44  # characters of a question
QUESTIONS = (
    "Hello!",
    "What is the capital of Italy?",
    "Name three colours.",
    "Give a synonym for happy.",
    "Translate 'good morning' into French.",
    "Is the sun a star?",
    "Suggest a name for a small bakery.",
    "Write a sentence about rain.",
    "Explain in one sentence what a loop is.",
    "Describe how bread is made.",
    "Write a function in Python that reverses a string.",
    "Write a SQL query that counts the orders of each customer.",
    "Explain the difference between a list and a tuple, with an example.",
    "Write a JavaScript function that checks whether a number is prime.",
    "Write a letter to a friend about a long journey by train.",
    "Pretend you are a pirate and tell me about your last adventure.",
    "Write a dialogue between a teacher and a student about space travel.",
    "Summarise the plot of a film about a lost dog in a paragraph.",
    "Act as a tour guide and describe the old town to me.",
    "List ten ways to save energy at home.",
    "Write a short story about a lighthouse keeper.",
    "How do I sort a list of words by their length in Python?",
    "Compose a poem about the sea in winter.",
    "Create an HTML page with a heading and a table of three rows.",
)


async def check_lengths(suite: Suite, api: ApiClient) -> Section:
    """Each question once, as its model draws the answer; the timelines say what was predicted of it."""
    section = Section("How long answers get is predicted, by a classifier trained on this model's own answers")

    few = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int, question: str) -> int:
        more = {"request_id": f"length-{number}", "seed": number}
        async with few:
            answer = await api.chat(question, max_tokens=MAX_TOKENS, **more)
        return int(answer["usage"]["completion_tokens"])

    true = await asyncio.gather(*(ask(*one) for one in enumerate(QUESTIONS)))
    found = await jobs.records(suite, [f"length-{number}" for number in range(len(QUESTIONS))])
    rows: list[tuple[str, ...]] = []
    classified = inside = 0
    for question, tokens, record in zip(QUESTIONS, true, found, strict=True):
        said = [one for one in record.timeline["decisions"] if one["kind"] == "prediction"]
        if not said or said[0]["reasons"][0]["what"] != SOURCE:
            rows.append((question[:READABLE], "–", "–", str(tokens), ""))
            continue
        figures = said[0]["reasons"][0]["figures"]
        lower, upper = int(figures["lower_tokens"]), int(figures["upper_tokens"])
        classified += 1
        inside += lower <= tokens < upper
        reach = f"{lower} to {upper - 1}" if upper <= MAX_TOKENS else f"{lower} and more"
        rows.append(
            (question, reach, f"{figures['expected_tokens']:.0f}", str(tokens), "✔" if lower <= tokens < upper else "")
        )
    section.table = (("asked", "predicted", "expected", "true", "in range"), rows)
    of_all = f"{classified}/{len(rows)}"
    section.check("the classifier answers", classified > 0, "some questions at least", of_all)
    section.check("answered by the classifier in time", classified >= 0.9 * len(rows), "nine of ten", of_all)
    section.lines.append(
        f"{inside} of {classified} in the predicted range; docs/predictor.md has the accuracy on held-out prompts."
    )
    section.figures |= {"lengths_in_predicted_range": inside, "lengths_predicted": classified}
    return section
