"""Shared tools of experiments: engines, models, prompts, cost models, timing."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from experiments.harness.kernels.calls import MAX_ERROR, Implementation, KernelRun
    from experiments.harness.kernels.runs import (
        attention_implementations,
        implementations_of,
    )
    from experiments.harness.length_distributions import (
        draw_lengths,
        measured_page_saving,
    )
    from experiments.harness.model_shapes import (
        RANDOM_SHAPES,
        load_benchmark_model,
        load_text_model,
        make_benchmark_config,
        make_engine,
    )
    from experiments.harness.named_costs import find_cost_model
    from experiments.harness.peers.language_models import MODEL_PEERS
    from experiments.harness.peers.peer_main import peak_bytes, reset_peak
    from experiments.harness.peers.peer_process import (
        PeerProcess,
        format_absent,
        start_peers,
    )
    from experiments.harness.prompts import (
        PromptRequest,
        RaggedConfig,
        cut_held_out_prompts,
        draw_ragged_lengths,
    )
    from experiments.harness.sentence_model import SentenceLanguage, SentenceModel
    from experiments.harness.serving import Server
    from experiments.harness.sharded_steps import (
        collective_bytes,
        count_compiled,
        predicted_traffic,
    )
    from experiments.harness.stepper import Stepper, make_stepper, slot_tokens
    from experiments.harness.sweep_tables import (
        RATE_HEADS,
        direction_verdict,
        format_interval,
        format_rates,
        judge_direction,
    )
    from experiments.harness.timing import (
        CallTimes,
        host_share,
        measure_in_turns,
        median_and_spread,
        median_seconds,
        record_call_times,
        time_call,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
