"""Several turns: the environment plays the user until the number is guessed."""

import verifiers.v1 as vf


class GuessTask(vf.Task[vf.TaskData]):
    pass


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        turns = 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                turns += 1
                if "7" in segment.last_reply or turns == 3:
                    break
                segment = await interaction.turn("No. Guess again.")
        interaction.trace.record_reward("won", float("7" in interaction.trace.last_reply), 1.0)
        interaction.trace.record_metric("guesses", float(turns))


class GuessConfig(vf.TasksetConfig):
    """Nothing of its own."""


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield GuessTask(vf.TaskData(prompt="Guess a number below ten."), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
