"""Which step plan counts. Pure: no threads, no I/O."""

from specfleet.wire.records_pb2 import StepPlan


class PlanBook:
    """Plans of steps that are not trained yet, newest revision of each.

    Duplicates and old revisions are normal: the bus delivers at least once, a restarted coordinator publishes again.
    """

    def __init__(self, run_id: str, generation: int, next_step: int) -> None:
        self._run_id = run_id
        self._generation = generation
        self._plans: dict[int, StepPlan] = {}
        self.next_step = next_step
        """The next step to train."""
        self.stop: StepPlan | None = None
        """A KIND_STOP plan: it counts whatever step it names."""

    def offer(self, plan: StepPlan) -> bool:
        """Takes a delivered plan; False when it changes nothing (trained, duplicate, older, other generation)."""
        if plan.run_id != self._run_id or plan.generation != self._generation:
            return False
        if plan.kind == StepPlan.KIND_STOP:
            news = self.stop is None
            self.stop = self.stop or plan
            return news
        known = self._plans.get(plan.step)
        if plan.step < self.next_step or (known is not None and known.revision >= plan.revision):
            return False
        self._plans[plan.step] = plan
        return True

    def get(self, step: int) -> StepPlan | None:
        return self._plans.get(step)

    def ahead(self, count: int) -> list[StepPlan]:
        """Known plans among the next `count` steps, in order; ends where a step is unknown or nothing follows."""
        found = []
        for step in range(self.next_step, self.next_step + count):
            plan = self._plans.get(step)
            if plan is None or plan.kind != StepPlan.KIND_STEP:
                break
            found.append(plan)
        return found

    def trained(self, step: int) -> None:
        """Forgets the step and everything before it."""
        self.next_step = step + 1
        for old in [known for known in self._plans if known <= step]:
            del self._plans[old]
