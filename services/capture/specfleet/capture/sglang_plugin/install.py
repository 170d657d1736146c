"""Puts the hooks into this process, and makes sure that they are in."""

import pkgutil

from specfleet.capture.sglang_plugin import releases, versions
from specfleet.capture.sglang_plugin.settings import Settings
from specfleet.contracts.errors import HostError


def install(text: str) -> None:
    """Raises ConfigError SF-SGLANG-SETTINGS, HostError SF-SGLANG-VERSION, SF-SGLANG-SOURCE or SF-SGLANG-HOOK."""
    settings = Settings.parse(text)
    functions = {function.place: function for function in versions.functions_of(versions.check_installed())}

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from specfleet.capture.sglang_plugin.hooks import Hooks

    hooks = Hooks(settings)
    around, after = HookType.AROUND, HookType.AFTER
    kinds = (after, around, around, around, around)
    methods = (
        hooks.after_init_attention_backends,
        hooks.around_pull_raw_reqs,
        hooks.around_run_batch,
        hooks.around_logits,
        hooks.around_stream_output,
    )
    targets = [functions[place].target for place in releases.HOOKED]
    before = [pkgutil.resolve_name(target) for target in targets]
    for target, method, kind in zip(targets, methods, kinds, strict=True):
        HookRegistry.register(target, method, kind)
    # SGLang applies hooks after all plugins ran, and only logs those that fail: applied here, they can be checked here.
    HookRegistry.apply_hooks()
    missing = [target for target, old in zip(targets, before, strict=True) if pkgutil.resolve_name(target) is old]
    if missing:
        raise HostError("SF-SGLANG-HOOK", f"SGLang did not apply the hooks of {', '.join(missing)}")
