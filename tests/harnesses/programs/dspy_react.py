"""DSPy's ReAct."""

import dspy
from shell import API_KEY, BASE_URL, MODEL, PROMPT, bash

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=API_KEY, cache=False))
print(dspy.ReAct("question -> answer", tools=[bash], max_iters=3)(question=PROMPT).answer)
