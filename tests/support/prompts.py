"""Thirty-two varied prompts: prose, code, numbers, scripts, lists, chat markup, short and long."""

from __future__ import annotations

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.linspace(0, 1, 11)\nprint(",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 12 * 12?\nA:",
    "The three primary colours are",
    "To make tea, first",
    "Der schnelle braune Fuchs springt",
    "La vie est",
    "El gato se sentó en",
    "日本の首都は",
    "Привет, меня зовут",
    "🙂🙃 Emoji are",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "born": 1815, "field": "',
    "<html>\n<head><title>Test</title></head>\n<body>\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria is",
    "Water boils at 100 degrees",
    "A haiku about autumn:\n",
    "List of planets:\n1. Mercury\n2. Venus\n3.",
    "To be, or not to be,",
    "The quick brown fox",
    "x" * 40,
    " ",
    "In 1969, the first",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to make "
    "oxygen and energy in the form of sugar. It takes place in the leaves. " * 3,
    "Chapter 1\n\nIt was a bright cold day in April, and the clocks were striking thirteen. " * 6,
    "\n".join(f"line {i}: the value is {i * i}" for i in range(12)),
]
NUM_TOKENS = 64
FRUITS = "Name three fruits."
"""A question that the default model answers well on every instruction set."""


def names_a_fruit(answer: str) -> bool:
    """Return whether an answer to FRUITS names a fruit. Which fruits the model names depends on the
    instruction set."""
    return any(fruit in answer.lower() for fruit in ("apple", "banana", "grape", "orange"))
