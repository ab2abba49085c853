"""Request arrivals, lengths and recordings, and serving metrics."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.workloads.agent_traces import AgentSessions
    from jaxkv.workloads.arrivals import (
        Chains,
        Dependencies,
        Workload,
        closed_loop,
        make_workload,
        open_loop,
        poisson,
    )
    from jaxkv.workloads.chunk_ids import ChunkIds
    from jaxkv.workloads.dataframes import make_dataframe, per_row
    from jaxkv.workloads.lengths import (
        ALPACA,
        SHAREGPT,
        Fixed,
        Gamma,
        Histogram,
        Lengths,
        LogNormal,
        Pair,
        rescale_to_means,
    )
    from jaxkv.workloads.load_curves import (
        LatencyCurve,
        Load,
        SustainedRate,
        choose_rates,
        draw_load,
        load_ratio,
        load_ratios,
        num_requests_for,
        sustained_rate,
    )
    from jaxkv.workloads.metrics import (
        JobTimes,
        Objectives,
        attainment,
        capacity,
        fifo_finish_s,
        find_jobs,
        gaps_between_tokens,
        goodput,
        md1_waiting_s,
        normalised_latency_s,
        percentile,
        recomputed_share,
        shared_page_saving,
        time_per_output_token_s,
        time_to_first_token_s,
    )
    from jaxkv.workloads.recordings import (
        Recording,
        cached_tokens,
        num_known_chunks,
        read_recording,
    )
    from jaxkv.workloads.sharegpt import read_sharegpt

__all__, __getattr__, __dir__ = lazy_exports(__name__)
