"""Passwords in addresses: refused wherever an address can be written, and shown or kept nowhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise import configure
from turnwise.commands.cli import main
from turnwise.config.check import check_config
from turnwise.config.knobs import knobs_of
from turnwise.config.sections import full_config
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.errors.address_passwords import has_userinfo, without_userinfo
from turnwise.ext.judge.environment import judge_addresses
from turnwise.ext.judge.settings import JudgeSettings
from turnwise.ext.llm_user.user import LlmUserSettings
from turnwise.ext.mcp.config import read_entry
from turnwise.ext.research.tools.retrieve import RetrieveTool
from turnwise.ext.trackers.mlflow import MlflowTracker
from turnwise.ext.verl.stand_ins.builtin_tools import SandboxFusionTool, SearchTool
from turnwise.ext.verl.stand_ins.tools import OpenAIFunctionToolSchema
from turnwise.storage.run_dir import RunDir

PASSWORD = "hunter2"
WITH = [
    f"http://me:{PASSWORD}@127.0.0.1:9/v1", f"https://{PASSWORD}@host", f"HTTP://me:{PASSWORD}@host/a?b=c", f"http://:{PASSWORD}@host",
    f"http://me:{PASSWORD}%40x@host", f"http://me:a@{PASSWORD}@host", f"http:\\\\me:{PASSWORD}@host",
]  # fmt: skip
KNOBS = {
    "engine.base_url=URL": "OPENAI_API_KEY", "servers.addresses=[URL]": "TURNWISE_ENGINE_KEY", "sandbox.url=URL": "TURNWISE_SANDBOX_TOKEN",
    "swe.url=URL": "TURNWISE_SANDBOX_TOKEN", "scoring.url=URL": "TURNWISE_REWARD_TOKEN", "ray.address=URL": "environment",
    "rollout.agent_options={url: URL}": "TURNWISE_ENV_TOKEN", "rollout.interaction_kwargs={base_url: URL}": "api_key_env",
    "rollout.interaction_kwargs={base_url: 'http://h/v1', judge: {base_urls: [URL]}}": "api_key_env",
    "scoring.options={judge: {base_urls: [URL]}}": "api_key_env", "scoring.options={tapo: {judge_options: {base_urls: URL}}}": "api_key_env",
    "scoring.options={code_tests: {url: URL}}": "TURNWISE_SANDBOX_TOKEN", "scoring.options={swe_tests: {url: URL}}": "TURNWISE_SANDBOX_TOKEN",
    "model.path=URL": "HF_TOKEN", "data.eval_files=[URL]": "HF_TOKEN", "data.images_from=URL": "HF_TOKEN", "servers.options=[URL]": "environment",
    "rollout.tools=[URL]": "environment", "trackers.project=URL": "environment",
}  # fmt: skip


@pytest.mark.parametrize("url", WITH)
def test_what_has_a_name_or_a_password(url: str) -> None:
    assert has_userinfo(url) and PASSWORD not in without_userinfo(f"no answer from {url}: 500")
    assert PASSWORD not in without_userinfo(url, alone=True)


def test_what_has_none() -> None:
    for url in ("http://127.0.0.1:8000/v1", "https://host/a@b", "hf://datasets/owner/name@main", "ssh://git@host/x", "me@host",
                "file:///a@b", "a:b@c", "http://[::1]:9/x"):  # fmt: skip
        assert not has_userinfo(url), url
    assert without_userinfo("hf://datasets/owner/name@main is not here") == "hf://datasets/owner/name@main is not here"
    assert has_userinfo(f"postgresql://me:{PASSWORD}@host/db")


@pytest.mark.parametrize("knob", KNOBS)
def test_no_knob_takes_one(knob: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    override = knob.replace("URL", f"'{WITH[0]}'")
    with pytest.raises(ConfigError, match="no name or password in an address") as refused:
        configure(override)
    assert PASSWORD not in str(refused.value) and KNOBS[knob] in str(refused.value)
    assert knob.partition("=")[0].partition("{")[0] in str(refused.value)
    for command in ("check", "eval", "train"):
        assert main([command, override]) == 2
        told = capsys.readouterr()
        assert PASSWORD not in told.out + told.err and KNOBS[knob] in told.err
    assert not list(tmp_path.rglob("*"))


def test_every_knob_that_holds_texts_is_looked_at() -> None:
    """Also those that are added later, and however deep the text lies."""
    for key, knob in knobs_of(full_config()).items():
        if knob.hint is not str and not knob.is_dict and not knob.is_list:
            continue
        config = full_config()()
        section, _, name = key.rpartition(".")
        value: Any = [WITH[0]] if knob.is_list else {"a": WITH[0]} if knob.is_dict else WITH[0]
        setattr(getattr(config, section) if section else config, name, value)
        with pytest.raises(ConfigError) as refused:
            check_config(config)
        assert PASSWORD not in str(refused.value) and key in str(refused.value)


@pytest.mark.parametrize("text", [f"http://me:{PASSWORD}/x@host", f"http://me:{PASSWORD}@[host", f"ftp://me:{PASSWORD}@host", f"http://me:{PASSWORD} x@host"])  # fmt: skip
def test_a_wrong_address_is_not_shown_with_its_password(text: str) -> None:
    for override in (f"engine.base_url='{text}'", f"engine.base_url={text}", f"scoring.url='{text}'", f"enginebase_url={text}"):  # fmt: skip
        with pytest.raises(TurnwiseError) as refused:
            configure(override)
        assert PASSWORD not in str(refused.value)


def test_addresses_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = WITH[0]
    monkeypatch.setenv("LLM_AS_A_JUDGE_BASE", f"http://a/v1,{url}")
    monkeypatch.setenv("TURNWISE_RETRIEVAL_URL", url)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    servers = tmp_path / "servers.json"
    servers.write_text(json.dumps({"mcpServers": {"shop": {"url": url}}}))
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}}})  # fmt: skip
    for work in (
        judge_addresses,
        lambda: RetrieveTool().address,
        lambda: SearchTool({"retrieval_service_url": url}, schema),
        lambda: SandboxFusionTool({"sandbox_fusion_url": url}, schema),
        lambda: JudgeSettings.of({"base_urls": [url]}),
        lambda: LlmUserSettings.of({"base_url": url}),
        lambda: read_entry({"mcp": {"url": url}}, None),
        lambda: read_entry({"mcp": {"mcp_servers_config_path": str(servers)}}, None),
    ):
        with pytest.raises(TurnwiseError, match="password") as refused:
            work()  # type: ignore[no-untyped-call]
        assert PASSWORD not in str(refused.value)


def test_mlflow_is_reached_with_variables_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", WITH[0])
    with pytest.raises(TurnwiseError, match="MLFLOW_TRACKING_PASSWORD"):
        MlflowTracker("x").start(RunDir(tmp_path), {}, resumed_at=0)
