"""Sums by DSPy, which asks twice, in text that it parses; the second time with its first answer."""

import json
import sys

import dspy
from dspy.utils.exceptions import AdapterParseError

# Without the cache, which would give a later sample the responses of an earlier one.
dspy.configure(lm=dspy.LM("openai/policy", cache=False))
guess = dspy.Predict("question -> answer: int")
check = dspy.Predict("question, guess: int -> answer: int")

task = json.load(sys.stdin)
try:
    first = guess(question=task["prompt"]).answer
    said = str(check(question=task["prompt"], guess=first).answer)
except AdapterParseError:
    said = ""
print(float(said == task["answer"]))
