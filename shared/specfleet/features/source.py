"""A feature set as the source of a run: the URL that references carry, and the reader behind it."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlsplit

from specfleet.contracts.capture import feature_table
from specfleet.contracts.errors import ConfigError, DataError, FeatureLostError
from specfleet.features.feature_set import FeatureSet
from specfleet.wire.records_pb2 import CaptureContract, SampleRef

if TYPE_CHECKING:
    import torch

_SCHEME = "features"


def features_url(found: FeatureSet) -> str:
    """`features:///DIR?digest=SHA256`: this very set, and no later one at the same place."""
    return f"{_SCHEME}://{quote(str(found.path))}?digest={found.digest}"


def is_features_url(url: str) -> bool:
    return url.startswith(f"{_SCHEME}:")


def open_features(url: str) -> FeatureSet:
    """Raises DataError when the set is not usable, SF-FEATURES-CHANGED when it is not the one the URL names."""
    parts = urlsplit(url)
    wanted = parse_qs(parts.query).get("digest", [""])[0]
    if parts.scheme != _SCHEME or not parts.path or not wanted:
        raise ConfigError("SF-CONFIG-STORE-URL", f"store URL {url!r} is not features:///DIR?digest=SHA256")
    found = FeatureSet.open(Path(unquote(parts.path)))
    if found.digest != wanted:
        raise DataError(
            "SF-FEATURES-CHANGED",
            f"{found.path} has manifest {found.digest}, the run was submitted with {wanted}: it was recorded anew. "
            "Put the old set back, or submit a new run",
        )
    return found


class FeatureSetSource:
    """What a run's loader reads: of every prompt the features its contract asks for, as if they had just been captured."""

    def __init__(self, url: str, contract: CaptureContract) -> None:
        self.name = url
        self._contract = contract

    @cached_property
    def _set(self) -> FeatureSet:
        return open_features(self.name)

    def get(self, ref: SampleRef, names: Sequence[str] | None = None) -> "dict[str, torch.Tensor]":
        """CPU tensors of memory of their own; names None: everything the contract asks for.

        Raises FeatureLostError when the set is damaged or not there, StoreError when the file system failed.
        """
        import torch

        try:
            data = self._set.read(ref.attempt.task.prompt_index)
        except DataError as error:
            raise FeatureLostError(error.code, error.message) from error
        tensors = {}
        for name in names or feature_table(self._contract):
            dtype, per_token = self._set.table[name]
            tensor = torch.from_numpy(data[name]).view(getattr(torch, dtype))
            tensors[name] = tensor.view(-1, per_token) if per_token > 1 else tensor
        if "aux_states" in tensors:
            tensors["aux_states"] = self._layers(tensors["aux_states"])
        return tensors

    def _layers(self, aux_TKH: "torch.Tensor") -> "torch.Tensor":
        """[T, K·H] of the recorded layers → the same of those the contract asks for."""
        recorded, wanted = list(self._set.manifest.contract.layers), list(self._contract.layers)
        if recorded == wanted:
            return aux_TKH
        split = aux_TKH.view(len(aux_TKH), len(recorded), self._contract.hidden_size)
        return split[:, [recorded.index(layer) for layer in wanted]].flatten(1)

    def close(self) -> None:
        """Files are open only while they are read."""
