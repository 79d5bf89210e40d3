"""``fabric-kv-plan``, and what plans say about themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fabric_kv.sharding import CacheSpec, KVLayout, Placement, plan_transfer
from fabric_kv.tools.plan import main


def run(capsys, *args):
    status = main(args)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json(capsys):
    args = (
        "--model qwen3-coder-480b --prefill-tp 8 --decode-tp 4 --isl 4096 --page-size 16 --nic-gbps 400 --nics 8 --json"
    )
    status, out, _ = run(capsys, *args.split())
    facts = json.loads(out)
    assert status == 0
    assert facts["bytes_per_token_and_layer"] == {"attention": 4096}
    assert facts["total_bytes"] == 4096 * 62 * 4096
    assert facts["mean_bytes_per_write"] == 4096  # K or V of one head in one page
    assert facts["writes_scattered_pages"] == 62 * 256 * 8 * 2
    assert facts["expected_units"] == {str(rank): 62 * 256 * 4 for rank in range(4)}
    assert facts["prefill"]["nic_bytes"] == [facts["total_bytes"] // 8] * 8
    # Each of the 4 decode ranks has two NICs.
    assert facts["decode"]["nic_bytes"] == [facts["total_bytes"] // 8] * 8
    assert facts["seconds_at_link_speed"] == pytest.approx(facts["total_bytes"] / 8 * 8 / 400e9)


def test_table(capsys):
    status, out, _ = run(capsys, "--model", "deepseek-r1", "--prefill-tp", "8", "--decode-tp", "8", "--explain")
    assert status == 0
    assert "source set 0 of 8" in out
    assert "3 (dp0 pp0 tp3)" in out
    assert "1152" in out
    assert "time at link speed" in out


def test_config_file(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}')
    status, out, _ = run(capsys, "--model", str(path), "--isl", "10", "--json")
    assert status == 0
    assert json.loads(out)["total_bytes"] == 2 * 16 * 2 * 64 * 2  # a page is moved whole
    path.write_text("[1, 2")
    assert run(capsys, "--model", str(path))[0] == 2


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--model", "nobody"], "neither a file nor one of"),
        (["--model", "llama-3.1-8b", "--cached", "3"], "no multiple"),
        (["--model", "llama-3.1-8b", "--prefill-tp", "0"], "tp_size=0"),
        (["--model", "llama-3.1-8b", "--source-set", "1"], "source_set=1"),
        (["--model", "llama-3.1-8b", "--nics", "0"], "must be positive"),
        (["--model", "llama-3.1-8b", "--page-size", "0"], "page_tokens=0"),
        (["--model", "llama-3.1-8b", "--isl", "-1"], "num_tokens=-1"),
    ],
)
def test_refusals(capsys, args, match):
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert match in err


def test_more_ranks_than_nics(capsys):
    status, out, _ = run(
        capsys, "--model", "llama-3.1-8b", "--prefill-tp", "8", "--decode-pp", "3", "--nics", "2", "--json"
    )
    facts = json.loads(out)
    assert status == 0
    for side in ("prefill", "decode"):
        assert sum(facts[side]["nic_bytes"]) == facts["total_bytes"]


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(8, 8), (8, 4), (1, 4)])
@pytest.mark.parametrize("packing", ["adjacent", "separate"])
def test_cost_is_what_writes_do(src_tp, dst_tp, packing):
    layout = KVLayout.attention(num_layers=3, kv_heads=8, head_dim=4, page_tokens=8)
    plan = plan_transfer(*(CacheSpec.dense(layout, Placement(tp_size=tp), 64, packing) for tp in (src_tp, dst_tp)))
    cost = plan.cost(100, cached=16)
    page_map = plan.page_map(0, 0, 100, cached=16, final=True)
    pages = np.arange(13)
    writes = [
        write
        for pair in plan.pairs(0)
        for layer in range(3)
        for write in plan.writes(*pair, layer, page_map, pages, pages)
    ]
    assert cost.max_writes == sum(write.rows * len(write.src_pages) for write in writes)
    assert cost.num_bytes == sum(write.rows * len(write.src_pages) * write.nbytes for write in writes)
    assert cost.num_bytes == 3 * 11 * layout.groups[0].page_bytes
    assert sum(cost.units.values()) * plan.unit_bytes == cost.num_bytes
    # On contiguous page numbers: one write a layer where whole pages move, if K and V are adjacent, else two.
    if src_tp == dst_tp:
        assert cost.min_writes == 3 * src_tp * (1 if packing == "adjacent" else 2)


def test_explain_names_shards():
    layout = KVLayout.attention(num_layers=4, kv_heads=3, head_dim=64, page_tokens=16, dtype="float16")
    plan = plan_transfer(
        CacheSpec.dense(layout, Placement(tp_size=3)), CacheSpec.dense(layout, Placement(pp_layers=(1, 3)))
    )
    lines = plan.explain().splitlines()
    assert lines[0].startswith("prefill TP3 PP1 DP1 -> decode TP1 PP2 DP1")
    assert " ".join(lines[3].split()) == "0 (dp0 pp0 tp0) 1 (dp0 pp1 tp0) attention 1-3 0 of 3 2 x 2048 B"


def test_the_example_in_the_documentation_runs(capsys):
    text = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/sharding.md", "exec"), {})
    assert "source set 0 of 1" in capsys.readouterr().out
