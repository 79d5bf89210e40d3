"""Prefills a real language model on one side and decodes it on another, page by page over libfabric.

>>> scripts/demo                                    # prefill TP 3 -> decode TP 1 over tcp
>>> scripts/demo --prefill-tp 1 --decode-tp 3 --provider shm --prompt "Why is the sky blue?"
>>> scripts/demo --prompt "Who was Ada Lovelace?" --prompt "Name three rivers."           # both at once
>>> scripts/demo --poison                           # moves zeros instead: every check must fail

This process has decode's engine, a child has prefill's; every tensor-parallel rank is a process of its own, whose cache
its engine's process maps. Exit code 0 only if every page's checksum, the hidden state and all tokens equal those of the
same model run in one process.
"""

from __future__ import annotations

import os

# Before NumPy is loaded: two BLAS threads per process fight over few cores, and one is as fast for this small model.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from decode_node import DecodeNode, Fetched
from prefill_node import Options, serve
from ranks import ANSWER_S, child
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from smollm2 import Llama, MissingWeightsError, ReferenceRun, Tokenizer, Weights, load_checkpoint, reference_run

from fabric_kv import FabricKVError
from fabric_kv.memory import BufferServer, HostBuffer

PROMPT = """Read this report, then answer the question below it.

The harbour of Eastmouth has two cranes, a short railway and a warehouse with red doors. Every morning the first \
crane lifts containers from the ships and puts them on the railway, while the second one loads the empty trains that \
come back. In spring a storm broke the arm of the second crane. For eleven days the harbour had to choose: unload \
the ships, or load the trains. The harbour master, a quiet woman called Ines, drew a plan on the back of an envelope. \
Ships were unloaded at night, when no trains ran, and trains were loaded by day, when no ships could enter because of \
the tide. Nobody had to wait for long, and not a single container was lost. When the new arm came, on a slow barge \
from the north, the workers asked her to keep the plan, since it had made their days calmer. She did, but she let the \
second crane help at night when there were many ships, and she kept the envelope in a frame above her desk.

Question: When were the ships unloaded, and when were the trains loaded? Answer in one sentence."""


class PrefillError(RuntimeError):
    """What the prefill process says that has gone wrong there."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prefill-tp", type=int, choices=(1, 3), default=3, help="KV-head shards of prefill (3)")
    parser.add_argument("--decode-tp", type=int, choices=(1, 3), default=1, help="KV-head shards of decode (1)")
    parser.add_argument("--provider", default="tcp", help="libfabric provider: tcp, shm, net, verbs, efa ... (tcp)")
    parser.add_argument("--nic", action="append", help="NIC name or IP address (127.0.0.1 for tcp and net)")
    parser.add_argument("--prompt", action="append", help="what to ask the model; several are served at once")
    parser.add_argument("--max-new-tokens", type=int, default=60, help="tokens to generate (60)")
    parser.add_argument("--chunk-tokens", type=int, default=100, help="prompt tokens per forward step (100)")
    parser.add_argument("--poison", action="store_true", help="move zeros instead: must end with exit code 1")
    args = parser.parse_args()
    if args.max_new_tokens < 1 or args.chunk_tokens < 1:
        parser.error("--max-new-tokens and --chunk-tokens must be at least 1")
    return args


def main() -> int:
    args, console = parse_args(), Console()
    try:
        return run(args, console)
    except (FabricKVError, MissingWeightsError, PrefillError) as error:
        console.print(f"[bold red]failed:[/] {type(error).__name__}: {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("\n[bold red]interrupted[/]")
        return 130


def run(args: argparse.Namespace, console: Console) -> int:
    console.print(f"loading the model for TP {args.prefill_tp} in prefill and TP {args.decode_tp} in decode")
    checkpoint = load_checkpoint()
    config, tokenizer = checkpoint.config, Tokenizer(checkpoint.metadata)
    prompts = [tokenizer.encode_chat(text) for text in args.prompt or [PROMPT]]
    weights_path = f"@fabric_kv-demo-{os.getpid()}-weights"
    loopback = ["127.0.0.1"] if args.provider in ("tcp", "net") else []
    options = Options(
        config,
        weights_path,
        args.provider,
        args.nic or loopback,
        args.prefill_tp,
        args.decode_tp,
        args.chunk_tokens,
        len(prompts),
        args.poison,
    )
    # Read once: the ranks of both sides map it.
    buffer = shared(checkpoint.weights.arrays())
    del checkpoint
    with (
        BufferServer(weights_path, {"weights": buffer}, label="the demo", timeout_s=ANSWER_S),
        child("prefill", serve, options) as (prefill_pid, pipe),
        DecodeNode(options) as node,
    ):
        address, prefill_ranks = receive(pipe)
        console.print(
            f"prefill: engine in process {prefill_pid}, ranks in {listed(prefill_ranks)}\n"
            f"decode: engine in process {os.getpid()}, ranks in {listed(node.ranks.pids)}",
            highlight=False,
        )
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
        with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
            task = bar.add_task(f"{sum(map(len, prompts)) - len(prompts)} tokens: pages arriving")
            fetched = node.fetch(
                address,
                [prompt[:-1] for prompt in prompts],
                args.max_new_tokens + 1,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
        answers: list[list[int]] = []
        for prompt, each in zip(prompts, fetched, strict=True):
            answers.append([])
            console.print()
            for token in node.generate(prompt[-1], each, args.max_new_tokens, tokenizer.stop_token):
                answers[-1].append(token)
                if token != tokenizer.stop_token:
                    console.print(tokenizer.decode([token]), end="", markup=False, highlight=False)
            console.print()
        console.print()
        report = receive(pipe)
        console.print(table(node.opened(), fetched, report, options))
    console.print("checking against one process ...")
    model, good = Llama(config, Weights.from_flat(config, buffer.array.view(np.float32))), []
    for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        reference = reference_run(
            model,
            prompt,
            args.max_new_tokens,
            prefill_tp=options.prefill_tp,
            decode_tp=options.decode_tp,
            chunk_tokens=options.chunk_tokens,
            stop=tokenizer.stop_token,
        )
        good.append(check(console, fetched[number], report["requests"][str(number)], reference, tokens))
    return 0 if all(good) else 1


def shared(arrays: Sequence[Any]) -> HostBuffer:
    """Copy arrays into memory that other processes can map, one after the other."""
    buffer = HostBuffer.allocate(sum(array.nbytes for array in arrays))
    np.concatenate([array.reshape(-1) for array in arrays], out=np.asarray(buffer).view(np.float32))
    return buffer


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def receive(pipe: Any) -> Any:
    """What the prefill process says next; PrefillError if that is an error, or it is silent or gone."""
    try:
        said = pipe.recv() if pipe.poll(ANSWER_S) else {"error": f"it has said nothing for {ANSWER_S} s"}
    except (EOFError, OSError):
        said = {"error": "its process has ended"}
    if isinstance(said, dict) and "error" in said:
        raise PrefillError(said["error"])
    return said


def table(opened: dict[str, Any], fetched: Sequence[Fetched], report: dict[str, Any], options: Options) -> Table:
    layers = fetched[0].sums.shape[0]
    pages = sum(each.sums.shape[2] for each in fetched)
    lengths = " + ".join(str(each.num_tokens) for each in fetched)
    tails_s = [each.result.ready_s - report["requests"][each.result.request_id]["last_layer_s"] for each in fetched]
    busy_s = report["busy_ns"] / 1e9
    rows = {
        "provider / fabric / domain": f"{opened['provider']} / {opened['fabric']} / {opened['domain']}",
        "tensor parallelism": f"{options.prefill_tp} -> {options.decode_tp}",
        "prompt": f"{lengths} tokens in chunks of {options.chunk_tokens}",
        "pages": f"{pages} x {layers} layers x K and V",
        "writes": f"{report['ops']}",
        "bytes": f"{report['bytes']}",
        "bytes per write": f"{report['bytes'] / report['ops']:.0f}",
        "while writing": f"{report['bytes'] / busy_s / 1e9:.2f} GB/s",
        "last layer's write to ready": f"{max(tails_s) * 1e3:.2f} ms",
        "hidden behind compute": f"{100 * report['hidden_busy_ns'] / report['busy_ns']:.1f} % of {busy_s * 1e3:.0f} ms",
        "prefill compute": f"{report['compute_s']:.2f} s",
    }
    out = Table(show_header=False, title="transfer")
    for name, value in rows.items():
        out.add_row(name, value)
    return out


def check(
    console: Console, fetched: Fetched, sender: dict[str, Any], reference: ReferenceRun, tokens: list[int]
) -> bool:
    """Compare with the sender and with the reference; prints one line a check."""
    sent, tail = sender["checksums"], fetched.result.tail
    assert tail is not None
    checks = {
        f"{fetched.sums.size} page checksums equal the sender's": bool((fetched.sums == sent).all()),
        "page checksums equal the reference's": bool((fetched.sums == reference.checksums).all()),
        "hidden state equals the reference's": bool((tail["hidden"] == reference.hidden).all()),
        f"{len(tokens)} tokens equal the reference's": tokens == reference.tokens,
    }
    for what, good in checks.items():
        console.print(f"[{'green' if good else 'bold red'}]{'OK' if good else 'WRONG':5s}[/] {what}", highlight=False)
    return all(checks.values())


if __name__ == "__main__":
    sys.exit(main())
