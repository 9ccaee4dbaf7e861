"""An episode shows what was said in it before it has ended."""

from turnwise.rollout.tools.tool import tool
from turnwise.storage.run_dir import RunDir
from turnwise.storage.underway import UnderwayWriter, shown


def test_a_turn_is_seen_while_the_next_one_is_still_to_come(rollouts, call, tmp_path):
    seen = []
    with UnderwayWriter(RunDir.create(tmp_path, "a", "train")) as episodes:

        @tool
        def look() -> str:
            """Looks at what is under way."""
            seen.append(shown(episodes.now()))
            return "seen"

        rollout = rollouts.make([call("look"), "#### 42"], tools=[look])
        trajectory = rollout.play()
        after = shown(episodes.now())
    assert seen[0]["playing"] == 1 and seen[0]["episodes"][0]["messages"][-1]["calls"] == ["look"]
    assert (after["playing"], after["finished"], len(trajectory.turns)) == (0, 1, 2)
