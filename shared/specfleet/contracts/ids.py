"""Names of tasks, samples, store keys and subjects (docs/design.md §2). Pure string functions over wire records."""

import re
import secrets

from specfleet.contracts.errors import ConfigError
from specfleet.wire.records_pb2 import TaskAttempt, TaskKey

# Run ids appear in NATS subjects, store keys and paths: no dots, slashes, spaces or wildcards.
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_TASK = re.compile(r"e(\d{4,})-p(\d{9,})")


def check_run_id(run_id: str) -> str:
    """Returns the id unchanged; raises ConfigError SF-CONFIG-RUN-ID when it cannot be part of a subject, key or path."""
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(
            "SF-CONFIG-RUN-ID",
            f"run id {run_id!r} is not usable: lower-case letters, digits, '-' and '_', 1 to 63 characters, "
            "starting with a letter or digit",
        )
    return run_id


def new_run_id(strategy: str) -> str:
    """A readable id that is unique enough for one ledger: strategy plus 32 random bits."""
    return f"{strategy}-{secrets.token_hex(4)}"


def task_key(run_id: str, epoch: int, prompt_index: int) -> TaskKey:
    return TaskKey(run_id=run_id, epoch=epoch, prompt_index=prompt_index)


def task_name(task: TaskKey) -> str:
    """`e{epoch:04d}-p{index:09d}`."""
    return f"e{task.epoch:04d}-p{task.prompt_index:09d}"


def parse_task_name(run_id: str, name: str) -> TaskKey:
    """Inverse of task_name; raises ValueError on anything else."""
    match = _TASK.fullmatch(name)
    if not match:
        raise ValueError(f"{name!r} is not a task name; expected e{{epoch:04d}}-p{{index:09d}}, as in e0001-p000000042")
    return task_key(run_id, int(match[1]), int(match[2]))


def sample_id(attempt: TaskAttempt) -> str:
    """`{run}/{task}/a{attempt}`: the message id on the bus and the name a person uses."""
    return f"{attempt.task.run_id}/{task_name(attempt.task)}/a{attempt.attempt}"


def parse_sample_id(text: str) -> TaskAttempt:
    """Inverse of sample_id; the attempt may be left out (then 0). Raises ValueError on anything else."""
    parts = text.split("/")
    if len(parts) not in (2, 3) or (len(parts) == 3 and not re.fullmatch(r"a\d+", parts[2])):
        raise ValueError(f"{text!r} is not a sample id; expected RUN/eEEEE-pIIIIIIIII or RUN/eEEEE-pIIIIIIIII/aN")
    return TaskAttempt(task=parse_task_name(parts[0], parts[1]), attempt=int(parts[2][1:]) if len(parts) == 3 else 0)


def feature_key(store: str, attempt: TaskAttempt, feature: str) -> str:
    """`{store}/{run}/{task}/a{attempt}/{feature}`: unique per attempt, so a late writer never touches a live object."""
    return f"{store}/{sample_id(attempt)}/{feature}"


def prompts_subject(contract_hash: str, run_id: str) -> str:
    # 32 hex digits (128 bits) keep subjects readable and are plenty to tell contracts apart.
    return f"prompts.{contract_hash[:32]}.{run_id}"


def prompts_durable(contract_hash: str) -> str:
    return f"capture-{contract_hash[:32]}"


def samples_subject(run_id: str) -> str:
    return f"samples.{run_id}"


def steps_subject(run_id: str, generation: int, rank: int) -> str:
    return f"steps.{run_id}.{generation}.{rank}"


def releases_subject(store: str) -> str:
    return f"releases.{store}"


def events_subject(run_id: str, kind: str) -> str:
    return f"events.{run_id}.{kind}"
