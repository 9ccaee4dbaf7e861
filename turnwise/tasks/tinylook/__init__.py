"""The task `tinylook`: questions about a canvas that the policy sees small, and may look at from near with a tool.

`language` has every word that is said (`VOCABULARY`), `scenes` what is drawn, `rows` the rows. The drawing libraries
are imported when something is drawn.
"""

from turnwise.task import Task
from turnwise.tasks.tinylook.language import VOCABULARY as VOCABULARY
from turnwise.tasks.tinylook.language import Puzzle
from turnwise.tasks.tinylook.measures import REDUCTIONS, measures
from turnwise.tasks.tinylook.rows import LOOK, NAME, prepare, rows

TASK = Task(
    name=NAME,
    further_sources=tuple(f"{NAME}/{puzzle}" for puzzle in Puzzle),
    rows=rows,
    endless=True,
    prepare=prepare,
    tools=(LOOK,),
    script="turnwise.tasks.tinylook.traces:script",
    scorer="turnwise.tasks.tinylook.reward:tinylook",
    reductions=REDUCTIONS,
    metrics=measures,
    defaults={"sampling.max_tokens": 16, "chat.tool_format": "hermes"},
)
