"""Run by test_inside_verl.py beside a real verl: its AgentLoopWorker, client and load balancer, with servers of ours."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import ray
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from turnwise import configure
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.rollout.prepare import load_samples, make_renderer

PROMPT, RESPONSE, STEP = 768, 256, 7


@ray.remote
class Server:
    """What verl's rollout server is to its client, over the bundled model in our torch engine."""

    def __init__(self) -> None:
        config = configure("engine=torch", "engine.threads=1")
        renderer = make_renderer(config)
        self.sampler = open_sampler(config, renderer, lambda text: None).sampler
        self.asked = []

    async def generate(self, prompt_ids, sampling_params, request_id, image_data=None, video_data=None, priority=0):
        params = SamplingParams(
            sampling_params["max_tokens"],
            sampling_params["temperature"],
            stop_ids=frozenset(sampling_params["stop_token_ids"]),
            stop_strings=tuple(sampling_params.get("stop", ())),
        )
        noise = NoiseKey(0, 0, str(priority), 0)
        found = await self.sampler.generate(Request(request_id, np.array(prompt_ids), params, noise))
        self.asked.append((list(prompt_ids), found.token_ids.tolist(), found.logprobs.tolist()))
        logprobs = found.logprobs.tolist() if sampling_params["logprobs"] else None
        return TokenOutput(
            token_ids=found.token_ids.tolist(),
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": STEP},
        )

    def told(self):
        return self.asked


def trainer_config(model: str, agents: str, *overrides: str):
    import verl

    GlobalHydra.instance().clear()
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}", f"{rollout}.name=vllm", f"{rollout}.prompt_length={PROMPT}",
                f"{rollout}.response_length={RESPONSE}", f"{rollout}.calculate_log_probs=true",
                f"{rollout}.agent.agent_loop_config_path={agents}", f"{rollout}.agent.default_agent_loop=turnwise",
                *overrides,
            ],
        )  # fmt: skip


def batch(samples) -> DataProto:
    def column(values):
        found = np.empty(len(values), dtype=object)
        found[:] = values
        return found

    rows = {
        "raw_prompt": [[{"role": m.role.value, "content": m.text} for m in one.prompt] for one in samples],
        "data_source": [one.data_source for one in samples],
        "reward_model": [{"ground_truth": one.ground_truth} for one in samples],
        "extra_info": [{"index": number} for number, _ in enumerate(samples)],
        "uid": [one.id for one in samples],
    }
    found = DataProto(non_tensor_batch={name: column(values) for name, values in rows.items()})
    found.non_tensor_batch["priority"] = np.arange(len(samples), dtype=np.int64)
    found.meta_info = {"global_steps": 3}
    return found


def main(folder: Path) -> None:
    model = folder / "model"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    server = Server.remote()
    balancer = ray.remote(GlobalRequestLoadBalancer).remote(servers={"only": server})
    samples = load_samples(configure(), "train", 6)

    def play(agents: str, *overrides: str) -> DataProto:
        config = trainer_config(str(model), agents, *overrides)
        worker = AgentLoopWorker(config, LLMServerClient(config, balancer))
        return asyncio.run(worker.generate_sequences(batch(samples)))

    found = play(str(folder / "agents.yaml"))
    asked = ray.get(server.told.remote())
    rows = []
    for number, one in enumerate(samples):
        here = found.batch["attention_mask"][number].bool()
        prompt, response = here[:PROMPT], here[PROMPT:]
        rows.append(
            {
                "id": one.id,
                "prompt": found.batch["prompts"][number][prompt].tolist(),
                "response": found.batch["responses"][number][response].tolist(),
                "mask": found.batch["response_mask"][number][response].tolist(),
                "logprobs": found.batch["rollout_log_probs"][number][response].tolist(),
                "scores": found.batch["rm_scores"][number][response].tolist(),
                "turns": int(found.non_tensor_batch["__num_turns__"][number]),
                "acc": float(found.non_tensor_batch["acc"][number]),
                "extra": found.non_tensor_batch["turnwise"][number],
                "steps": [int(found.non_tensor_batch[f"{end}_global_steps"][number]) for end in ("min", "max")],
            }
        )
    problems = {}
    for name in ("wrong",):
        try:
            play(str(folder / f"{name}.yaml"))
        except Exception as error:
            problems[name] = f"{type(error).__name__}: {error}"
    ray.kill(server)
    try:
        play(str(folder / "agents.yaml"))
    except Exception as error:
        problems["server"] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps({"rows": rows, "asked": asked, "problems": problems}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
