"""Traffic of pipeline stages, in addition to that of their layers.

Formulas of `scaling.training.pipeline`: in every tick all stages send, even if idle,
and all replicate the embeddings, whose gradients are summed once a step. Recomputation
in stages is in `recomputation`.
"""

from collections.abc import Iterable
from typing import Literal

from scaling.costs import exchanges, memory
from scaling.costs.exchanges import StagePass, Traffic
from scaling.costs.parallelism import Layout
from scaling.shapes import ModelShape

type Schedule = Literal["1f1b", "gpipe"]


def count_ticks(num_stages: int, num_micro: int, schedule: Schedule) -> int:
    """Returns the ticks of a step; a stage may run forward and backward in each.

    A micro-batch needs p - 1 ticks to reach the last stage and p - 1 to return. 1F1B
    starts one in every tick, and the last stage runs forward and backward in the same
    tick; GPipe has a phase of g + p - 1 ticks for each direction.

    Sources: Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2.
    """
    if schedule == "gpipe":
        return 2 * (num_micro + num_stages - 1)
    return num_micro + 2 * (num_stages - 1)


def hop_traffic(sent_in: StagePass) -> Iterable[Traffic]:
    """Returns the traffic of an inner stage: activations forward, gradients back.

    Source: Narayanan et al. 2021, arXiv:2104.04473, sections 3.2 and 4.1: with tensor
    parallelism each device sends its part, and the receiving stage gathers the parts
    over its faster links; with sequence parallelism they are already parts.
    """
    layout = sent_in.layout
    if layout.pipeline == 1:
        return
    sent = sent_in.block / layout.tensor
    formula = "b s h u / t" if layout.tensor > 1 else "b s h u"
    yield Traffic("pipeline", "to the next stage, and back", formula, sent, sent)
    if layout.tensor > 1 and not layout.sequence:
        gathered = exchanges.ring_share(layout.tensor) * sent_in.block
        name = "parts gathered by the stage that receives"
        formula = "(t-1)/t · b s h u"
        yield Traffic("scatter_gather", name, formula, gathered, gathered)


def idle_traffic(
    sent_in: StagePass, *, micro_batches: int, schedule: Schedule
) -> Iterable[Traffic]:
    """Returns the traffic of ticks without a micro-batch: T - g hops each way."""
    num = count_ticks(sent_in.layout.pipeline, micro_batches, schedule) - micro_batches
    for traffic in hop_traffic(sent_in):
        name = f"{traffic.name}, idle ticks"
        formula = f"(T - g) · {traffic.formula}"
        sent = num * traffic.forward, num * traffic.backward
        yield Traffic("idle", name, formula, *sent)


def table_gradient_traffic(
    model: ModelShape, layout: Layout, gradient: int
) -> Iterable[Traffic]:
    """Returns the traffic of gradients of embeddings, head and last norm over stages.

    Megatron keeps embedding and head on the stages that use them, and sums the
    gradients of a tied one over two stages.
    """
    if (p := layout.pipeline) == 1:
        return
    size = memory.vocabulary_params(model, layout)
    sent = 2 * exchanges.ring_share(p) * size * gradient
    name = "gradients of tables and last norm, all-reduce over stages"
    yield Traffic("tables", name, "2 (p-1)/p · N u of tables", 0.0, sent)
