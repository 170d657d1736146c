"""Optimizer steps of block drafts, and of EAGLE3 beside them, on random weights and features: time, launches, waits, memory.

    python benchmarks/block_step.py                      # a draft for SmolLM2-135M, as in benchmarks/strategies
    python benchmarks/block_step.py --sizes qwen3-8b --batch 1 --length 3072 --anchors 512
    python benchmarks/block_step.py --sizes tiny --device cpu --steps 2

A step is what a trainer rank does with one collated window: copy, forward, backward, clip, AdamW, metrics. Collating happens in
the prefetch thread; its time is told apart, page-locking for a GPU included. On a GPU a profile of a few more steps follows each
strategy, and block attention alone is compared with torch's attention under a dense mask, the shortest way to write it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from specfleet.config.strategies import DFlashSection, DominoSection, DSparkSection, Eagle3Section
from specfleet.drafts.base import Draft
from specfleet.drafts.block_attention import block_attention
from specfleet.drafts.dflash import DFlashDraft
from specfleet.drafts.domino import DominoDraft
from specfleet.drafts.dspark import DSparkDraft
from specfleet.drafts.eagle3 import Eagle3Draft
from specfleet.trainer.loader import page_locked
from specfleet.trainer.optim import MasterAdamW
from specfleet.trainer.parallel import Ranks
from specfleet.trainer.reduction import accumulate
from specfleet.trainer.strategies.base import Strategy
from specfleet.trainer.strategies.block_batch import collate_blocks
from specfleet.trainer.strategies.block_setup import block_plan
from specfleet.trainer.strategies.dflash import DFlashStrategy
from specfleet.trainer.strategies.domino import DominoStrategy
from specfleet.trainer.strategies.dspark import DSparkStrategy
from specfleet.trainer.strategies.eagle3 import Eagle3Strategy
from specfleet.trainer.strategies.teacher import FrozenTeacher

# hidden, intermediate, query heads, key heads, head size, vocabulary, draft vocabulary of EAGLE3, target layers
SIZES = {
    "tiny": (64, 96, 6, 2, 16, 512, 128, 6),
    "smollm2": (576, 1536, 9, 3, 64, 49152, 16384, 30),
    "qwen3-8b": (4096, 12288, 32, 8, 128, 151936, 32000, 36),
}
LAYERS = (1, 8, 15, 22, 27)
PROFILED_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--sizes", default="smollm2", choices=SIZES)
    parser.add_argument("--only", default="dflash,domino,dspark,eagle3")
    parser.add_argument("--loss", default="ce", choices=["ce", "dpace"], help="of DFlash")
    parser.add_argument("--markov-head", default="vanilla", choices=["vanilla", "gated", "rnn"], help="of DSpark")
    for name, value, meaning in (
        ("batch", 16, "samples per step"),
        ("length", 360, "tokens of the longest sample; the shortest has a quarter"),
        ("anchors", 256, "blocks per sample"),
        ("block", 8, "slots per block"),
        ("draft-layers", 5, "layers of block drafts"),
        ("window", 0, "sliding window of all layers but the last; 0: none"),
        ("steps", 20, "timed steps, after 3 that warm up"),
        ("top", 15, "kernels listed"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{meaning} (default {value})")
    args = parser.parse_args()
    torch.manual_seed(0)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, torch {torch.__version__}, {vars(args)}"
    )
    samples = make_samples(args, dtype)
    for name in args.only.split(","):
        measure(name, make_strategy(name, args, device, dtype), samples, args)
    compare_attention(args, samples, device, dtype)


def make_samples(args: argparse.Namespace, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    hidden, vocabulary = SIZES[args.sizes][0], SIZES[args.sizes][5]
    samples = []
    for index, length in enumerate(torch.linspace(args.length // 4, args.length, args.batch).long().tolist()):
        mask = torch.ones(length, dtype=torch.uint8)
        mask[: length // 8] = 0
        samples.append(
            {
                "input_ids": torch.randint(0, vocabulary, (length,), dtype=torch.int32),
                "loss_mask": mask,
                "aux_states": torch.randn(length, len(LAYERS) * hidden).to(dtype),
                "final_state": torch.randn(length, hidden).to(dtype),
                "visit": torch.tensor([0, index]),
            }
        )
    return samples


def make_strategy(name: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Strategy:
    hidden, intermediate, heads, kv_heads, dim, vocabulary, draft_vocabulary, layers = SIZES[args.sizes]
    common = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": vocabulary, "layer_ids": list(LAYERS),
        "max_position_embeddings": 40960,
    }  # fmt: skip
    sliding = (
        ["sliding_attention"] * (args.draft_layers - 1) + ["full_attention"]
        if args.window and args.draft_layers > 1
        else []
    )
    block = {
        **common, "num_layers": args.draft_layers, "block_size": args.block, "mask_token_id": 7,
        "num_target_layers": layers, "layer_types": sliding, "sliding_window": args.window,
    }  # fmt: skip
    section: dict[str, Any] = {"name": name, "block_size": args.block, "num_anchors": args.anchors}
    with device:
        embedding, head = ((torch.randn(vocabulary, hidden) * 0.02).to(dtype) for _ in range(2))
        match name:
            case "dflash":
                draft = DFlashDraft.from_config(block).to(dtype)
                return DFlashStrategy(DFlashSection(**section, loss=args.loss), draft, embedding, head)
            case "domino":
                corrected = DominoDraft.from_config(block).to(dtype)
                return DominoStrategy(DominoSection(**section), corrected, embedding, head, total_steps=1000)
            case "dspark":
                spark = DSparkDraft.from_config({**block, "markov_head": args.markov_head}).to(dtype)
                return DSparkStrategy(DSparkSection(**section, markov_head=args.markov_head), spark, embedding, head)
            case "eagle3":
                eagle = Eagle3Draft.from_config(
                    {**common, "draft_vocab_size": draft_vocabulary, "target_hidden_size": hidden}
                ).to(dtype)
                t2d = torch.arange(vocabulary) < draft_vocabulary
                eagle.set_vocabulary(torch.zeros(draft_vocabulary, dtype=torch.int64), t2d)
                teacher = FrozenTeacher(head, t2d.nonzero().flatten(), full=True)
                return Eagle3Strategy(Eagle3Section(draft_vocab_size=draft_vocabulary), eagle, embedding, teacher)
    raise SystemExit(f"--only {name}: not one of dflash, domino, dspark, eagle3")


def measure(name: str, strategy: Strategy, samples: list[dict[str, torch.Tensor]], args: argparse.Namespace) -> None:
    device = next(strategy.draft.parameters()).device
    optimizer, ranks = MasterAdamW(strategy.draft.named_parameters()), Ranks(device=device)
    collate = page_locked(strategy.collate, device)
    collate_s, batch = run(device, lambda: collate(samples)), collate(samples)

    def step() -> None:
        strategy.begin_step(1)
        accumulate(strategy, [dict(batch)], optimizer, ranks)
        optimizer.step(1e-4, ranks)

    for _ in range(3):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.steps):
        began = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - began)
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    median = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    print(
        f"\n{name}: {median * 1e3:.1f} ms/step (fastest {min(times) * 1e3:.1f}), {tokens / median:,.0f} tokens/s, "
        f"{parameters(strategy.draft) / 1e6:.1f} M parameters, {len(batch.get('anchors', ()))} blocks, "
        f"{len(batch['rows'])} supervised rows, collate {collate_s * 1e3:.1f} ms, peak {peak:.2f} GiB",
        flush=True,
    )
    if device.type == "cuda":
        profile(step, args.top)


def profile(step: Callable[[], None], top: int) -> None:
    """Device time per step by kernel, and how often the host launched, copied and waited."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    averages = recorded.key_averages()
    calls = {
        what: sum(event.count for event in averages if any(key in event.key for key in keys)) / PROFILED_STEPS
        for what, keys in {
            "launches": ("cudaLaunchKernel", "cuLaunchKernel"),
            "copies": ("cudaMemcpyAsync",),
            "stream waits": ("cudaStreamSynchronize",),
        }.items()
    }
    kernels = [event for event in averages if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: event.self_device_time_total, reverse=True)
    busy = sum(event.self_device_time_total for event in kernels) / PROFILED_STEPS / 1e3
    print(f"  {'  '.join(f'{what} {count:.0f}' for what, count in calls.items())}  device busy {busy:.1f} ms")
    for event in kernels[:top]:
        spent = event.self_device_time_total / PROFILED_STEPS / 1e3
        print(f"  {spent:8.3f} ms {event.count / PROFILED_STEPS:6.0f} x  {event.key[:110]}")


def compare_attention(
    args: argparse.Namespace, samples: list[dict[str, torch.Tensor]], device: torch.device, dtype: torch.dtype
) -> None:
    """Forward and backward of one layer's attention against torch's under a dense mask, one call per sequence."""
    _, _, heads, kv_heads, dim, *_ = SIZES[args.sizes]
    section = DFlashSection(name="dflash", block_size=args.block, num_anchors=args.anchors)
    draft = make_strategy("dflash", args, torch.device("meta"), dtype).draft
    batch = collate_blocks(samples, block_plan(section, draft.config, 0, torch.device("cpu")))
    anchors, starts = batch["anchors"].to(device), batch["starts"].to(device)
    own, context = (len(anchors), args.block), (len(batch["context_positions"]),)
    shapes = [(*own, heads, dim), *[(*context, kv_heads, dim)] * 2, *[(*own, kv_heads, dim)] * 2]
    tensors = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    grad = torch.randn(shapes[0], device=device).to(dtype)
    counts = torch.unique_consecutive(batch["sample"], return_counts=True)[1].tolist()

    def ours() -> torch.Tensor:
        return block_attention(*tensors, anchors, starts)

    def theirs() -> torch.Tensor:
        return masked_attention(tensors, anchors, starts, counts)

    with torch.no_grad():
        assert float((ours() - theirs()).float().norm()) < 2e-2 * float(ours().float().norm())
    found = [
        run(device, lambda attend=attend: torch.autograd.grad(attend(), tensors, grad)) for attend in (ours, theirs)
    ]
    # Two products forward, five backward.
    visible = heads * args.block * (int(batch["anchors"].sum()) + args.block * len(anchors))
    rate = 14 * visible * dim / found[0] / 1e12
    print(
        f"\nattention of one layer, forward and backward: {found[0] * 1e3:.3f} ms ({rate:.1f} TFLOP/s); "
        f"torch with a dense mask {found[1] * 1e3:.3f} ms, {found[1] / found[0]:.1f} times as long"
    )


def masked_attention(
    tensors: list[torch.Tensor], anchors: torch.Tensor, starts: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    q, context_k, context_v, block_k, block_v = tensors
    slots, results, first = q.shape[1], [], 0
    for count in counts:
        blocks = slice(first, first + count)
        start, length = int(starts[first]), int(anchors[first + count - 1])
        first += count
        keys, values = (
            torch.cat((context[start : start + length], own[blocks].flatten(0, 1))).transpose(0, 1)[None]
            for context, own in ((context_k, block_k), (context_v, block_v))
        )
        before = torch.arange(length, device=q.device) < anchors[blocks, None].repeat_interleave(slots, 0)
        inside = torch.block_diag(*[before.new_ones(slots, slots)] * count)
        # Padded: torch's fused kernel wants rows of the mask aligned.
        mask = pad(torch.cat((before, inside), dim=1), (0, -(length + count * slots) % 16))
        keys, values = (pad(x, (0, 0, 0, mask.shape[1] - x.shape[2])) for x in (keys, values))
        rows = q[blocks].flatten(0, 1).transpose(0, 1)[None]
        out = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, enable_gqa=True)
        results.append(out[0].transpose(0, 1).unflatten(0, (count, slots)))
    return torch.cat(results)


def run(device: torch.device, action: Callable[[], Any]) -> float:
    """Median seconds of ten calls, after three that warm up."""
    times = []
    for _ in range(13):
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def parameters(draft: Draft) -> int:
    return sum(parameter.numel() for parameter in draft.parameters())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
