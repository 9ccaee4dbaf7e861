"""The preflight: each check passes on what is right and fails on what is wrong, without loading a model."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from turnwise.data.task_config import compose
from turnwise.reports.checks.run_checks import example_arguments
from turnwise.reports.preflight import Outcome, Report, preflight

REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(*overrides: str) -> Report:
    return preflight(compose(["eval.samples=4", *overrides]))


def outcome(report: Report, check: str) -> set[Outcome]:
    return {finding.outcome for finding in report.findings if finding.check.startswith(check)}


def errors(report: Report) -> str:
    return " | ".join(f"{f.check}: {f.text}" for f in report.findings if f.outcome is Outcome.ERROR)


def test_the_default_run_passes_every_check_and_the_plan_is_told() -> None:
    report = run()
    assert report.passed, errors(report)
    checks = {finding.check for finding in report.findings}
    assert {"unread keys", "dataset", "names and plug-ins", "chat template", "tool schemas", "forecast"} <= checks
    assert "scripted rollout of arithmetic" in checks
    for word in ("tool_calling", "calculate, python", "code_verify", "gsm8k"):
        assert word in report.plan


def test_no_model_code_is_imported() -> None:
    import subprocess

    code = (
        "import sys\nfrom turnwise.data.task_config import compose\nfrom turnwise.reports.preflight import preflight\n"
        "assert preflight(compose(['eval.samples=2'])).passed\n"
        "loaded = {'turnwise.engines.model.decoder', 'turnwise.engines.samplers.cpu.torch_cpu'} & set(sys.modules)\nassert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_key_nobody_reads_is_an_error() -> None:
    report = run("engine.base_url=http://127.0.0.1:1/v1")
    assert not report.passed and "engine.base_url" in errors(report)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rollout.tools=[calculat]", "did you mean 'calculate'?"),
        ("rollout.interaction=code_verfy", "did you mean 'code_verify'?"),
        ("scoring.scorers={arithmetic: nothing}", "unknown scorer"),
        ("model.path=tinny", "did you mean 'tiny'?"),
    ],
)
def test_names_nobody_knows_are_errors(override: str, text: str) -> None:
    report = run(override)
    assert not report.passed and text in errors(report)


def test_a_template_that_rewrites_history_is_refused_or_handled(tmp_path: Path) -> None:
    template = tmp_path / "rewriting.jinja"
    template.write_text(REWRITING)
    refused = run(f"chat.template={template}", "rollout.tools=[]", "chat.history=refuse")
    assert not refused.passed and "rewrites history" in errors(refused)
    handled = run(f"chat.template={template}", "rollout.tools=[]", "chat.history=verbatim")
    assert Outcome.WARNING in outcome(handled, "chat template") and handled.passed, errors(handled)
    for mode in ((), ("chat.history=segment",)):
        followed = run(f"chat.template={template}", "rollout.tools=[]", *mode)
        assert followed.passed, errors(followed)
        assert "new sequence" in " ".join(found.text for found in followed.findings)


def test_a_template_that_hides_the_tools_is_an_error(tmp_path: Path) -> None:
    template = tmp_path / "toolless.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    report = run(f"chat.template={template}")
    assert "does not show 'calculate'" in errors(report)
    assert run(f"chat.template={template}", "rollout.tools=[]").passed


def test_every_row_mistake_is_reported_with_its_place(tmp_path: Path) -> None:
    good = {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
    }
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in (good, {**good, "prompt": 5}, {**good, "agent_nmae": "x"})))
    report = run(f"data.eval_files={file}")
    assert "rows.jsonl row 1" in errors(report) and "agent_nmae" in errors(report)


def test_one_scripted_rollout_per_data_source(tmp_path: Path) -> None:
    rows = [
        {"data_source": source, "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
        for source in ("arithmetic", "openai/gsm8k")
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    report = run(f"data.eval_files={file}")
    assert report.passed, errors(report)
    played = [finding.check for finding in report.findings if finding.check.startswith("scripted rollout")]
    assert sorted(played) == ["scripted rollout of arithmetic", "scripted rollout of openai/gsm8k"]


def test_a_user_that_fails_in_the_scripted_rollout_is_found(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(
        "from turnwise import BaseInteraction\n"
        "class Broken(BaseInteraction):\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        "        return 'not a tuple'\n"
    )
    report = run(f"rollout.interaction={tmp_path}/users.py:Broken")
    assert "generate_response returned" in errors(report)


def test_the_check_runs_no_tool(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        "from pathlib import Path\n"
        "async def touch(name: str) -> str:\n"
        '    """Make a file."""\n'
        f"    Path({str(tmp_path)!r}, 'touched').touch()\n"
        "    return 'ok'\n"
    )
    assert run(f"rollout.tools=['{tmp_path}/tools.py:touch']").passed
    assert not (tmp_path / "touched").exists()


def test_an_endpoint_is_checked_as_far_as_it_can_be() -> None:
    class Serving(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "served"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Serving) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"engine.base_url=http://127.0.0.1:{server.server_port}/v1"
        report = run("engine=openai", url)
        other = run("engine=openai", url, "engine.model=sirved")
        server.shutdown()
    assert report.passed and Outcome.WARNING in outcome(report, "chat template"), errors(report)
    assert outcome(report, "endpoint") == {Outcome.OK}
    assert outcome(report, "scripted rollout") == outcome(report, "scorer of arithmetic") == {Outcome.OK}
    assert "did you mean 'served'?" in errors(other)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [(("engine.base_url=http://127.0.0.1:9/v1",), "cannot be used"), ((), "engine=openai needs engine.base_url")],
)
def test_an_endpoint_that_is_not_there_is_an_error(overrides: tuple[str, ...], text: str) -> None:
    assert text in errors(run("engine=openai", *overrides))


def test_example_arguments_fit_their_schema() -> None:
    import jsonschema

    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"}, "b": {"type": "integer"}, "c": {"enum": ["x", "y"]}, "d": {"type": "array"}, "e": {}
        },
        "required": ["a", "b", "c", "d"],
    }  # fmt: skip
    made = example_arguments(schema)
    jsonschema.validate(made, schema)
    assert set(made) == {"a", "b", "c", "d"}
