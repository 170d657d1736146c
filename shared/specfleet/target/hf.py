"""The frozen target on transformers: batched prefill that captures hidden states, and a cached forward for decoding.

Shapes: T tokens, H hidden size, V vocabulary, K captured layers. "Layer k" is the output of decoder layer k, 0-based.
"""

import inspect
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from specfleet.contracts.errors import CaptureItemError, ConfigError, ContractError
from specfleet.target.dtypes import DTYPES, compute_dtype
from specfleet.target.text_config import logits_scale

if TYPE_CHECKING:
    from specfleet.target.facts import TargetFacts

# Rows of the full-vocabulary head computed at once for the teacher extras: 512 rows × 150k logits in fp32 is 300 MB.
_TEACHER_ROWS = 512


# Layers that a plain key-value cache replaces.
_CROPPABLE = (DynamicLayer, DynamicSlidingWindowLayer)


class _StopForward(Exception):
    """Raised by the last needed hook when nothing after it is wanted."""


class HFTarget:
    """A frozen causal language model with hooks on the captured layers only."""

    def __init__(
        self,
        path: str,
        model: nn.Module,
        layers: Sequence[int],
        dtype: torch.dtype,
        final_state: str,
        extras: Sequence[str],
    ) -> None:
        self.path = path
        self.model = model
        self.layers = tuple(layers)
        self.dtype = dtype
        self.final_state = final_state
        self.extras = tuple(extras)
        self.device = next(model.parameters()).device
        self._decoder = model.get_decoder()
        # transformers renamed the argument in 5.2x; both spellings are accepted by the versions we support.
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._states: dict[int, torch.Tensor] = {}
        self._stop_after: int | None = None
        self._logits_scale = logits_scale(model.config.get_text_config().to_dict())
        blocks = _decoder_layers(self._decoder, model.config.get_text_config().num_hidden_layers)
        for layer in self.layers:
            if not 0 <= layer < len(blocks):
                raise ConfigError(
                    "SF-CONFIG-LAYERS", f"layer {layer} is out of range: {path} has {len(blocks)} decoder layers"
                )
            blocks[layer].register_forward_hook(self._hook(layer))
        self._check_final_state()

    @classmethod
    def load(
        cls,
        path: str | Path,
        layers: Sequence[int],
        dtype: str = "bfloat16",
        device: str = "cpu",
        final_state: str = "post_norm",
        extras: Sequence[str] = (),
        trust_remote_code: bool = False,
    ) -> "HFTarget":
        """Loads a model directory. `dtype` is the dtype of captured features; see `compute_dtype` for the arithmetic.

        Raises ConfigError SF-CONFIG-LAYERS, ContractError SF-TARGET-HEAD.
        """
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=compute_dtype(DTYPES[dtype], device), trust_remote_code=trust_remote_code
        )
        model = model.to(device).eval().requires_grad_(False)
        return cls(str(path), model, layers, DTYPES[dtype], final_state, extras)

    @cached_property
    def facts(self) -> "TargetFacts":
        from specfleet.target.facts import read_target_facts

        return read_target_facts(Path(self.path))

    @property
    def embedding_VH(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def head_VH(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def capture(self, batch: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor] | CaptureItemError]:
        """One right-padded prefill. Per item, in order, CPU tensors without padding rows, or why it cannot be captured.

        aux_states [T, K·H] · final_state [T, H] (when final_state is "post_norm") · teacher_argmax [T] int32 ·
        teacher_lse [T] float32 (when asked for). One bad item never fails its neighbours.
        """
        results: list[dict[str, torch.Tensor] | CaptureItemError | None] = [self._refuse(ids) for ids in batch]
        good = [index for index, result in enumerate(results) if result is None]
        if good:
            lengths = [len(batch[index]) for index in good]
            ids = torch.zeros(len(good), max(lengths), dtype=torch.int64)
            for row, index in enumerate(good):
                ids[row, : lengths[row]] = torch.tensor(list(batch[index]))
            aux, final = self._run(
                ids.to(self.device), None, need_final=self.final_state == "post_norm" or bool(self.extras)
            )
            for row, index in enumerate(good):
                results[index] = self._item(
                    aux[row, : lengths[row]], None if final is None else final[row, : lengths[row]]
                )
        return [result for result in results if result is not None]

    @torch.no_grad()
    def forward(
        self, input_ids_1T: torch.Tensor, cache: Cache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Next-token logits [T, V] in float32, aux states [T, K·H] and post-norm states [T, H] of one sequence.

        With a cache (`new_cache`), the T tokens follow what it holds, and are added to it.
        """
        aux, final = self._run(input_ids_1T.to(self.device), cache, need_final=True)
        assert final is not None
        logits = self.model.get_output_embeddings()(final[0]).float() * self._logits_scale
        return logits, aux[0], final[0]

    def new_cache(self) -> Cache:
        """Keeps every position: a cache that forgets what slid out of a window cannot be cropped back into it. The masks of
        sliding layers come from the configuration, not from what is cached.

        Raises ConfigError SF-TARGET-CACHE when some layer keeps a state that cannot be rewound.
        """
        layers = DynamicCache(config=self.model.config.get_text_config()).layers
        strange = sorted({type(layer).__name__ for layer in layers if type(layer) not in _CROPPABLE})
        if strange:
            raise ConfigError(
                "SF-TARGET-CACHE",
                f"{self.path} has layers whose state cannot be rewound to an earlier position ({', '.join(strange)}), so "
                "rejected drafts could not be taken back: capture works, reference decoding on transformers does not",
            )
        return DynamicCache()

    @staticmethod
    def crop(cache: Cache, length: int) -> None:
        """Forgets every position from `length` on."""
        excess = cache.get_seq_length() - length
        if excess > 0:
            # Negative: the number of tokens to remove, in every transformers version.
            cache.crop(-excess)

    def _run(
        self, ids_BT: torch.Tensor, cache: Cache | None, *, need_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Aux [B, T, K·H] and post-norm state [B, T, H]. Right padding needs no mask: causal rows never look at it."""
        self._states.clear()
        self._stop_after = None if need_final or cache is not None or not self.layers else self.layers[-1]
        final = None
        try:
            final = self._decoder(
                input_ids=ids_BT, use_cache=cache is not None, **{self._cache_argument: cache}
            ).last_hidden_state
        except _StopForward:
            pass
        finally:
            self._stop_after = None  # the model may be run by others too
        aux = [self._states.pop(layer) for layer in self.layers]
        return torch.cat(aux, dim=-1) if aux else ids_BT.new_zeros((*ids_BT.shape, 0), dtype=self.dtype), final

    def _hook(self, layer: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            self._states[layer] = output if isinstance(output, torch.Tensor) else output[0]
            if layer == self._stop_after:
                raise _StopForward

        return keep

    def _refuse(self, ids: Sequence[int]) -> CaptureItemError | None:
        if not len(ids):
            return CaptureItemError("SF-CAPTURE-EMPTY", "the prompt has no tokens")
        vocabulary = self.embedding_VH.shape[0]
        if min(ids) < 0 or max(ids) >= vocabulary:
            return CaptureItemError(
                "SF-CAPTURE-TOKEN",
                f"token ids {min(ids)}..{max(ids)} do not fit the target's vocabulary of {vocabulary}: "
                "the prompt set was made with another tokenizer",
            )
        return None

    def _item(self, aux_TKH: torch.Tensor, final_TH: torch.Tensor | None) -> dict[str, torch.Tensor] | CaptureItemError:
        features = {"aux_states": aux_TKH.to(self.dtype)}
        if final_TH is not None:
            features["final_state"] = final_TH.to(self.dtype)
        for name, tensor in features.items():
            bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            if bad:
                return CaptureItemError(
                    "SF-CAPTURE-NONFINITE",
                    f"{bad} of {tensor.numel()} elements of {name} are NaN or infinite in {self.dtype} over "
                    f"{tensor.shape[0]} tokens",
                )
        if self.extras and final_TH is not None:
            features.update(self._teacher(final_TH))
        if self.final_state != "post_norm":
            features.pop("final_state", None)
        # clone: a view would keep the whole padded batch alive.
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in features.items()}

    def _teacher(self, final_TH: torch.Tensor) -> dict[str, torch.Tensor]:
        head = self.model.get_output_embeddings()
        argmax, lse = [], []
        for rows in final_TH.split(_TEACHER_ROWS):
            logits = head(rows).float() * self._logits_scale
            argmax.append(logits.argmax(-1).int())
            lse.append(logits.logsumexp(-1))
        facts = {"teacher_argmax": torch.cat(argmax), "teacher_lse": torch.cat(lse)}
        return {name: facts[name] for name in self.extras}

    @torch.no_grad()
    def _check_final_state(self) -> None:
        """Trainers recompute teacher logits as `load_head`·final_state, so no other scale or cap may lie in between."""
        ids = torch.tensor([[0, 1]], device=self.device)
        expected = self.model(input_ids=ids).logits[0].float()
        measured = self.forward(ids)[0]
        gap = float((expected - measured).abs().max())
        if gap > 1e-2 * max(1.0, float(expected.abs().max())):
            raise ContractError(
                "SF-TARGET-HEAD",
                f"{self.path}: logits are not its head applied to the post-norm state, times {self._logits_scale:g} (largest "
                f"gap {gap:.3g}); the target scales or caps logits in a way this project does not know (target/weights.py)",
            )


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ContractError("SF-TARGET-LAYERS", f"{type(decoder).__name__} has no list of {count} decoder layers")
