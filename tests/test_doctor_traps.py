"""Known traps of a machine, each set once: doctor finds it and says what to do."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_medusa.doctor import installation, machine
from vllm_medusa.doctor.finding import Finding
from vllm_medusa.doctor.pair import check_pair

CORES = len(os.sched_getaffinity(0))


def unset(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """An environment without the variables that doctor looks at, but for these."""
    known = "VLLM_PLUGINS VLLM_USE_V2_MODEL_RUNNER OMP_NUM_THREADS VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_KVCACHE_SPACE CXX"
    for name in known.split():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


TRAPS: list[tuple[Callable[[], Finding], dict[str, str], str, str, str]] = [
    (installation.check_plugin, {}, "ok", "vllm_medusa.plugin:register", ""),
    (installation.check_plugin, {"VLLM_PLUGINS": "a,b"}, "bad", "'a,b' keeps it", "a,b,medusa,medusa_wheel_name"),
    (installation.check_plugin, {"VLLM_PLUGINS": ""}, "bad", "keeps it from loading", "VLLM_PLUGINS=medusa,"),
    (installation.check_plugin, {"VLLM_PLUGINS": "medusa,medusa_wheel_name"}, "ok", "entry point", ""),
    (installation.check_model_runner, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "bad", "V1", "unset"),
    (machine.check_threads, {"OMP_NUM_THREADS": "9999"}, "note", "9999", f"OMP_NUM_THREADS={CORES}"),
    (machine.check_threads, {"OMP_NUM_THREADS": "many"}, "note", "'many' is no number", "unset"),
    (machine.check_threads, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}, "ok", "1 on", ""),
    (machine.check_kv_cache, {}, "note", "92 %", "VLLM_CPU_KVCACHE_SPACE="),
    (machine.check_kv_cache, {"VLLM_CPU_KVCACHE_SPACE": "1"}, "ok", "1 GiB", ""),
    (machine.check_kv_cache, {"VLLM_CPU_KVCACHE_SPACE": "99999"}, "bad", "are free", "VLLM_CPU_KVCACHE_SPACE="),
    (machine.check_kv_cache, {"VLLM_CPU_KVCACHE_SPACE": "4g"}, "bad", "'4g'", "VLLM_CPU_KVCACHE_SPACE="),
    (machine.check_compiler, {"CXX": "no-such-compiler"}, "note", "no-such-compiler", "correct CXX"),
    (machine.check_compiler, {"PATH": "/nowhere"}, "note", "no C++ compiler", "install g++"),
    (machine.check_caches, {"TORCH_EXTENSIONS_DIR": "/dev/null/x"}, "note", "kernels", "TORCH_EXTENSIONS_DIR"),
    (machine.check_caches, {"VLLM_CACHE_ROOT": "/dev/null/x"}, "note", "models", "VLLM_CACHE_ROOT"),
]


@pytest.mark.parametrize(("check", "variables", "state", "detail", "advice"), TRAPS)
def test_each_trap_is_found(
    check: Callable[[], Finding],
    variables: dict[str, str],
    state: str,
    detail: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unset(monkeypatch, **variables)
    found = check()
    assert found.state == state and detail in found.detail and advice in found.advice, found
    assert bool(found.advice) == (state != "ok")


@pytest.mark.parametrize(
    "error", [None, RuntimeError("operator torchvision::nms does not exist"), ModuleNotFoundError()]
)
def test_torchvision(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        assert name == "torchvision"
        if error is not None:
            raise error

    monkeypatch.setattr(installation, "importlib", types.SimpleNamespace(import_module=load))
    found = installation.check_torchvision()
    broken = isinstance(error, RuntimeError)
    assert found.state == ("bad" if broken else "ok") and ("pip uninstall torchvision" in found.advice) == broken


@pytest.mark.parametrize(
    ("variables", "detail", "advice"),
    [
        ({"TORCH_EXTENSIONS_DIR": "/dev/null/x"}, "/dev/null/x", "TORCH_EXTENSIONS_DIR"),
        ({"TORCH_EXTENSIONS_DIR": "/proc/nowhere"}, "/proc/nowhere", "TORCH_EXTENSIONS_DIR"),
        ({"PATH": "/nowhere"}, "no C++ compiler", "install g++"),
        ({"CXX": "BROKEN"}, "compiler failed: no such option", "name another"),
    ],
)
def test_why_the_kernel_is_missing(
    variables: dict[str, str], detail: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_medusa.attention import native

    broken = tmp_path / "compiler"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such option >&2; exit 1\n')
    broken.chmod(0o755)
    unset(monkeypatch, TORCH_EXTENSIONS_DIR=str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("BROKEN", str(broken)))
    native.load_kernel.cache_clear()
    try:
        found = machine.check_kernel()
    finally:
        native.load_kernel.cache_clear()  # the next one looks again, in the usual place
    assert found.state == "note" and detail in found.detail and advice in found.advice, found


def test_heads_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled heads alone; a model that they fit, one that they do not, one that is none; heads that are none."""
    unset(monkeypatch, VLLM_MEDUSA_CACHE=str(tmp_path / "none"), HF_HUB_OFFLINE="1")
    monkeypatch.delenv("VLLM_MEDUSA_MODEL", raising=False)
    assert [found.state for found in check_pair(None, None)] == ["ok", "ok"]
    (tmp_path / "none").mkdir()
    for config, state, says in (
        ({"hidden_size": 576, "vocab_size": 49152}, "ok", "the heads fit"),
        ({"text_config": {"hidden_size": 576, "vocab_size": 49152}}, "ok", "the heads fit"),
        ({"hidden_size": 512, "vocab_size": 49152}, "bad", "hidden_size=576"),
        ({"hidden_size": 576, "vocab_size": 32000}, "bad", "vocab_size=49152"),
        ({"hidden_size": "576"}, "bad", "gives no hidden_size"),
        ([1], "bad", "one JSON object"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        heads, model = check_pair(str(tmp_path), None)
        assert heads.state == "ok" and (model.state, says in model.detail) == (state, True), model
    (heads,) = check_pair(None, str(tmp_path))
    assert heads.state == "bad" and "config.json" in heads.detail
    assert [found.state for found in check_pair("../nowhere", None)] == ["ok", "bad"]
