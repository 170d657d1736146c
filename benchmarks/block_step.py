"""One training step of a DFlash draft on random features: time, tokens per second, peak memory.

    python benchmarks/block_step.py --device cuda --hidden 4096 --vocab 151936 --length 3072 --batch 4 --anchors 512

Default sizes are those of a draft for Qwen3-8B. Features never leave memory, so this is the ceiling of a trainer step
without its optimizer.
"""

import argparse
import time

import torch

from specfleet.config.models import DFlashSection
from specfleet.drafts.dflash import DFlashDraft
from specfleet.trainer.strategies.dflash import DFlashStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--loss", default="ce", choices=["ce", "dpace"])
    for name, value in {
        "hidden": 4096, "intermediate": 12288, "heads": 32, "kv-heads": 8, "head-dim": 128, "vocab": 151936, "layers": 5,
        "block": 16, "length": 3072, "batch": 1, "anchors": 512, "window": 0, "chunk-blocks": 128, "steps": 5,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    strategy = _strategy(args, device, dtype)
    samples = [_sample(args, index) for index in range(args.batch)]
    batch = strategy.collate(samples)
    for step in range(args.steps + 2):
        if step == 2:  # the first two warm up
            _sync(device, reset=True)
            start = time.perf_counter()
        prepared = strategy.prepare(dict(batch))
        objective = strategy.objective(prepared)
        (objective.numerators["ce"] / prepared.denominators["ce"]).backward()
        strategy.draft.zero_grad(set_to_none=True)
    peak = _sync(device)
    seconds = (time.perf_counter() - start) / args.steps
    tokens = args.batch * args.length
    print(
        f"{seconds * 1e3:.1f} ms/step  {tokens / seconds:,.0f} tokens/s  {len(batch['anchors'])} blocks  peak {peak / 2**30:.1f} GiB"
    )


def _strategy(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> DFlashStrategy:
    sliding = ["sliding_attention"] * (args.layers - 1) + ["full_attention"] if args.window else []
    with torch.device(device):
        draft = DFlashDraft.from_config(
            {
                "hidden_size": args.hidden, "intermediate_size": args.intermediate, "num_attention_heads": args.heads,
                "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim, "vocab_size": args.vocab,
                "num_layers": args.layers, "block_size": args.block, "layer_ids": list(range(1, args.layers + 1)),
                "mask_token_id": 7, "num_target_layers": 36, "max_position_embeddings": 40960,
                "layer_types": sliding, "sliding_window": args.window,
            }
        ).to(dtype)  # fmt: skip
        head = torch.randn(args.vocab, args.hidden, dtype=dtype) * 0.02
    section = DFlashSection(
        name="dflash", block_size=args.block, num_anchors=args.anchors, loss=args.loss, chunk_blocks=args.chunk_blocks
    )
    return DFlashStrategy(section, draft, head, head)


def _sample(args: argparse.Namespace, index: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(args.length, dtype=torch.uint8)
    mask[: args.length // 8] = 0
    return {
        "input_ids": torch.randint(0, args.vocab, (args.length,), dtype=torch.int32),
        "loss_mask": mask,
        "aux_states": torch.randn(args.length, args.layers * args.hidden).to(torch.bfloat16),
        "visit": torch.tensor([0, index]),
    }


def _sync(device: torch.device, reset: bool = False) -> int:
    """Waits for the device; peak bytes so far (0 on a CPU)."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return peak


if __name__ == "__main__":
    main()
