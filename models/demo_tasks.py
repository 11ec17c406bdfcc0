"""Synthetic chat tasks with reliable answers of controlled length, for the demo model.

A model of five million parameters cannot learn facts or arithmetic from a few megabytes of free text. These
tasks give it a set of requests that it answers dependably, from one word to several hundred tokens, so that a
demonstration shows short and long answers. The facts are in ``demo_facts.json``.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Exchange = tuple[str, str]  # what the user asks, what the assistant answers
Facts = dict[str, Any]
Task = Callable[[random.Random, Facts], Exchange]


def load_facts() -> Facts:
    """Read the facts that lie beside this module."""
    facts: Facts = json.loads(Path(__file__).with_name("demo_facts.json").read_text(encoding="utf-8"))
    return facts


def make_conversation(rng: random.Random, facts: Facts) -> list[Exchange]:
    """Return one to three exchanges, each drawn from `TASKS`; most conversations have one."""
    turns = rng.choices((1, 2, 3), weights=(85, 10, 5))[0]
    names = rng.choices(list(TASKS), weights=[weight for _, weight in TASKS.values()], k=turns)
    exchanges = [TASKS[name][0](rng, facts) for name in names]
    return [(vary_request(rng, request), answer) for request, answer in exchanges]


def vary_request(rng: random.Random, request: str) -> str:
    """Return the request as people type it: with or without capitals, a full stop or a "please"."""
    if rng.random() < 0.2:
        request = request.rstrip(".?!")
    if rng.random() < 0.15:
        request = request[0].lower() + request[1:]
    if rng.random() < 0.1 and not request.endswith("?"):
        request = "Please " + request[0].lower() + request[1:]
    return request


def chat(rng: random.Random, facts: Facts) -> Exchange:
    """Small talk."""
    request, answer = rng.choice(facts["chat"])
    return request + rng.choice(("", "!", ".")) if request[-1].isalpha() else request, answer


def count(rng: random.Random, facts: Facts) -> Exchange:
    """Count up or down between two numbers below 101."""
    first = 1 if rng.random() < 0.8 else rng.randint(0, 60)
    last = first + rng.choice((rng.randint(1, 20), rng.randint(1, 40)))
    numbers = list(range(first, last + 1))
    if rng.random() < 0.2:
        first, last = last, first
        numbers.reverse()
        request = rng.choice((f"Count down from {first} to {last}.", f"Count backwards from {first} to {last}."))
    else:
        request = rng.choice(
            (f"Count from {first} to {last}.", f"Count from {first} to {last}.", f"Count to {last}.")
            if first == 1
            else (f"Count from {first} to {last}.", f"Write the numbers from {first} to {last}.")
        )
    return request, ", ".join(map(str, numbers)) + "."


def say(rng: random.Random, facts: Facts) -> Exchange:
    """Say some given words."""
    words = " ".join(rng.sample(facts["words"].split(), rng.randint(1, 12)))
    return rng.choice((f"Say {words}.", f'Say "{words}".', f"Repeat after me: {words}", f"Say: {words}")), words


def repeat(rng: random.Random, facts: Facts) -> Exchange:
    """Repeat one word a given number of times."""
    word, times = rng.choice(facts["words"].split()), rng.randint(2, 12)
    request = rng.choice((f"Repeat the word {word} {times} times.", f"Say {word} {times} times."))
    return request, " ".join([word] * times)


def enumerate_known(rng: random.Random, facts: Facts) -> Exchange:
    """List a whole well-known series, or its first members."""
    name = rng.choice(list(facts["lists"]))
    members = facts["lists"][name].split(", ")
    if rng.random() < 0.7:
        request = rng.choice((f"List the {name}.", f"What are the {name}?", f"Name the {name}."))
        return request, sentence_of(members)
    number = rng.randint(2, len(members) - 1)
    return f"List the first {number} {name}.", sentence_of(members[:number])


def pick(rng: random.Random, facts: Facts) -> Exchange:
    """Name some members of a class, in a sentence or as a numbered list."""
    name = rng.choice(list(facts["picks"]))
    number = rng.randint(2, 8)
    members = rng.sample(facts["picks"][name].split(", "), number)
    if rng.random() < 0.5:
        return f"Name {number} {name}.", sentence_of(members)
    lines = [f"{place}. {member}" for place, member in enumerate(members, start=1)]
    return f"Make a numbered list of {number} {name}.", "\n".join(lines)


def capital(rng: random.Random, facts: Facts) -> Exchange:
    """Name the capital of a country."""
    country, city = rng.choice(list(facts["capitals"].items()))
    request = rng.choice(("What is the capital of {}?", "What's the capital of {}?", "Name the capital of {}."))
    return request.format(country), f"The capital of {country} is {city}."


def colour(rng: random.Random, facts: Facts) -> Exchange:
    """Tell the colour of a thing, in either spelling of the question."""
    thing, value = rng.choice(list(facts["colours"].items()))
    request = rng.choice((f"What colour is {thing}?", f"What color is {thing}?"))
    return request, f"{thing[0].upper()}{thing[1:]} is {value}."


def opposite(rng: random.Random, facts: Facts) -> Exchange:
    """Name the opposite of a word."""
    pair = list(rng.choice(list(facts["opposites"].items())))
    rng.shuffle(pair)
    return f"What is the opposite of {pair[0]}?", f"The opposite of {pair[0]} is {pair[1]}."


def sound(rng: random.Random, facts: Facts) -> Exchange:
    """Name the sound of an animal."""
    animal, noise = rng.choice(list(facts["sounds"].items()))
    return f"What does a {animal} say?", f'A {animal} says "{noise}".'


def add(rng: random.Random, facts: Facts) -> Exchange:
    """Add two numbers up to ten."""
    left, right = rng.randint(0, 10), rng.randint(0, 10)
    request = rng.choice((f"What is {left} + {right}?", f"What is {left} plus {right}?", f"{left} + {right} ="))
    return request, f"{left} + {right} = {left + right}"


def topic(rng: random.Random, facts: Facts) -> Exchange:
    """Explain a topic in one sentence, in a given number of sentences, or at length."""
    name = rng.choice(list(facts["topics"]))
    sentences = [part.rstrip(".") + "." for part in facts["topics"][name].split(". ")]
    kind = rng.randrange(3)
    if kind == 0:
        verb = "are" if name.endswith("s") and " " not in name and name != "Polyphase" else "is"
        request = rng.choice((f"What {verb} {name}?", f"What {verb} {name}?", f"Define {name} in one sentence."))
        return request, sentences[0]
    if kind == 1:
        number = rng.randint(1, len(sentences))
        plural = "sentence" if number == 1 else "sentences"
        request = rng.choice((f"Explain {name} in {number} {plural}.", f"Write {number} {plural} about {name}."))
        return request, " ".join(sentences[:number])
    request = rng.choice((f"Tell me about {name}.", f"Explain {name}.", f"Write a paragraph about {name}."))
    return request, " ".join(sentences)


def story(rng: random.Random, facts: Facts) -> Exchange:
    """Tell a short, a normal or a long story about an animal or a person."""
    hero = rng.choice(("cat", "dog", "fox", "rabbit", "bear", "dragon", "robot", "king", "girl", "boy", "wizard"))
    size = rng.choice(("short", "", "long"))
    scenes = rng.randint(*{"short": (1, 2), "": (3, 4), "long": (5, 7)}[size])
    article = rng.choice((f"a {size} story", f"a {size} tale")).replace("  ", " ")
    place = rng.choice(("in a small house near the forest", "in an old castle", "by the sea", "on a high hill"))
    name = rng.choice(("Milo", "Luna", "Oscar", "Ruby", "Felix", "Nora", "Hugo", "Ivy"))
    nature = rng.choice(("young", "brave", "clever", "lonely"))
    parts = [f"Once upon a time there was a {nature} {hero} named {name} who lived {place}."]
    parts += [scene.format(name=name) for scene in rng.sample(SCENES, scenes)]
    parts.append(rng.choice(ENDINGS).format(name=name))
    return rng.choice((f"Tell me {article} about a {hero}.", f"Write {article} about a {hero}.")), " ".join(parts)


def sentence_of(members: list[str]) -> str:
    """Join names with commas and end with a full stop."""
    return ", ".join(members) + "."


SCENES = (
    "One morning {name} found a golden key under a stone and wondered which door it would open.",
    "One day a heavy storm came, and {name} had to hide in a dark cave until the wind was quiet again.",
    "On the road {name} met an old owl, who knew many secrets and asked three difficult questions.",
    "In the evening {name} saw a strange light between the trees and followed it without fear.",
    "Near the river {name} helped a little mouse that had lost its way home.",
    "In the market {name} traded a red apple for a map of a hidden island.",
    "At night {name} dreamed of a silver ship that sailed across the sky.",
    "Then {name} climbed the highest mountain and saw the whole kingdom below.",
    "Soon {name} heard music from an empty tower and went up the stairs step by step.",
    "After a long walk {name} shared the last piece of bread with a hungry traveller.",
)
ENDINGS = (
    "In the end {name} came home tired but happy, and everyone lived in peace.",
    "From that day on {name} was never lonely again.",
    "And so {name} learned that a kind heart is worth more than gold.",
    "When the sun went down, {name} smiled and fell asleep under the stars.",
)

# Name of a task: how to make an exchange, and its weight in the mixture.
TASKS: dict[str, tuple[Task, int]] = {
    "chat": (chat, 11),
    "count": (count, 18),
    "say": (say, 18),
    "repeat": (repeat, 8),
    "enumerate_known": (enumerate_known, 6),
    "pick": (pick, 6),
    "capital": (capital, 8),
    "colour": (colour, 4),
    "opposite": (opposite, 5),
    "sound": (sound, 3),
    "add": (add, 6),
    "topic": (topic, 18),
    "story": (story, 10),
}
