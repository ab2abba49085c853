"""Bytes that each device sends in a step, by scheme.

An all-reduce of x bytes over p devices in a ring sends `2 (p-1)/p x` bytes per device,
an all-gather or reduce-scatter half of that, an all-to-all of x bytes on each device
`(p-1)/p x`. Forward and backward are separate; a transfer that overlaps with products
is counted like any other.
"""

from collections.abc import Iterable

from jaxkv import validation
from scaling.costs import exchanges, memory, parallelism, recomputation, stages
from scaling.costs.exchanges import StagePass, Traffic
from scaling.costs.parallelism import Layout
from scaling.costs.stages import Schedule
from scaling.shapes import HeadAttention, ModelShape


@validation.checks_numbers(batch=validation.SIZES, sequence=validation.SIZES)
def training_traffic(
    model: ModelShape,
    layout: Layout,
    *,
    batch: int = 1,
    sequence: int,
    number_bytes: int = 2,
    dispatch_bytes: int | None = None,
    gradient_bytes: int = 2,
    micro_batches: int = 1,
    schedule: Schedule = "1f1b",
    remat: bool = False,
) -> tuple[Traffic, ...]:
    """Lists the traffic of a device in a training step, for its pipeline stage.

    A device is counted as both the first and the last stage of a pipeline.

    Llama-7B, 1 x 4,096 tokens, tensor parallel over 8: 3,758,096,384 bytes forward
    and as many backward.

    Args:
      model: shape of the model.
      layout: division over devices.
      batch: sequences of a micro-batch on one data-parallel device, at least 1.
      sequence: tokens of each sequence, at least 1.
      number_bytes: bytes of an activation or weight that is sent.
      dispatch_bytes: bytes of a number that is sent to an expert; `number_bytes` by
        default, 1 for dispatch in 8 bits.
      gradient_bytes: bytes of a number of a weight's gradient.
      micro_batches: micro-batches of the step, at least 1: gradients of weights are
        summed over copies once a step, other data is sent for each micro-batch.
      schedule: pipeline schedule, which determines the idle ticks.
      remat: True if only results of products are kept and the rest is recomputed, as
        with `StepConfig.remat`; pipeline stages recompute in any case.

    Raises:
      ValueError: a size is out of range, a degree does not divide its size, or `remat`
        is used with stages.
    """
    if remat and layout.pipeline > 1:
        raise ValueError(f"{remat=} must be False with pipeline={layout.pipeline}")
    parallelism.check_layout(model, layout, sequence=sequence)
    sent_in = StagePass(model, layout, batch * sequence // layout.context, number_bytes)
    dispatch = number_bytes if dispatch_bytes is None else dispatch_bytes
    inside = (
        *exchanges.tensor_traffic(sent_in),
        *_ulysses(sent_in),
        *_ring(sent_in),
        *_expert(sent_in, dispatch),
    )
    again = (
        recomputation.product_recomputation_traffic
        if remat
        else recomputation.stage_recomputation_traffic
    )
    terms = (
        *inside,
        *again(sent_in, inside),
        *exchanges.norm_gradient_traffic(model, layout, gradient_bytes),
        *exchanges.vocabulary_traffic(sent_in),
        *stages.hop_traffic(sent_in),
    )
    n = micro_batches
    return (
        *(x._replace(forward=n * x.forward, backward=n * x.backward) for x in terms),
        *stages.idle_traffic(sent_in, micro_batches=micro_batches, schedule=schedule),
        *stages.table_gradient_traffic(model, layout, gradient_bytes),
        *_data(model, layout, number_bytes, gradient_bytes),
    )


def _ulysses(sent_in: StagePass) -> Iterable[Traffic]:
    """Returns the all-to-alls of DeepSpeed-Ulysses: Q, K, V and outputs.

    If there are fewer KV heads than devices, they are replicated first.

    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.
    """
    model, layout, tokens, u = sent_in
    if (p := layout.ulysses) == 1:
        return
    a = model.attention
    outputs = a.num_q_heads * a.value_dim
    if isinstance(a, HeadAttention):
        kv_heads = max(a.num_kv_heads, p * layout.tensor)
        numbers = a.num_q_heads * a.head_dim + outputs + 2 * kv_heads * a.head_dim
    else:
        numbers = a.num_q_heads * (2 * a.key_dim + a.value_dim) + outputs
    sent = exchanges.ring_share(p) * tokens * numbers * u / layout.tensor
    sent *= sent_in.layers
    formula = "(2 n + 2 m) d · b s/p · (p-1)/p · u · L"
    yield Traffic("ulysses", "4 all-to-alls of a layer", formula, sent, sent)


def _ring(sent_in: StagePass) -> Iterable[Traffic]:
    """Returns the traffic of ring attention: keys and values in p - 1 hops, and back.

    Gradients of keys and values make p hops, the last one to their own device.

    Source: Liu et al. 2023, arXiv:2310.01889, section 3.
    """
    model, layout, tokens, u = sent_in
    if (p := layout.ring) == 1:
        return
    a = model.attention
    heads = max(a.num_kv_heads // (layout.tensor * layout.ulysses), 1)
    block = tokens * layout.ulysses * heads * (a.key_dim + a.value_dim) * u
    block *= sent_in.layers
    formula = "2 m d · b s/p · (p-1) · u · L; back with p more"
    forward = block * (p - 1)
    name = "keys and values, hop by hop"
    back = forward + block * p
    yield Traffic("ring", name, formula, float(forward), float(back))


def _expert(sent_in: StagePass, dispatch: int) -> Iterable[Traffic]:
    """Returns the traffic of tokens to their k experts and back, or of all tokens.

    Without a capacity, the bytes are those of uniformly drawn experts on average. With
    a capacity, buffers have one size, full or not. With `gather`, every token is sent
    once, with the indices and shares of its experts, and the sums are sent back.

    Sources: Lepikhin et al. 2020, arXiv:2006.16668, section 3; bytes in 8 bits:
    DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2.
    """
    model, layout, tokens, u = sent_in
    p = layout.expert
    x = model.experts
    layers = sent_in.mixtures
    if x is None:
        return
    if (copies := layout.copies) > 1:
        sent = 2 * exchanges.ring_share(copies) * 4 * x.num_experts * layers
        name = "loads of experts, for the loss of balance, all-reduce"
        yield Traffic("balance", name, "2 (p-1)/p · 4 E · L", sent, 0.0)
    if p == 1:
        return
    if layout.gather:
        block = (p - 1) * tokens * model.hidden_size * layers
        shares = (p - 1) * tokens * x.top_k * 4 * layers
        name = "all tokens gathered, sums scattered"
        formula = "(p-1) b s (h (dispatch u + u) + 8 k) · L; back 2 h u + 4 k"
        sent = float(block * (dispatch + u) + 2 * shares)
        yield Traffic("expert", name, formula, sent, float(block * 2 * u + shares))
        return
    # Tensor-parallel devices have the same tokens; each sends its part.
    width = exchanges.ring_share(p) * model.hidden_size / layout.tensor * layers
    if layout.capacity is None:
        rows = tokens * x.top_k
        row_formula = "k b s"
    else:
        sizes = {"top_k": x.top_k, "num_experts": x.num_experts}
        rows = x.num_experts * layout.places(tokens, **sizes)
        row_formula = "E C"
    formula = f"(p-1)/p · {row_formula} h (dispatch u + combine u) / t · L"
    name = "to the experts and back, all-to-alls"
    sent = rows * width * (dispatch + u)
    back = rows * width * 2 * u
    yield Traffic("expert", name, formula, sent, back)


def _data(
    model: ModelShape, layout: Layout, u: int, gradient: int
) -> Iterable[Traffic]:
    """Returns the traffic of gradients of replicas, and of weights that ZeRO divides.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 7.
    """
    max_params = memory.max_device_params(model, layout)
    groups = (
        ("weights", max_params.shared, layout.copies),
        ("experts", max_params.experts, layout.copies // layout.expert),
    )
    for what, size, p in groups:
        if p == 1 or not size:
            continue
        share = exchanges.ring_share(p)
        reduce = share * size * gradient
        gather = share * size * u
        if layout.zero == 3:
            name = f"{what}: gathered twice, gradients reduced and scattered"
            formula = "3 (p-1)/p · N u"
            yield Traffic("data", name, formula, gather, gather + reduce)
        elif layout.zero:
            name = f"{what}: gradients reduced and scattered, weights gathered"
            yield Traffic("data", name, "2 (p-1)/p · N u", 0.0, reduce + gather)
        else:
            name = f"gradients of {what}, all-reduce"
            yield Traffic("data", name, "2 (p-1)/p · N u", 0.0, 2 * reduce)


@validation.checks_numbers(batch=validation.SIZES)
def decode_traffic(
    model: ModelShape, layout: Layout, *, batch: int, number_bytes: int = 2
) -> tuple[Traffic, ...]:
    """Lists the traffic of a device in a decoding step.

    The logits are gathered on every device, which all sample. With `gather` all
    devices that divide experts have all rows; otherwise each has `batch` rows.
    `backward` is 0.

    Args:
      model: shape of the model.
      layout: division over devices; ring, Ulysses and data send no bytes.
      batch: rows, one for each sequence in decoding, at least 1.
      number_bytes: bytes of a number that is sent.

    Raises:
      ValueError: a size is out of range, or a degree does not divide its size.
    """
    sent_in = StagePass(model, layout, batch, number_bytes)
    return (
        *_of_rows(sent_in),
        *_pages(sent_in),
        *_logits(model, layout, batch),
    )


@validation.checks_numbers(
    rows=validation.SIZES, logit_rows=validation.SIZES, num_taps=0
)
def prefill_traffic(
    model: ModelShape,
    layout: Layout,
    *,
    rows: int,
    logit_rows: int,
    num_taps: int = 0,
    number_bytes: int = 2,
) -> tuple[Traffic, ...]:
    """Lists the traffic of a device in a mixed step of prompt chunks and decoding.

    Devices that divide pages divide the rows as well, if the number of rows is a
    multiple: each then sends the data of its own rows only, except for attention.
    Otherwise all have all rows, as in decoding.

    Args:
      model: shape of the model.
      layout: as for `decode_traffic`.
      rows: rows of the pass, at least 1: an engine's `token_budget`.
      logit_rows: rows that give logits, at least 1.
      num_taps: hidden states of all rows that are kept for draft heads.
      number_bytes: bytes of a number that is sent.

    Raises:
      ValueError: as for `decode_traffic`.
    """
    sent_in = StagePass(model, layout, rows, number_bytes)
    if layout.pages == 1 or rows % layout.pages:
        row_traffic = _of_rows(sent_in)
        attention = _pages(sent_in)
    else:
        row_traffic = _of_rows(sent_in._replace(tokens=rows // layout.pages))
        attention = _row_parts(sent_in, logit_rows, num_taps)
        part = f"b s/{layout.pages}"
        row_traffic = [
            x._replace(formula=x.formula.replace("b s", part)) for x in row_traffic
        ]
    return (*row_traffic, *attention, *_logits(model, layout, logit_rows))


def _of_rows(sent_in: StagePass) -> Iterable[Traffic]:
    """Returns the traffic of a pass over rows without attention and logits."""
    parallelism.check_layout(sent_in.model, sent_in.layout)
    row_traffic = [
        *exchanges.tensor_traffic(sent_in),
        *exchanges.vocabulary_traffic(sent_in),
        *stages.hop_traffic(sent_in),
    ]
    a = sent_in.model.attention
    if isinstance(a, HeadAttention) and a.qk_norm and a.qk_norm_over == "layer":
        share = exchanges.ring_share(sent_in.layout.tensor)
        sent = 2 * share * 2 * 4 * sent_in.tokens * sent_in.layers
        name = "norms over all heads, all-reduces"
        row_traffic.append(Traffic("tensor", name, "2 (p-1)/p · 8 b s · L", sent, 0.0))
    if sent_in.layout.gather:
        # Outputs of experts for rows that every device has are summed.
        sent = 2 * exchanges.ring_share(sent_in.layout.expert) * sent_in.block
        sent *= sent_in.mixtures
        name = "experts' answers, all-reduce"
        formula = "2 (p-1)/p · b s h u · L"
        row_traffic.append(Traffic("expert", name, formula, sent, 0.0))
    else:
        row_traffic += _expert(sent_in, sent_in.u)
    for traffic in row_traffic:
        if traffic.forward and "target" not in traffic.name:
            yield traffic._replace(backward=0.0)


def _logits(model: ModelShape, layout: Layout, rows: int) -> Iterable[Traffic]:
    """Returns the traffic of logits, gathered for sampling on every device."""
    if layout.tensor > 1:
        sent = exchanges.ring_share(layout.tensor) * rows * model.vocab_size * 4
        name = "logits, all-gather"
        yield Traffic("vocabulary", name, "(p-1)/p · 4 b v", sent, 0.0)


def _pages(sent_in: StagePass) -> Iterable[Traffic]:
    """Returns the traffic of attention states over parts of pages, merged in float32.

    For every row and query head: an all-reduce of the maximum log-sum-exp, and one of
    the weighted values with the sum of the weights.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1, for the merge.
    """
    model, layout, rows, _ = sent_in
    if (p := layout.pages) == 1:
        return
    a = model.attention
    numbers = rows * a.num_q_heads / layout.tensor * (a.cached_value_dim + 2)
    sent = 2 * exchanges.ring_share(p) * numbers * 4 * sent_in.layers
    formula = "2 (p-1)/p · 4 b s n (d + 2) / t · L"
    yield Traffic("pages", "states of attention, all-reduces", formula, sent, 0.0)


def _row_parts(sent_in: StagePass, logit_rows: int, taps: int) -> Iterable[Traffic]:
    """Returns the traffic of attention if devices divide both pages and rows.

    Every device has 1/p of the queries, keys and values, which all need: an all-gather.
    It then has a state of attention for each row, and sends those of the rows of other
    devices to them: an all-to-all, of outputs in their type and log-sum-exps in
    float32. If there are fewer KV heads than tensor-parallel devices, they are
    replicated. Last hidden states of single rows are summed in float32, with zeros on
    all devices but one.

    Source: Yang et al. 2024, arXiv:2411.01783, section 3 (pass-Q).
    """
    model, layout, rows, u = sent_in
    a = model.attention
    share = exchanges.ring_share(layout.pages)
    ring_rows = share * rows / layout.tensor * sent_in.layers
    numbers = a.num_q_heads * a.key_dim
    if isinstance(a, HeadAttention):
        numbers += max(a.num_kv_heads, layout.tensor) * (a.key_dim + a.value_dim)
        name = "queries, keys and values"
        formula = "b s (n + 2 m) d u / t"
    else:
        # Tensor-parallel devices have the same latents.
        numbers += a.cached_numbers * layout.tensor
        name = "queries and latents"
        formula = "b s (n (dn + dr) / t + c + dr) u"
    name = f"{name}, all-gather"
    formula = f"(p-1)/p · {formula} · L"
    yield Traffic("pages", name, formula, ring_rows * numbers * u, 0.0)
    sent = ring_rows * a.num_q_heads * (a.cached_value_dim * u + 4)
    name = "states of attention"
    formula = "(p-1)/p · b s n (d u + 4) / t · L"
    yield Traffic("pages", f"{name}, all-to-alls", formula, sent, 0.0)
    sent = 2 * share * logit_rows * model.hidden_size * 4
    name = "last states of rows with logits, all-reduce"
    yield Traffic("pages", name, "2 (p-1)/p · 4 b h", sent, 0.0)
    if taps:
        sent = share * rows * taps * model.hidden_size * u
        name = "states for heads that draft, all-gather"
        yield Traffic("pages", name, f"{taps} (p-1)/p · b s h u", sent, 0.0)
