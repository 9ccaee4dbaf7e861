"""An agent that is a program: the sample on stdin, the model at OPENAI_BASE_URL, the answer on stdout."""

import json
import sys

from openai import OpenAI

sample = json.load(sys.stdin)
messages = sample["prompt"]
with OpenAI() as client:
    first = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages += [first, {"role": "user", "content": "Are you sure? Answer again."}]
    print(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)
