"""The smallest agent that is a program: the sample on stdin, the model at OPENAI_BASE_URL, the answer on stdout."""

import json
import sys

from openai import OpenAI

sample = json.load(sys.stdin)
with OpenAI() as client:
    answer = client.chat.completions.create(model="policy", messages=sample["prompt"])
print(answer.choices[0].message.content)
