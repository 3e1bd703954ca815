"""The peer "plain PyTorch": a loop around transformers' Llama as its users write it, with SDPA, clipping and AdamW.

Both of torch's fast AdamW implementations are tried first, in turns, and the quicker one is measured.
"""

import argparse
import contextlib
import time

import torch
from result import Result
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    options = argparse.ArgumentParser()
    for name in (
        "steps",
        "skip",
        "threads",
        "batch",
        "seq_len",
        "vocab",
        "dim",
        "hidden",
        "layers",
        "heads",
        "kv_heads",
    ):
        options.add_argument(f"--{name}", type=int, required=True)
    options.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    o = options.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=o.vocab,
        hidden_size=o.dim,
        intermediate_size=o.hidden,
        num_hidden_layers=o.layers,
        num_attention_heads=o.heads,
        num_key_value_heads=o.kv_heads,
        max_position_embeddings=o.seq_len,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    batches = [torch.randint(o.vocab, (o.batch, o.seq_len)) for _ in range(8)]
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **{name: True})
        for name in ("fused", "foreach")
    }

    def step(index: int, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = batches[index % len(batches)]
        autocast = torch.autocast("cpu", torch.bfloat16) if o.dtype == "bf16" else contextlib.nullcontext()
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - wall, time.process_time() - cpu

    step(0, optimizers["fused"])
    trials: dict[str, list[float]] = {name: [] for name in optimizers}
    for index in range(max(2, o.skip)):
        for name, optimizer in optimizers.items():
            trials[name].append(step(index, optimizer)[0])
    best = min(trials, key=lambda name: min(trials[name]))
    times = [step(index, optimizers[best]) for index in range(o.steps)]
    wall, cpu = (list(column) for column in zip(*times, strict=True))
    Result(o.batch * o.seq_len, wall, cpu, f"{best} AdamW").emit()


if __name__ == "__main__":
    main()
