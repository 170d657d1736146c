"""What `specctl demo` starts from: a real target and conversations it answered itself."""

from pathlib import Path

from specfleet.contracts.errors import HostError

# Names a recipe may use instead of a path.
DEMO_TARGET = "builtin:smollm2-135m-instruct"
DEMO_CONVERSATIONS = "builtin:smollm2-demo"


def demo_target_dir() -> Path:
    """SmolLM2-135M-Instruct as a bf16 Hugging Face directory, converted once into the user's cache.

    Raises HostError (SF-HOST-NO-GGUF, SF-HOST-DOWNLOAD, SF-HOST-GGUF-HASH).
    """
    from specfleet.target.smollm2 import smollm2_dir

    return smollm2_dir()


def demo_conversations() -> Path:
    """The packaged slice: GSM8K train rows, and held-out rows of four sources (data/builtin/README.md)."""
    return Path(__file__).parent / "builtin" / "smollm2-demo.jsonl.gz"


def demo_recipe() -> Path:
    """The demo's run configuration: beside the package when installed, in the repository's recipes/ otherwise.

    Raises HostError SF-HOST-RECIPES when neither is there.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if (folder / "demo.yaml").is_file():
            return folder / "demo.yaml"
    raise HostError("SF-HOST-RECIPES", f"recipes/demo.yaml is missing beside {package}: the installation is incomplete")


def resolve_builtin(name: str) -> str:
    """Turns DEMO_TARGET and DEMO_CONVERSATIONS into paths; anything else is returned as it is."""
    match name:
        case "builtin:smollm2-135m-instruct":
            return str(demo_target_dir())
        case "builtin:smollm2-demo":
            return str(demo_conversations())
    return name
