"""What a server, a model and a request must be for captures to be exact."""

from collections.abc import Sequence
from typing import Any

from specfleet.contracts.errors import ConfigError, HostError


def check_request(received: Any) -> None:
    """Raises ConfigError SF-SGLANG-REQUEST for what a capture cannot be combined with."""
    params = received.sampling_params
    if params.max_new_tokens != 1 or params.n != 1:
        raise ConfigError(
            "SF-SGLANG-REQUEST",
            f"a capture generates one token, this request asks for max_new_tokens {params.max_new_tokens} and n {params.n}",
        )
    if received.input_embeds is not None or received.mm_inputs is not None or received.session_params is not None:
        raise ConfigError("SF-SGLANG-REQUEST", "a capture takes input_ids only: no embeddings, images or sessions")


def capture_layers(model: Any, layers: Sequence[int], num_hidden_layers: int) -> None:
    """Raises ConfigError SF-SGLANG-LAYERS or HostError SF-SGLANG-MODEL."""
    # SGLang hands out what enters a layer, and nothing enters one after the last.
    if layers[-1] > num_hidden_layers - 2:
        raise ConfigError(
            "SF-SGLANG-LAYERS",
            f"layer {layers[-1]} cannot be captured: of this model's {num_hidden_layers} layers SGLang hands out the outputs of "
            f"0..{num_hidden_layers - 2}",
        )
    for setter in ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"):
        if hasattr(model, setter):
            getattr(model, setter)(list(layers))
            return
    raise HostError("SF-SGLANG-MODEL", f"SGLang's {type(model).__name__} does not hand out the states of its layers")


def check_options(args: Any, device: str) -> None:
    """Raises ConfigError SF-SGLANG-OPTIONS when the server was started with what capture excludes."""
    from sglang.srt.environ import envs

    excluded = {
        "--speculative-algorithm": args.speculative_algorithm is not None,
        "--pp-size": args.pp_size > 1,
        # Ranks that see only some of a prompt's tokens; the second exists since 0.5.23.
        "--attn-cp-size": args.attn_cp_size > 1,
        "--enable-layernorm-sp": getattr(args, "enable_layernorm_sp", False),
        "--enable-dp-attention": args.enable_dp_attention,
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--dllm-algorithm": args.dllm_algorithm is not None,
        "--enable-two-batch-overlap": args.enable_two_batch_overlap,
        "--enable-pdmux": args.enable_pdmux,
        # Requests that vanish from the queue without an answer, or answers that wait for the next request.
        "--max-queued-requests": args.max_queued_requests is not None,
        "SGLANG_REQ_WAITING_TIMEOUT": envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0,
        "--sleep-on-idle": args.sleep_on_idle,
        # Since 0.5.17: answers take another way.
        "SGLANG_RUST_SERVER": hasattr(envs, "SGLANG_RUST_SERVER") and envs.SGLANG_RUST_SERVER.get(),
        # Python does not run in a replayed graph, so no hook does.
        "prefill CUDA graphs (set --cuda-graph-backend-prefill disabled)": device == "cuda"
        and args.cuda_graph_config.prefill.backend != "disabled",
    }
    if found := [option for option, present in excluded.items() if present]:
        raise ConfigError("SF-SGLANG-OPTIONS", f"capture does not work with: {', '.join(found)}")
