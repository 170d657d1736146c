"""One error tree. Every error says what, where, the numbers and what to do, and carries a stable code.

The code is what scripts and documentation refer to; the exit code is what `specctl` and the services end with.
"""

# Exit codes of every command line of the project.
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_ENVIRONMENT = 3
EXIT_GATE_FAILED = 4


class SpecfleetError(Exception):
    """Something failed. `code` is stable (SF-AREA-THING); `exit_code` is what a command line ends with."""

    exit_code = EXIT_FAILED

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


class ConfigError(SpecfleetError):
    """The configuration cannot work: an unknown key, or numbers that contradict one another."""

    exit_code = EXIT_BAD_INPUT


class DataError(SpecfleetError):
    """A data file is missing, unreadable, or holds nothing that can be trained on."""

    exit_code = EXIT_BAD_INPUT


class HostError(SpecfleetError):
    """The machine lacks something: a library, a free port, a reachable coordinator."""

    exit_code = EXIT_ENVIRONMENT


class UnreachableError(HostError):
    """A service did not answer."""


class ContractError(SpecfleetError):
    """Two sides disagree about target, layers, dtype, tokenizer or checkpoint identity; both values are shown."""

    exit_code = EXIT_BAD_INPUT


class LedgerError(SpecfleetError):
    """A write the ledger refuses: a transition that is not in the state machine, or a stale fence."""


class StoreError(SpecfleetError):
    """The feature store refused or failed. Infrastructure, unless the subclass says otherwise."""


class StoreFullError(StoreError):
    """The pool has no room now. Back-pressure: wait and try again."""


class FeatureLostError(StoreError):
    """An object is gone, short or altered. A normal event: the prompt is captured again (offline: the run pauses)."""


class CaptureItemError(SpecfleetError):
    """One sample cannot be captured (NaN, wrong length). Costs that prompt's budget, never its neighbours'."""


class EngineError(SpecfleetError):
    """The engine that runs the model failed. Infrastructure: no prompt is to blame."""


class RequestRefusedError(EngineError):
    """The engine refused one request, which is at fault; others are served."""


class ExportError(SpecfleetError):
    """An export does not match the engine's loader table; every leftover, missing or misshapen tensor is listed."""


class GateError(SpecfleetError):
    """The gate ran and the draft did not pass."""

    exit_code = EXIT_GATE_FAILED
