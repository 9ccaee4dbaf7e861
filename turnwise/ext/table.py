"""What each extension that ships with Turnwise brings, by name: text alone, so that nothing is imported for it."""

from turnwise.extensions import Engine, Extension, Named

_ENGINES_OF_OTHERS = (
    "model.precision",
    "engine.max_batch",
    "engine.sleep",
    "engine.memory_fraction",
    "engine.retries",
    "servers.options",
)
_SERVER = (*_ENGINES_OF_OTHERS, "servers.addresses", "servers.replicas", "servers.python")

OURS = {
    "board": Extension(
        verbs={
            "board": "turnwise.ext.board.command",
            "report": "turnwise.ext.board.report_command",
            "note": "turnwise.ext.board.note_command",
        },
        beside={"board": "turnwise.ext.board.board_process:beside_run"},
        section="turnwise.ext.board.config:BoardConfig",
    ),
    "conversations": Extension(
        demonstrations={"conversations.files": "turnwise.ext.conversations.demonstrations:read_conversations"},
        held_out={"conversations.eval_files": "turnwise.ext.conversations.demonstrations:read_held_out"},
        unlearned={
            "conversations.last_turn_only": "turnwise.ext.conversations.left_out:all_but_the_last",
            "conversations.leave_out_failed_calls": "turnwise.ext.conversations.left_out:with_failed_calls",
        },
        prompts=dict.fromkeys(
            ("messages", "conversations", "instruction"), "turnwise.ext.conversations.rows:with_prompt"
        ),
        section="turnwise.ext.conversations.config:ConversationsConfig",
    ),
    "dpo": Extension(
        demonstrations={f"dpo.{key}": f"turnwise.ext.dpo.pairs:of_{key}" for key in ("files", "recorded")},
        lessons=dict.fromkeys(("dpo.files", "dpo.recorded"), "turnwise.ext.dpo.lesson:Preferences"),
        section="turnwise.ext.dpo.config:DpoConfig",
    ),
    "fsdp": Extension(learners={"sharded": "turnwise.ext.fsdp.opening"}, section="turnwise.ext.fsdp.config:FsdpConfig"),
    "gym": Extension(loops={"gym_env": "turnwise.ext.gym.loop:gym_env"}),
    "http_env": Extension(
        loops={"http_env": "turnwise.ext.http_env.loop:http_env"}, tasks={"chat_env": "turnwise.ext.http_env.task:TASK"}
    ),
    "judge": Extension(
        scorers={"judge": "turnwise.ext.judge.scorer:judge", "tapo": "turnwise.ext.judge.tapo:tapo"},
        truths={"judge": "turnwise.ext.judge.scorer:truth_reader", "tapo": "turnwise.ext.judge.tapo:compared_truths"},
        verbs={"judge": "turnwise.ext.judge.command"},
        environment={"LLM_AS_A_JUDGE_BASE": "turnwise.ext.judge.environment"},
    ),
    "llm_user": Extension(users={"llm_user": "turnwise.ext.llm_user.user:LlmUser"}),
    "mcp": Extension(tool_entries={"mcp": "turnwise.ext.mcp.tools:open_mcp_tools"}),
    "ray": Extension(
        places={
            "ray": Named(
                "turnwise.ext.ray.placement:RayPlacement",
                "In actors of a Ray cluster, on all its nodes (docs/ext/ray.md).",
            )
        },
        section="turnwise.ext.ray.config:RayConfig",
    ),
    "research": Extension(
        tools={
            "retrieve": "turnwise.ext.research.tools.retrieve:retrieve",
            "search": "turnwise.ext.research.tools.search:search",
        },
        scorers={"cited_answer": "turnwise.ext.research.scoring:cited_answer"},
        tasks={"deep_research": "turnwise.ext.research.task:TASK"},
        reaches=("retrieve",),
    ),
    "sandbox": Extension(
        tools={
            "python": "turnwise.ext.sandbox.python_tool:python",
            "code_interpreter": "turnwise.ext.sandbox.python_tool:code_interpreter",
        },
        keys_of_options={"scoring.options.code_tests": "set TURNWISE_SANDBOX_TOKEN"},
        scorers={"code_tests": "turnwise.ext.sandbox.scoring.code_tests:code_tests"},
        sources=dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code_tests"),
        truths={"code_tests": "turnwise.ext.sandbox.scoring.cases:truth_reader"},
        verbs={"sandbox": "turnwise.ext.sandbox.command"},
        checks={"sandbox": "turnwise.ext.sandbox.command:check"},
        section="turnwise.ext.sandbox.config:SandboxConfig",
    ),
    "servers": Extension(section="turnwise.ext.servers.config:ServersConfig"),
    "sdk_agents": Extension(
        loops={"openai_client": "turnwise.ext.sdk_agents.loop:openai_client"},
        players={"sdk_agents.client": "openai_client"},
        section="turnwise.ext.sdk_agents.config:SdkAgentsConfig",
    ),
    "serving": Extension(verbs={"serve": "turnwise.ext.serving.command"}),
    "sglang": Extension(
        engines={
            "sglang_server": Engine(
                "SGLang servers: started here, in an environment of their own, or attached to.",
                "turnwise.ext.sglang.opener:SglangServers",
                reads=_SERVER,
            )
        }
    ),
    "swe": Extension(
        tools={
            name: f"turnwise.ext.swe.tools:{name}"
            for name in ("bash", "edit", "execute_bash", "finish", "str_replace_editor")
        },
        keys_of_options={"scoring.options.swe_tests": "set TURNWISE_SANDBOX_TOKEN"},
        scorers={"swe_tests": "turnwise.ext.swe.scoring:swe_tests"},
        tasks={"swe": "turnwise.ext.swe.task:TASK"},
        verbs={"swe": "turnwise.ext.swe.command"},
        checks={"swe": "turnwise.ext.swe.command:check"},
        section="turnwise.ext.swe.config:SweConfig",
    ),
    "tinylook": Extension(
        tools={"look": "turnwise.ext.tinylook.look:look"},
        tasks={"tinylook": "turnwise.ext.tinylook:TASK"},
        models={"tiny_vision": "turnwise.ext.tinylook.model"},
    ),
    "trackers": Extension(
        trackers={
            "tensorboard": Named("turnwise.ext.trackers.tensorboard:TensorboardTracker", "Event files.", here=True),
            "wandb": Named("turnwise.ext.trackers.wandb:WandbTracker", "Weights & Biases."),
            "mlflow": Named("turnwise.ext.trackers.mlflow:MlflowTracker", "MLflow."),
        },
        environment={"WANDB_*": "turnwise.ext.trackers.environment"},
        section="turnwise.ext.trackers.config:TrackersConfig",
    ),
    "trl": Extension(
        adapters={
            "scorer": "turnwise.ext.trl.rewards:scorer",
            "batch_scorer": "turnwise.ext.trl.rewards:batch_scorer",
            "tool": "turnwise.ext.trl.tools:tool",
        }
    ),
    "verifiers": Extension(
        tasks={"verifiers:*": "turnwise.ext.verifiers.task:environment_task"}, reaches=("verifiers",)
    ),
    "verl": Extension(
        imports="turnwise.ext.verl.imports",
        names={"BaseInteraction": "turnwise.ext.verl.users:BaseInteraction"},
        loops={"single_turn_agent": "single_turn", "tool_agent": "tool_calling"},
        loop_files={"verl.agents_file": "turnwise.ext.verl.adapters:loops_of_file"},
        user_files={"verl.interactions_file": "turnwise.ext.verl.adapters:users_of_file"},
        scorers={name: f"turnwise.ext.verl.rewards:{name}" for name in ("loop_reward", "verl_default")},
        sources=dict.fromkeys(
            ("math_dapo", "math", "math_dapo_reasoning", "hiyouga/geometry3k", "aime*"), "verl_default"
        ),
        truths={"verl_default": "turnwise.ext.verl.rewards:truth_reader"},
        adapters={
            **{kind: f"turnwise.ext.verl.adapters:{kind}" for kind in ("tool", "tool_module", "conversation")},
            **{kind: f"turnwise.ext.verl.adapters:{kind}" for kind in ("loop", "loop_module", "user")},
            "scorer": "turnwise.ext.verl.rewards:scorer",
            "batch_scorer": "turnwise.ext.verl.rewards:batch_scorer",
            "dataset": "turnwise.ext.verl.datasets:dataset",
        },
        verbs={
            "import-jsonl": "turnwise.ext.verl.import_command",
            "export-jsonl": "turnwise.ext.verl.export_command",
        },
        configs={"verl": "turnwise.ext.verl.translation.translate:compose_foreign"},
        keys="turnwise.ext.verl:keys.yaml",
        section="turnwise.ext.verl.config:VerlConfig",
    ),
    "vision_bench": Extension(
        tasks={name: f"turnwise.ext.vision_bench.tasks:{name.upper()}" for name in ("vstar", "hrbench", "mathvista")},
        scorers={"vision_bench": "turnwise.ext.vision_bench.scoring:vision_bench"},
    ),
    "vllm": Extension(
        engines={
            "vllm": Engine(
                "vLLM in this process; it gets the new weights after each step. Needs vLLM in Turnwise's environment.",
                "turnwise.ext.vllm.opener:VllmHere",
                reads=(*_ENGINES_OF_OTHERS, "servers.cache_at_update"),
            ),
            "vllm_server": Engine(
                "vLLM servers: started here, in an environment of their own, or attached to.",
                "turnwise.ext.vllm.opener:VllmServers",
                reads=(*_SERVER, "engine.model", "servers.transfer", "servers.cache_at_update"),
            ),
        },
        model_variables=("VLLM_MODEL_PATH",),
    ),
    "weights": Extension(verbs={"weights": "turnwise.ext.weights.command"}),
}
