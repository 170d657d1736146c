"""The target by name: a directory, the demo's built-in one, or a repository of the Hugging Face Hub. Imports no torch.

A name of the Hub is ORG/NAME or ORG/NAME@REVISION. It is pinned to a commit once, when a run is submitted; each service then
fetches what it needs of that commit into Hugging Face's own cache. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply.
"""

import re
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from specfleet.contracts.errors import ConfigError, HostError
from specfleet.data.demo import resolve_builtin
from specfleet.target.facts import SAFETENSORS_INDEX, FileFacts, TargetFacts, read_target_facts, weight_map

Weights = Literal["all", "vocabulary", "none"]
"""Which weight files are needed: all, those with the embedding and the output head, or none."""

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
# Configuration, tokenizer, chat templates, the index of the weights, and code for trust_remote_code.
_SMALL_FILES = ["*.json", "*.jinja", "*.py", "*.txt", "*.tiktoken", "tokenizer.model", "tiktoken.model"]


class HubName(NamedTuple):
    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def hub_name(name: str) -> HubName | None:
    """None for a path that exists here, and for what no repository can be called."""
    match = _HUB_NAME.fullmatch(name)
    return HubName(match[1], match[2]) if match and not Path(name).exists() else None


def pinned_target(name: str) -> str:
    """The name as services are told it: ORG/NAME@COMMIT for the Hub, an absolute path for a directory. Raises as `target_dir`.

    A path that does not exist stays as it is, for the message of whoever reads it.
    """
    directory = target_dir(name, "none")
    if hub := hub_name(name):
        return str(HubName(hub.repository, directory.name))
    return str(directory.resolve()) if directory.is_dir() else str(directory)


def target_dir(name: str | Path, weights: Weights = "all") -> Path:
    """The directory of a target; of a hub target, a snapshot in the cache that holds at least what is asked for.

    Weights of the Hub are safetensors only. Raises ConfigError SF-HUB-NOT-FOUND or SF-TARGET-NO-WEIGHTS, HostError
    SF-HUB-GATED, SF-HUB-OFFLINE or SF-HUB-DOWNLOAD. Whether a directory exists, and what it holds, is its reader's question.
    """
    name = resolve_builtin(str(name))
    hub = hub_name(name)
    if hub is None:
        return Path(name).expanduser()
    directory = _fetch(hub, _SMALL_FILES)
    if weights != "none":
        files = _weight_files(directory, weights)
        _fetch(HubName(hub.repository, directory.name), files)
        if absent := [file for file in files if not (directory / file).is_file()]:
            raise ConfigError(
                "SF-TARGET-NO-WEIGHTS",
                f"{hub} has no {', '.join(absent[:3])}: its weights are not safetensors, or their download was cut short",
            )
    return directory


def target_facts(name: str) -> TargetFacts:
    """What a contract needs to know. Weights of the Hub stay there: it states their hashes. Raises as `target_dir` and
    `read_target_facts`."""
    hub = hub_name(name)
    directory = target_dir(name, "none" if hub else "all")
    if hub and (stated := _stated_weights(hub.repository, directory)):
        return read_target_facts(directory, stated)
    return read_target_facts(target_dir(name))


def _stated_weights(repository: str, directory: Path) -> dict[str, FileFacts]:
    """{} where the Hub is away, or keeps a weight file in git itself and so without a sha256."""
    from huggingface_hub import HfApi

    files = _weight_files(directory, "all")
    try:
        found = HfApi().get_paths_info(repository, files, revision=directory.name)
    except Exception:  # whatever the HTTP client raises: the weights may be in the cache, and else that says why not
        return {}
    stated = {info.path: FileFacts(info.lfs.size, info.lfs.sha256) for info in found if getattr(info, "lfs", None)}
    return stated if len(stated) == len(files) else {}


def _weight_files(directory: Path, weights: Weights) -> list[str]:
    """The shards its index names, else the one file."""
    index = directory / SAFETENSORS_INDEX
    if not index.is_file():
        return ["model.safetensors"]
    files = weight_map(index)
    if weights == "vocabulary":
        from specfleet.target.weights import is_vocabulary_tensor

        files = {name: file for name, file in files.items() if is_vocabulary_tensor(name)}
    return sorted(set(files.values()))


def _fetch(hub: HubName, files: list[str]) -> Path:
    """The snapshot of that revision, with the files that match."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(hub.repository, revision=hub.revision, allow_patterns=files))
    except errors.GatedRepoError as error:
        raise HostError(
            "SF-HUB-GATED",
            f"{hub.repository} is gated and this machine has no access. Accept its licence on its page, then set HF_TOKEN "
            "(or run `hf auth login`) where specctl, capture, trainer and gate run",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            "SF-HUB-NOT-FOUND",
            f"{hub.repository} is neither a directory here nor a repository of the Hugging Face Hub that this machine may "
            "read. Check the spelling; a private repository needs HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            "SF-HUB-NOT-FOUND", f"{hub.repository} has no branch, tag or commit {hub.revision!r}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        lacking = "its configuration" if files is _SMALL_FILES else ", ".join(files[:3]) + (" …" if files[3:] else "")
        raise HostError(
            "SF-HUB-OFFLINE",
            f"{hub} is not a directory here, the Hugging Face Hub does not answer, and its cache on this machine lacks "
            f"{lacking}. Download it where there is a network (hf download {hub.repository}), set HF_ENDPOINT to a mirror, or give "
            "model.target a directory",
        ) from error
    except Exception as error:  # the HTTP client's errors, which have changed their home, and those of a full disk
        raise HostError("SF-HUB-DOWNLOAD", f"{hub} could not be downloaded: {error}") from error
