"""Open feature sets, cached: the coordinator reads which prompts they have, never their tensors."""

import asyncio

from specfleet.features.feature_set import FeatureSet
from specfleet.features.source import open_features


class FeatureSets:
    def __init__(self) -> None:
        self._sets: dict[str, FeatureSet] = {}

    async def open(self, url: str) -> FeatureSet:
        """Raises DataError when the set is not usable, or no longer the one the URL names."""
        if url not in self._sets:
            self._sets[url] = await asyncio.to_thread(open_features, url)
        return self._sets[url]
