"""``fabric-kv-bench --model``: requests through the real messenger between processes, and what must be noticed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fabric_kv.bench.files import read_report
from fabric_kv.bench.main import main
from fabric_kv.bench.model import Cache

from .conftest import Provider
from .fabrics import LONG
from .test_bench import children, read_until, started, wait_until_gone

SMALL = ["--loopback", "--model", "smollm2-135m", "--isl", "72", "--verify"]


@pytest.mark.parametrize(
    ("provider", "options"),
    [
        ("tcp", ["--prefill-tp", "3", "--chunk", "32", "--layerwise", "-n", "3", "--compute-ms-per-layer", "0.1"]),
        ("tcp", ["--decoders", "2", "--qps", "200", "--layerwise", "-n", "6"]),
        ("shm", ["--decode-tp", "3", "-n", "3"]),
    ],
    indirect=["provider"],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_requests_are_served_and_right(
    provider: Provider, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    status = main([*SMALL, "--provider", provider.name, *options, "--json", str(path)])
    captured = capsys.readouterr()
    assert status == 0, captured.out + captured.err
    assert "# Wrong pages : 0 OK" in captured.out
    report = read_report(path)
    assert report.model
    figures = report.messenger
    assert figures
    layout = report.model.layout
    tokens_bytes = layout.num_layers * layout.groups[0].page_bytes * 5  # 72 tokens are four pages and a half
    assert figures["bytes_per_request"] == tokens_bytes
    assert figures["requests"] == int(options[options.index("-n") + 1]) * report.num_peers
    assert (figures["efficiency"] is None) == ("--layerwise" not in options)
    assert 0 <= figures["hidden_share"] <= 1
    for name in "ttft_penalty_ms", "latency_ms", "prefill_to_ready_ms":
        assert figures[name]["p50"] <= figures[name]["max"]
        assert f"p50 {figures[name]['p50']:.3f}" in captured.out
    clock_error_ms = figures["clock_error_us"] / 1e3
    assert figures["prefill_to_ready_ms"]["avg"] >= figures["compute_ms"] - clock_error_ms


QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 20,
}


@pytest.mark.parametrize("provider", ["tcp"], indirect=True)
@pytest.mark.parametrize(
    ("config", "slots_and_pages"),
    # Of 72 tokens five pages in each layer with full attention; two in one with the window, three slots of states.
    [(QWEN3_NEXT, {"attention": 1 * 5, "state": 3 * 1}), (GPT_OSS, {"attention": 2 * 5, "sliding": 2 * 2})],
    ids=["states", "windows"],
)
def test_states_and_windows_are_served(
    provider: Provider,
    config: dict[str, object],
    slots_and_pages: dict[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, path = tmp_path / "config.json", tmp_path / "out.json"
    model.write_text(json.dumps(config))
    options = ["--model", str(model), "--isl", "72", "--prefill-tp", "2", "--chunk", "16", "--layerwise", "-n", "3"]
    status = main(["--loopback", "--provider", "tcp", *options, "--verify", "--json", str(path)])
    captured = capsys.readouterr()
    assert status == 0, captured.out + captured.err
    assert "# Wrong pages : 0 OK" in captured.out
    report = read_report(path)
    assert report.model
    assert report.messenger
    groups = report.model.layout.groups
    assert {group.name for group in groups} == slots_and_pages.keys()
    sent = sum(group.page_bytes * slots_and_pages[group.name] for group in groups)
    assert report.messenger["bytes_per_request"] == sent


@pytest.mark.parametrize("provider", ["tcp"], indirect=True)
def test_stale_pages_of_a_request_are_noticed(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stamp = Cache.stamp

    def once(cache: Cache, iteration: int) -> None:
        if iteration == 0:
            stamp(cache, iteration)

    monkeypatch.setattr(Cache, "stamp", once)
    assert main([*SMALL, "--provider", "tcp", "-n", "2"]) == 1
    # Two rounds with fresh bytes, two page sets, 30 layers, K and V, five pages.
    assert "# Wrong pages : 1200 FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("provider", ["shm"], indirect=True)
def test_a_killed_decode_side_takes_the_other_along(provider: Provider, shm_of: Callable[..., set[str]]) -> None:
    endless = ["-n", "100000", "--compute-ms-per-layer", "0.1"]
    with started(*SMALL, "--provider", "shm", *endless) as prefill:
        read_until(prefill, "# GB/s")
        (decode,) = children(prefill.pid)
        os.kill(decode, signal.SIGKILL)
        output, errors = prefill.communicate(timeout=LONG)
        wait_until_gone(decode)
        assert prefill.returncode == 1
        assert "has gone without a word" in errors
        assert "# Ended early" in output
        assert not shm_of(prefill.pid, decode)
