"""Reinforcement learning on the task of evaluate.py, with one question about every item held out."""

import sys

from evaluate import calculate, customer, per_box, reward, samples

import turnwise as tw

if __name__ == "__main__":
    config = tw.configure(
        "task=null", "training.steps=2", "training.groups=4", "training.group_size=4", "sampling.max_tokens=48",
        *sys.argv[1:],
    )  # fmt: skip
    report = tw.train(
        config,
        samples=samples([2, 4, 5, 7]),
        eval_samples=samples([3]),
        tools=[calculate, per_box],
        scorer=reward,
        interaction=customer,
    )
    print(report)
