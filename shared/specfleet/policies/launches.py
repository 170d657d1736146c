"""Where the ranks of a run go, and how soon a launch that ended is tried again."""

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_RELAUNCH_MS = 1_000
MAX_RELAUNCH_MS = 30_000
# A trainer that dies this often without a single new step has a fault that no further launch will cure.
MAX_FRUITLESS_LAUNCHES = 8


@dataclass(frozen=True)
class AgentSlots:
    agent_id: str
    free: int


@dataclass(frozen=True)
class Placement:
    agent_id: str
    node_rank: int
    nproc: int


def place(world: int, agents: Sequence[AgentSlots]) -> list[Placement] | None:
    """One node if any has room; else the fewest nodes that hold world/k ranks each; None: not now.

    Every node runs the same number of ranks, which is what torch's elastic launcher asks for.
    """
    for nodes in range(1, world + 1):
        if world % nodes:
            continue
        nproc = world // nodes
        # The tightest fit first, so that large nodes stay free for large runs.
        fitting = sorted(
            (agent for agent in agents if agent.free >= nproc), key=lambda agent: (agent.free, agent.agent_id)
        )
        if len(fitting) >= nodes:
            return [Placement(agent.agent_id, rank, nproc) for rank, agent in enumerate(fitting[:nodes])]
    return None


def relaunch_delay_ms(fruitless: int) -> int:
    """Wait before the next launch, after `fruitless` launches in a row that trained nothing."""
    return 0 if fruitless == 0 else min(FIRST_RELAUNCH_MS << (fruitless - 1), MAX_RELAUNCH_MS)
