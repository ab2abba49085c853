"""vLLM's scheduler in plain Python, with a list of blocks for each request."""

import bisect
import dataclasses
from typing import NamedTuple


@dataclasses.dataclass
class ReferenceRequest:
    """A request; `context` tokens are in the prefix cache, on pinned blocks.

    With `after`, it arrives `delay_us` after the last answer to one of these requests.
    """

    arrival_us: int
    prompt: int
    output: int
    context: int
    after: tuple[int, ...] = ()
    delay_us: int = 0
    finish_us: int | None = None
    num_generated: int = 0
    num_computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.context + self.prompt + self.num_generated


class ReferenceStep(NamedTuple):
    start_us: int
    num_decodes: int
    num_prompt_rows: int
    decode_context: int
    prompt_context: int
    num_admitted: int
    num_preempted: int
    num_waiting: int
    num_running: int
    num_finished: int
    used_blocks: int


class ReferenceScheduler:
    """Runs requests to their end; a step takes 10 ms, and 0.1 ms per prompt token.

    With `reserves_prompt`, a request is admitted only if blocks of all its tokens are
    free: `full_sequence_must_fit` of vLLM's `allocate_slots`.
    """

    def __init__(
        self,
        requests: list[ReferenceRequest],
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        threshold: int,
        head: int | None = None,
        reserves_prompt: bool = False,
    ) -> None:
        self.requests = requests
        self.unsent = [i for i, x in enumerate(requests) if x.after]
        self.coming = [(x.arrival_us, i) for i, x in enumerate(requests) if not x.after]
        self.waiting: list[ReferenceRequest] = []
        self.running: list[ReferenceRequest] = []
        self.free = list(range(num_blocks))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.threshold = threshold
        self.reserves_prompt = reserves_prompt
        self.head = len(requests) if head is None else head
        self.clock_us = 0

    def take_blocks(self, request: ReferenceRequest, new: int) -> bool:
        """Extends the blocks of a request by `new` tokens, or returns False."""
        private_tokens = request.num_computed + new - request.context
        missing = -(-private_tokens // self.block_size) - len(request.blocks)
        if missing > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(missing)]
        return True

    def chunk(self, request: ReferenceRequest, budget: int) -> int:
        new = request.num_tokens - request.num_computed
        if 0 < self.threshold < new:
            new = self.threshold
        return min(new, budget)

    def step(self) -> ReferenceStep | None:
        """Runs one step; None if no request had arrived."""
        while self.coming and self.coming[0][0] <= self.clock_us:
            self.waiting.append(self.requests[self.coming.pop(0)[1]])
        if not self.waiting and not self.running:
            self.clock_us = self.coming[0][0]
            return None
        budget = self.budget
        scheduled = []
        num_preempted = num_admitted = index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            new = self.chunk(request, budget)
            while not (fits := self.take_blocks(request, new)):
                victim = self.running.pop()
                self.free += victim.blocks
                victim.blocks = []
                victim.num_computed = 0
                self.waiting.insert(0, victim)
                num_preempted += 1
                if victim is request:
                    break
            if not fits:
                break
            scheduled.append((request, new))
            budget -= new
            index += 1
        while self.waiting and budget > 0 and not num_preempted:
            if len(self.running) == self.max_num_seqs or num_admitted == self.head:
                break
            request = self.waiting[0]
            request.num_computed = request.context
            new = self.chunk(request, budget)
            num_blocks = -(-(request.num_tokens - request.context) // self.block_size)
            if self.reserves_prompt and num_blocks > len(self.free):
                break
            if not self.take_blocks(request, new):
                break
            self.running.append(self.waiting.pop(0))
            num_admitted += 1
            scheduled.append((request, new))
            budget -= new
        return self.compute(scheduled, num_admitted, num_preempted)

    def compute(
        self,
        scheduled: list[tuple[ReferenceRequest, int]],
        num_admitted: int,
        num_preempted: int,
    ) -> ReferenceStep:
        """Feeds the scheduled tokens, advances the clock and frees ended requests."""
        start_us = self.clock_us
        num_running = len(self.running)
        used = self.num_blocks - len(self.free)
        decode = []
        prompt = []
        for request, new in scheduled:
            decodes = request.num_generated > 0
            decodes &= request.num_tokens - request.num_computed == 1
            request.num_computed += new
            (decode if decodes else prompt).append((new, request.num_computed))
            if request.num_computed == request.num_tokens:
                request.num_generated += 1
        num_rows = sum(new for new, _ in prompt)
        self.clock_us += 10_000 + 100 * num_rows
        ended = [x for x in self.running if x.num_generated == x.output]
        for request in ended:
            self.running.remove(request)
            self.free += request.blocks
            request.finish_us = self.clock_us
        for i in [*self.unsent]:
            request = self.requests[i]
            ends = [self.requests[before].finish_us for before in request.after]
            if None not in ends:
                self.unsent.remove(i)
                request.arrival_us = self.clock_us + request.delay_us
                bisect.insort(self.coming, (request.arrival_us, i))
        return ReferenceStep(
            start_us=start_us,
            num_decodes=len(decode),
            num_prompt_rows=num_rows,
            decode_context=sum(after for _, after in decode),
            prompt_context=sum(after for _, after in prompt),
            num_admitted=num_admitted,
            num_preempted=num_preempted,
            num_waiting=len(self.waiting),
            num_running=num_running,
            num_finished=len(ended),
            used_blocks=used,
        )

    def run(self) -> list[ReferenceStep]:
        steps = []
        while self.coming or self.waiting or self.running:
            if (record := self.step()) is not None:
                steps.append(record)
        return steps
