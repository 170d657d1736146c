"""Open feature sets, cached: the coordinator reads which prompts they have, never their tensors."""

import asyncio
from pathlib import Path

from specfleet.coordinator.facts import RunFacts
from specfleet.features.feature_set import FeatureSet
from specfleet.features.manifest import is_feature_set
from specfleet.features.source import open_features


class FeatureSets:
    def __init__(self) -> None:
        self._sets: dict[str, FeatureSet] = {}
        self._recorded: dict[int, frozenset[int]] = {}

    async def open(self, url: str) -> FeatureSet:
        """Raises DataError when the set is not usable, or no longer the one the URL names."""
        if url not in self._sets:
            self._sets[url] = await asyncio.to_thread(open_features, url)
        return self._sets[url]

    async def recorded(self, facts: RunFacts) -> frozenset[int]:
        """Prompts that were in a recording run's directory when it was first looked at: those of earlier runs.

        Raises DataError when the set there is damaged.
        """
        if not facts.config.records:
            return frozenset()
        if facts.run not in self._recorded:
            directory = Path(facts.config.record.directory)
            found = await asyncio.to_thread(FeatureSet.open, directory) if is_feature_set(directory) else None
            self._recorded[facts.run] = frozenset(found.num_tokens.nonzero()[0].tolist() if found else ())
        return self._recorded[facts.run]
